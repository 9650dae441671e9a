-- What others than its runs recorded of a task since.
SELECT records FROM log WHERE task = ?1 AND seq > ?2 AND run = 0 AND records IS NOT NULL
