INSERT INTO limits (name, max, running) VALUES (?1, ?2, ?3)
ON CONFLICT (name) DO UPDATE SET running = excluded.running
