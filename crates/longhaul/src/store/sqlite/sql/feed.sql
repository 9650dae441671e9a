-- A row's number grows with every commit: there is one writer at a time.
SELECT l.rowid, l.task, t.tenant, l.seq, l.count, l.time, l.run, l.events, NULL
FROM log l
LEFT JOIN tasks t ON t.id = l.task
WHERE l.rowid >= ?1
ORDER BY l.rowid
LIMIT ?2
