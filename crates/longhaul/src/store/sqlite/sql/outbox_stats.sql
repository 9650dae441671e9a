SELECT (SELECT count(*) FROM outbox WHERE due_at IS NOT NULL) + (SELECT count(*) FROM deliveries WHERE again = 1),
       (SELECT min(due_at) FROM outbox WHERE due_at IS NOT NULL),
       (SELECT min(next_at) FROM deliveries WHERE again = 1),
       (SELECT count(*) FROM (SELECT 1 FROM deliveries INDEXED BY deliveries_dead WHERE status = 3 LIMIT 100000))
