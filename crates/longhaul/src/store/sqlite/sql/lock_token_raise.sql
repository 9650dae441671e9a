-- The next token is larger than ?1.
INSERT INTO settings (name, value) VALUES ('lock_token', CAST(?1 AS TEXT))
ON CONFLICT (name) DO UPDATE SET value = CAST(max(CAST(value AS INTEGER), ?1) AS TEXT)
