INSERT INTO limits (name, max, running, lasting) VALUES ($1, $2, $3, true)
ON CONFLICT (name) DO UPDATE SET max = excluded.max, running = excluded.running, lasting = true
