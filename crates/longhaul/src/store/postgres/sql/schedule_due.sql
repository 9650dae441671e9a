-- A row that someone else has is being looked after; one that was changed meanwhile is checked again.
SELECT tenant, name, plan, paused, anchor, next_at, last_at, last_task, last_error
FROM schedules
WHERE due_at IS NOT NULL AND due_at <= (SELECT lh_now($1))
ORDER BY due_at
LIMIT $2
FOR UPDATE SKIP LOCKED
