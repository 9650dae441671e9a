-- Larger than every token given before, and who has to give a lock beside the store. The shared lock keeps
-- the counter from being raised in between.
SELECT nextval('lock_tokens'), (SELECT s.value FROM settings s WHERE s.name = 'lock_service')
FROM pg_advisory_xact_lock_shared($1)
