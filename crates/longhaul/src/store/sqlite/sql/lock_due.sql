-- Tasks that ended and have not let go of their locks, locks that were held or waited for long
-- enough, free ones whose line has more who cannot use them than are looked at in one go, and sessions
-- that nobody kept, or nobody could give back.
SELECT * FROM (SELECT id AS task, NULL AS name FROM tasks INDEXED BY tasks_locked WHERE locked = 1 AND state >= 3 LIMIT ?2)
UNION ALL
SELECT * FROM (SELECT NULL, name FROM locks WHERE until <= ?1 ORDER BY until LIMIT ?2)
UNION ALL
SELECT * FROM (SELECT NULL, name FROM lock_waiters WHERE until <= ?1 ORDER BY until LIMIT ?2)
UNION ALL
SELECT * FROM (SELECT NULL, name FROM locks l
               WHERE holder IS NULL AND NOT EXISTS (SELECT 1 FROM lock_sessions s WHERE s.name = l.name) LIMIT ?2)
UNION ALL
SELECT * FROM (SELECT NULL, name FROM lock_sessions WHERE until <= ?1 ORDER BY until LIMIT ?2)
