-- The next token is larger than $1. Nobody takes one meanwhile: the advisory lock is held.
SELECT setval('lock_tokens', greatest(t.last_value, $1)) FROM lock_tokens t
