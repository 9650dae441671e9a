-- $7 is for how long it can be used.
INSERT INTO tokens (id, hash, name, tenant, role, created_at, expires_at)
SELECT $1, $2, $3, $4, $5, now, now + $7
FROM (SELECT lh_now($6::bigint) AS now) AS clock
ON CONFLICT (id) DO UPDATE SET name = excluded.name
RETURNING id, name, tenant, role, created_at, expires_at, revoked_at, last_used_at
