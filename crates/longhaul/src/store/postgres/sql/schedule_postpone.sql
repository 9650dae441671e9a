UPDATE schedules SET due_at = $3, last_error = $4 WHERE tenant = $1 AND name = $2
