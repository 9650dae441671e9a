-- The rows of their locks are locked.
SELECT s.name, s.service, s.id, s.stage, s.token, s.until, s.look_at, s.trouble
FROM lock_sessions s
WHERE s.name = ANY ($1::text[])
