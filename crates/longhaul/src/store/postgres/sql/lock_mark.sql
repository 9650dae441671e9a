-- Whether these tasks may hold a lock or wait for one; their rows are locked.
UPDATE tasks SET locked = $2 WHERE id = ANY ($1::uuid[]) AND locked <> $2
