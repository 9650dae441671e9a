SELECT seq, seq + count - 1
FROM log
WHERE task = ?1 AND run = ?2
ORDER BY seq DESC
LIMIT 1
