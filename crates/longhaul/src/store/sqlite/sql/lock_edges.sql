-- Whom a task waits for, and at which lock: its holder and those before it in line. Who stops
-- waiting by itself blocks nobody for ever, nor does a holder whose time is up.
SELECT w.task, w.name, l.holder
FROM lock_waiters w
JOIN locks l ON l.name = w.name
WHERE w.task = ?1 AND w.until IS NULL AND l.until > ?2
UNION ALL
SELECT w.task, w.name, a.task
FROM lock_waiters w
JOIN lock_waiters a ON a.name = w.name AND a.place < w.place
WHERE w.task = ?1 AND w.until IS NULL AND a.until IS NULL
LIMIT ?3
