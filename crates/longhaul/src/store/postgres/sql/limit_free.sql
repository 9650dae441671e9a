-- Lowers counters (locked already, by `limit_lock.sql`) and readies as many of the tasks parked on
-- them as there is room for, lowest rank first. A task someone else has locked is passed by; the
-- sweep finds it.
WITH freed AS (
    UPDATE limits l
    SET running = greatest(l.running - d.count, 0)
    FROM unnest($1::text[], $2::bigint[]) AS d (name, count)
    WHERE l.name = ANY (ARRAY[d.name])
    RETURNING l.name, greatest(l.max - l.running, 0) AS room
),
next AS MATERIALIZED (
    SELECT parked.id
    FROM freed
    CROSS JOIN LATERAL (
        SELECT t.id
        FROM tasks t
        WHERE t.parked = freed.name AND t.parked IS NOT NULL
        ORDER BY t.rank, t.id
        LIMIT freed.room
        FOR UPDATE SKIP LOCKED
    ) AS parked
)
UPDATE tasks t
SET ready = true, parked = NULL
FROM next
WHERE t.id = ANY (ARRAY[next.id])
RETURNING t.id
