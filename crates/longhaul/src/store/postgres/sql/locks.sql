-- The locks from the name $1 to the name $2.
SELECT l.name, l.holder, l.token, l.acquired_at, l.until,
       (SELECT count(DISTINCT w.task) FROM lock_waiters w WHERE w.name = l.name), s.service, s.trouble
FROM locks l
LEFT JOIN lock_sessions s ON s.name = l.name
WHERE l.name >= $1 AND l.name < $2
ORDER BY l.name
LIMIT $3
