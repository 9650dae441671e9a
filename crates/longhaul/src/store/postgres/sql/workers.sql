SELECT w.id, w.name, w.handlers, w.queues, w.slots, w.started_at, w.seen_at,
       (SELECT count(*) FROM tasks t WHERE t.state = 1 AND t.owner = w.id) AS running
FROM workers w
ORDER BY w.started_at, w.id
