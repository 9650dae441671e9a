-- Whether the lock ?1 is held at ?3 under the token ?2.
SELECT 1
FROM locks l
LEFT JOIN lock_sessions s ON s.name = l.name AND s.stage = 1
WHERE l.name = ?1 AND l.token = ?2 AND l.holder IS NOT NULL AND l.until > ?3 AND (s.until IS NULL OR s.until > ?3)
