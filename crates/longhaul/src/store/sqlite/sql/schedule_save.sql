INSERT INTO schedules (tenant, name, plan, paused, anchor, next_at, due_at, last_at, last_task, last_error)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?7, ?8, ?9)
ON CONFLICT (tenant, name) DO UPDATE
SET plan = excluded.plan, paused = excluded.paused, anchor = excluded.anchor, next_at = excluded.next_at,
    due_at = excluded.due_at, last_at = excluded.last_at, last_task = excluded.last_task,
    last_error = excluded.last_error
