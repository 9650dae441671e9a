-- Larger than every token given before.
SELECT nextval('lock_tokens')
