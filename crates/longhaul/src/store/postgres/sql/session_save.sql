-- The rows of their locks are locked.
INSERT INTO lock_sessions (name, service, id, stage, token, until, look_at, trouble)
SELECT *
FROM unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::text[])
ON CONFLICT (name) DO UPDATE
SET service = excluded.service,
    id      = excluded.id,
    stage   = excluded.stage,
    token   = excluded.token,
    until   = excluded.until,
    look_at = excluded.look_at,
    trouble = excluded.trouble
