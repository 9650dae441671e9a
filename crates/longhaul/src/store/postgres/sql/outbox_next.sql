SELECT least((SELECT min(due_at + 0) FROM outbox WHERE due_at IS NOT NULL),
             (SELECT min(next_at) FROM deliveries WHERE again)) - lh_now($1)
