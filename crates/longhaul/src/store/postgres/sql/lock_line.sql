-- Who waits for these locks: the first of each line, whoever waited long enough by $2, and the tasks $3.
SELECT w.name, w.place, w.task, w.address, w.max_hold, w.until
FROM unnest($1::text[]) AS d (name)
CROSS JOIN LATERAL (
    (SELECT f.* FROM lock_waiters f WHERE f.name = d.name ORDER BY f.place LIMIT $4)
    UNION
    (SELECT e.* FROM lock_waiters e WHERE e.until <= $2 AND e.name = d.name)
    UNION
    (SELECT m.* FROM lock_waiters m WHERE m.task = ANY ($3::uuid[]) AND m.name = d.name)
) AS w
ORDER BY w.name, w.place
