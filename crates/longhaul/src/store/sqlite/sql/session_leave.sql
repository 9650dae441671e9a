-- Whoever is asked for a lock and is not ?1 need not give it any more.
UPDATE lock_sessions SET stage = 2, until = ?2 + ?3, look_at = ?2 WHERE stage = 0 AND service IS NOT ?1
