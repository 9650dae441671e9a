-- The lanes after ?1 in which something is due, now or later: one look into the index for each.
WITH RECURSIVE lanes (lane) AS (
    SELECT (SELECT lane FROM outbox WHERE due_at IS NOT NULL AND lane > ?1 ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT o.lane FROM outbox o WHERE o.due_at IS NOT NULL AND o.lane > l.lane ORDER BY o.lane LIMIT 1)
    FROM lanes l
    WHERE l.lane IS NOT NULL
    LIMIT ?2
)
SELECT lane FROM lanes WHERE lane IS NOT NULL
