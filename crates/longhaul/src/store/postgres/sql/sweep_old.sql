-- Finished tasks past their retention of which nothing is left to be told; none when no retention is set.
SELECT t.id
FROM tasks t
WHERE t.finished_at IS NOT NULL AND NOT t.untold
  AND t.finished_at <= (SELECT lh_now($1) - s.value::bigint FROM settings s WHERE s.name = 'retention')
  AND NOT t.locked
  AND (NOT t.hooked
       OR NOT EXISTS (SELECT FROM outbox o WHERE o.task = t.id AND o.due_at IS NOT NULL)
          AND NOT EXISTS (SELECT FROM deliveries d WHERE d.task = t.id AND d.again))
ORDER BY t.finished_at
LIMIT $2
FOR UPDATE SKIP LOCKED
