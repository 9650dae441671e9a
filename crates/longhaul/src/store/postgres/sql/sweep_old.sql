-- Finished tasks past their retention of which nothing is left to be told; none when no retention is set. What some
-- subscriber has not passed stays: first by time, so that however much that is, it is not looked at, then exactly.
SELECT t.id
FROM tasks t
WHERE t.finished_at IS NOT NULL AND NOT t.untold
  AND t.finished_at <= (SELECT coalesce(min(s.passed_at), 9223372036854775807) FROM subscribers s)
  AND t.finished_at <= (SELECT lh_now($1) - s.value::bigint FROM settings s WHERE s.name = 'retention')
  AND NOT t.locked
  AND (SELECT min(s.at_order) FROM subscribers s
       WHERE s.at_order <= (SELECT l.xact FROM log l WHERE l.task = t.id ORDER BY l.seq DESC LIMIT 1)) IS NULL
  AND (NOT t.hooked
       OR NOT EXISTS (SELECT FROM outbox o WHERE o.task = t.id AND o.due_at IS NOT NULL)
          AND NOT EXISTS (SELECT FROM deliveries d WHERE d.task = t.id AND d.again))
ORDER BY t.finished_at
LIMIT $2
FOR UPDATE SKIP LOCKED
