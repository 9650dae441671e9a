-- The locks that a task holds or waits for.
SELECT name FROM locks WHERE holder = ?1
UNION
SELECT name FROM lock_waiters WHERE task = ?1
