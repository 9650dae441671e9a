SELECT tenant, name, plan, paused, anchor, next_at, last_at, last_task, last_error
FROM schedules
WHERE tenant = $1
ORDER BY name
