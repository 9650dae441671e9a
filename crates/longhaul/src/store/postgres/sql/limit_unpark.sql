-- Readies so many of the tasks parked on each of these limits, lowest rank first.
WITH next AS MATERIALIZED (
    SELECT parked.id
    FROM unnest($1::text[], $2::bigint[]) AS d (name, room)
    CROSS JOIN LATERAL (
        SELECT t.id
        FROM tasks t
        WHERE t.parked = d.name AND t.parked IS NOT NULL
        ORDER BY t.rank, t.id
        LIMIT d.room
        FOR UPDATE SKIP LOCKED
    ) AS parked
)
UPDATE tasks t
SET ready = true, parked = NULL
FROM next
WHERE t.id = ANY (ARRAY[next.id])
