-- Limits that have room although tasks are parked on them, and limits that are gone. The names are
-- found by one step into tasks_parked each, however many tasks are parked.
WITH RECURSIVE names AS (
    (SELECT t.parked AS name FROM tasks t WHERE t.parked IS NOT NULL ORDER BY t.parked LIMIT 1)
    UNION ALL
    SELECT (SELECT t.parked
            FROM tasks t
            WHERE t.parked IS NOT NULL AND t.parked > names.name
            ORDER BY t.parked
            LIMIT 1)
    FROM names
    WHERE names.name IS NOT NULL
)
SELECT n.name, coalesce(l.max - l.running, $1::bigint) AS room
FROM (SELECT name FROM names WHERE name IS NOT NULL LIMIT $1) AS n
LEFT JOIN limits l ON l.name = ANY (ARRAY[n.name])
WHERE l.name IS NULL OR l.running < l.max
