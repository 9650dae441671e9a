-- What others than its runs recorded of a task since.
SELECT g.records FROM log g WHERE g.task = $1 AND g.seq > $2 AND g.run = 0 AND g.records IS NOT NULL
