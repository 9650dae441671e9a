-- Whom these tasks wait for, and at which lock: its holder and those before them in line. Who stops
-- waiting by itself blocks nobody for ever, nor does a holder whose time is up.
(SELECT w.task, w.name, l.holder
 FROM lock_waiters w
 JOIN locks l ON l.name = ANY (ARRAY[w.name])
 WHERE w.task = ANY ($1::uuid[]) AND w.until IS NULL AND l.until > $2)
UNION ALL
(SELECT w.task, w.name, a.task
 FROM lock_waiters w
 JOIN lock_waiters a ON a.name = ANY (ARRAY[w.name]) AND a.place < w.place
 WHERE w.task = ANY ($1::uuid[]) AND w.until IS NULL AND a.until IS NULL
 LIMIT $3)
