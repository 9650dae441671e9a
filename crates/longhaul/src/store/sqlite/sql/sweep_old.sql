-- Finished tasks past their retention of which nothing is left to be told.
SELECT t.id
FROM tasks t
WHERE t.finished_at IS NOT NULL AND t.finished_at <= ?1 AND t.locked = 0 AND t.untold = 0
  AND (t.hooked = 0
       OR NOT EXISTS (SELECT 1 FROM outbox o WHERE o.task = t.id AND o.due_at IS NOT NULL)
          AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.task = t.id AND d.again = 1))
ORDER BY t.finished_at
LIMIT ?2
