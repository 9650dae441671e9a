SELECT min(due_at) - lh_now($1) FROM schedules WHERE due_at IS NOT NULL
