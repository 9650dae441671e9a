-- At the end of the line; the lock's row is locked.
INSERT INTO lock_waiters (name, place, task, address, max_hold, until)
SELECT $1, coalesce((SELECT max(w.place) FROM lock_waiters w WHERE w.name = $1), 0) + 1, $2, $3, $4, $5
