-- Rows to lock; those that are there stay as they are.
INSERT INTO locks (name) SELECT d.name FROM unnest($1::text[]) AS d (name) ORDER BY d.name ON CONFLICT (name) DO NOTHING
