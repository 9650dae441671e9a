SELECT t.id
FROM tasks t
WHERE t.due_at IS NOT NULL AND t.due_at <= (SELECT lh_now($1))
ORDER BY t.due_at
LIMIT $2
FOR UPDATE SKIP LOCKED
