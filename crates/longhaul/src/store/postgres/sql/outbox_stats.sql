SELECT (SELECT count(*) FROM outbox WHERE due_at IS NOT NULL) + (SELECT count(*) FROM deliveries WHERE again),
       (SELECT min(due_at + 0) FROM outbox WHERE due_at IS NOT NULL),
       (SELECT min(next_at) FROM deliveries WHERE again),
       (SELECT count(*) FROM (SELECT 1 FROM deliveries WHERE status = 3 LIMIT 100000) AS dead),
       lh_now($1)
