-- Notes who undoes a task: one that has ended and was not opened again since, and that nobody else
-- undoes by now.
UPDATE tasks t
SET undone_by = $1
WHERE t.id = $2 AND t.tenant = $3 AND t.state >= 3 AND t.finished_at = $4
  AND (t.undone_by IS NOT DISTINCT FROM $5 OR t.undone_by = $1)
