-- A free lock that nobody waits for.
DELETE FROM locks
WHERE name = ?1 AND holder IS NULL AND NOT EXISTS (SELECT 1 FROM lock_waiters w WHERE w.name = ?1)
