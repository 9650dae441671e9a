SELECT seq, count, time, run, events, records
FROM log
WHERE task = ?1
ORDER BY seq
