INSERT INTO workers (id, name, handlers, queues, slots, started_at, seen_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6)
ON CONFLICT (id) DO UPDATE
SET name = excluded.name, handlers = excluded.handlers, queues = excluded.queues, slots = excluded.slots,
    seen_at = excluded.seen_at
