-- The head of a queue's line is found per handler, by one step into tasks_ready each.
SELECT names.name,
       (SELECT coalesce(sum(pending), 0) FROM depths WHERE queue = names.name),
       (SELECT count(*) FROM tasks INDEXED BY tasks_running WHERE state = 1 AND queue = names.name),
       q.max_pending,
       q.max_running,
       (SELECT min((SELECT created_at
                    FROM tasks INDEXED BY tasks_ready
                    WHERE ready = 1 AND queue = names.name AND handler = h.name
                    ORDER BY rank, id
                    LIMIT 1))
        FROM handlers h),
       EXISTS (SELECT 1 FROM pauses WHERE pauses.queue = names.name)
FROM (SELECT name FROM queues UNION SELECT queue FROM depths UNION SELECT queue FROM pauses) names
LEFT JOIN queues q ON q.name = names.name
ORDER BY names.name
