SELECT id, name, tenant, role, created_at, expires_at, revoked_at, last_used_at,
       lh_now($2) AS now
FROM tokens
WHERE hash = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > lh_now($2))
