INSERT INTO queues (name, max_pending, max_running, ageing) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (name) DO UPDATE
SET max_pending = excluded.max_pending, max_running = excluded.max_running, ageing = excluded.ageing
