-- Finished tasks past their retention of which nothing is left to be told. What some subscriber has not passed stays:
-- first by time, so that however much that is, it is not looked at, then exactly.
SELECT t.id
FROM tasks t
WHERE t.finished_at IS NOT NULL AND t.finished_at <= ?1 AND t.locked = 0 AND t.untold = 0
  AND t.finished_at <= (SELECT coalesce(min(s.passed_at), 9223372036854775807) FROM subscribers s)
  AND NOT EXISTS (SELECT 1 FROM subscribers s
                  WHERE s.at_order + (s.at_seq > 0)
                        <= (SELECT l.rowid FROM log l WHERE l.task = t.id ORDER BY l.seq DESC LIMIT 1))
  AND (t.hooked = 0
       OR NOT EXISTS (SELECT 1 FROM outbox o WHERE o.task = t.id AND o.due_at IS NOT NULL)
          AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.task = t.id AND d.again = 1))
ORDER BY t.finished_at
LIMIT ?2
