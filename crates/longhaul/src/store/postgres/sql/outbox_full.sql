-- The bound, and how many lines are due; not more of them are counted than could matter.
SELECT (SELECT value FROM settings WHERE name = $1),
       (SELECT count(*) FROM (SELECT 1 FROM outbox WHERE due_at IS NOT NULL
                              LIMIT coalesce((SELECT value::bigint FROM settings WHERE name = $1), $2::bigint)) AS due)
