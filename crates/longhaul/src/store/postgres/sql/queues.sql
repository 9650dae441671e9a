-- The head of a queue's line is found per handler, by one step into tasks_ready each.
WITH running AS MATERIALIZED (
    SELECT t.queue, count(*) AS count FROM tasks t WHERE t.state = 1 GROUP BY t.queue
),
pending AS MATERIALIZED (
    SELECT d.queue, sum(d.pending)::bigint AS count FROM depths d GROUP BY d.queue
)
SELECT names.name,
       coalesce((SELECT p.count FROM pending p WHERE p.queue = names.name), 0) AS pending,
       coalesce((SELECT r.count FROM running r WHERE r.queue = names.name), 0) AS running,
       q.max_pending,
       q.max_running,
       (SELECT min(head.created_at)
        FROM handlers h
        CROSS JOIN LATERAL (
            SELECT t.created_at
            FROM tasks t
            WHERE t.ready AND t.queue = names.name AND t.handler = h.name
            ORDER BY t.rank, t.id
            LIMIT 1
        ) AS head) AS oldest,
       EXISTS (SELECT 1 FROM pauses p WHERE p.queue = names.name) AS paused
FROM (SELECT name FROM queues UNION SELECT queue FROM pending UNION SELECT queue FROM pauses) AS names
LEFT JOIN queues q ON q.name = names.name
ORDER BY names.name
