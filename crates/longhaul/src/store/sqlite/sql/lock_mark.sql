-- Whether the task may hold a lock or wait for one.
UPDATE tasks SET locked = ?2 WHERE id = ?1 AND locked <> ?2
