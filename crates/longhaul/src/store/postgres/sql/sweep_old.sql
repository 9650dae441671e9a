-- Finished tasks past their retention; none when no retention is set.
SELECT t.id
FROM tasks t
WHERE t.finished_at IS NOT NULL AND NOT t.untold
  AND t.finished_at <= (SELECT lh_now($1) - s.value::bigint FROM settings s WHERE s.name = 'retention')
  AND NOT t.locked
ORDER BY t.finished_at
LIMIT $2
FOR UPDATE SKIP LOCKED
