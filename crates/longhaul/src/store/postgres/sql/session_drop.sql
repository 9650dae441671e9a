-- The rows of their locks are locked.
DELETE FROM lock_sessions WHERE name = ANY ($1::text[])
