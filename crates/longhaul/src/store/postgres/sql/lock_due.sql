-- Tasks that ended and have not let go of their locks, locks that were held or waited for long
-- enough, free ones whose line has more who cannot use them than are looked at in one go, and sessions
-- that nobody kept, or nobody could give back.
(SELECT t.id AS task, NULL AS name FROM tasks t WHERE t.locked AND t.state >= 3 LIMIT $2)
UNION ALL
(SELECT NULL, l.name FROM locks l WHERE l.until <= (SELECT lh_now($1)) ORDER BY l.until LIMIT $2)
UNION ALL
(SELECT NULL, w.name FROM lock_waiters w WHERE w.until <= (SELECT lh_now($1)) ORDER BY w.until LIMIT $2)
UNION ALL
(SELECT NULL, l.name
 FROM locks l
 WHERE l.holder IS NULL AND NOT EXISTS (SELECT 1 FROM lock_sessions s WHERE s.name = l.name)
 LIMIT $2)
UNION ALL
(SELECT NULL, s.name FROM lock_sessions s WHERE s.until <= (SELECT lh_now($1)) ORDER BY s.until LIMIT $2)
