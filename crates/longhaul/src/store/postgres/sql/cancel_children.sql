-- Everything below tasks that were cancelled: the sweep ends what does not run, a worker what does.
WITH RECURSIVE below (id, cancel) AS (
    SELECT t.id, d.cancel
    FROM unnest($2::uuid[], $3::text[]) AS d (id, cancel)
    JOIN tasks t ON t.parent = d.id
    UNION ALL
    SELECT t.id, below.cancel FROM below JOIN tasks t ON t.parent = below.id
)
UPDATE tasks t
SET cancel = below.cancel, due_at = CASE WHEN t.state = 1 THEN t.due_at ELSE $1 END
FROM below
WHERE t.id = ANY (ARRAY[below.id]) AND t.state < 3 AND t.cancel IS NULL
RETURNING t.id
