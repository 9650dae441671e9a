-- Notes who undoes a task: one that has ended and was not opened again since, and that nobody else
-- undoes by now.
UPDATE tasks
SET undone_by = ?1
WHERE id = ?2 AND tenant = ?3 AND state >= 3 AND finished_at = ?4 AND (undone_by IS ?5 OR undone_by = ?1)
