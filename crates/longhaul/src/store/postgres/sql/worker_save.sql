INSERT INTO workers (id, name, handlers, queues, slots, started_at, seen_at)
SELECT $2, $3, $4, $5, $6, now.now, now.now
FROM (SELECT lh_now($1) AS now OFFSET 0) AS now
ON CONFLICT (id) DO UPDATE
SET name = excluded.name, handlers = excluded.handlers, queues = excluded.queues, slots = excluded.slots,
    seen_at = excluded.seen_at
