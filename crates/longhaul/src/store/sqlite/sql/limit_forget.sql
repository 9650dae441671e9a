-- A concurrency key's counter lives only while something counts in it or waits for it.
DELETE FROM limits
WHERE name = ?1 AND running = 0 AND lasting = 0
  AND NOT EXISTS (SELECT 1 FROM tasks WHERE parked = ?1)
