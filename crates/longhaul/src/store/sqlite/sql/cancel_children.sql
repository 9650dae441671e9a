-- Everything below a task that was cancelled: the sweep ends what does not run, a worker what does.
WITH RECURSIVE below (id) AS (
    SELECT id FROM tasks WHERE parent = ?1
    UNION ALL
    SELECT t.id FROM tasks t JOIN below ON t.parent = below.id
)
UPDATE tasks
SET cancel = ?2, due_at = CASE WHEN state = 1 THEN due_at ELSE ?3 END
WHERE id IN (SELECT id FROM below) AND state < 3 AND cancel IS NULL
RETURNING id
