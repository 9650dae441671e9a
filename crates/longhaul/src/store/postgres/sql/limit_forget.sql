-- A concurrency key's counter lives only while something counts in it or waits for it.
DELETE FROM limits l
WHERE l.name = ANY ($1::text[]) AND l.running = 0 AND NOT l.lasting
  AND (SELECT t.parked FROM tasks t WHERE t.parked = l.name ORDER BY t.rank, t.id LIMIT 1) IS NULL
