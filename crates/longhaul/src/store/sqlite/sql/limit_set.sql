INSERT INTO limits (name, max, running, lasting) VALUES (?1, ?2, ?3, 1)
ON CONFLICT (name) DO UPDATE SET max = excluded.max, running = excluded.running, lasting = 1
