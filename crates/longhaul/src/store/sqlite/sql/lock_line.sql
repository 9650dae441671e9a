-- Who waits for this lock: the first of the line, whoever waited long enough by ?2, and the task ?3.
SELECT name, place, task, address, max_hold, until
FROM (SELECT * FROM lock_waiters WHERE name = ?1 ORDER BY place LIMIT ?4)
UNION
SELECT name, place, task, address, max_hold, until FROM lock_waiters WHERE until <= ?2 AND +name = ?1
UNION
SELECT name, place, task, address, max_hold, until FROM lock_waiters WHERE task = ?3 AND +name = ?1
ORDER BY 2
