-- Larger than every token given before.
INSERT INTO settings (name, value) VALUES ('lock_token', '1')
ON CONFLICT (name) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)
RETURNING CAST(value AS INTEGER)
