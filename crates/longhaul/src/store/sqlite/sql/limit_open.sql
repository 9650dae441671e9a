-- Limits that have room although tasks are parked on them.
SELECT DISTINCT t.parked
FROM tasks t
JOIN limits l ON l.name = t.parked
WHERE t.parked IS NOT NULL AND l.running < l.max
