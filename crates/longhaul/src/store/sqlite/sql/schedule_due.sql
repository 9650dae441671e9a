SELECT tenant, name, plan, paused, anchor, next_at, last_at, last_task, last_error
FROM schedules INDEXED BY schedules_due
WHERE due_at IS NOT NULL AND due_at <= ?1
ORDER BY due_at
LIMIT ?2
