SELECT id, name, handlers, queues, slots, started_at, seen_at,
       (SELECT count(*) FROM tasks INDEXED BY tasks_running WHERE state = 1 AND owner = workers.id)
FROM workers
ORDER BY started_at, id
