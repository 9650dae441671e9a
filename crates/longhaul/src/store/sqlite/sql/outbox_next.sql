SELECT (SELECT min(due_at) FROM outbox WHERE due_at IS NOT NULL),
       (SELECT min(next_at) FROM deliveries WHERE again = 1)
