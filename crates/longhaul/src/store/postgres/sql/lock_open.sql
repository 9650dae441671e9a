-- A row to lock; one that is there stays as it is.
INSERT INTO locks (name) VALUES ($1) ON CONFLICT (name) DO NOTHING
