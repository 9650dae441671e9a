-- At the end of the line.
INSERT INTO lock_waiters (name, place, task, address, max_hold, until)
SELECT ?1, coalesce((SELECT max(place) FROM lock_waiters WHERE name = ?1), 0) + 1, ?2, ?3, ?4, ?5
