INSERT INTO lock_sessions (name, service, id, stage, token, until, look_at, trouble)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
ON CONFLICT (name) DO UPDATE
SET service = excluded.service,
    id      = excluded.id,
    stage   = excluded.stage,
    token   = excluded.token,
    until   = excluded.until,
    look_at = excluded.look_at,
    trouble = excluded.trouble
