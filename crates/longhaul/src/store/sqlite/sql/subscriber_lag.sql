-- How many log rows a subscriber has not passed, and the oldest of them; not more are looked at than ?2.
SELECT count(*), min(time)
FROM (SELECT time FROM log WHERE rowid >= ?1 AND count > 0 ORDER BY rowid LIMIT ?2)
