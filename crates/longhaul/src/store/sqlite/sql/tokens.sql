SELECT id, name, tenant, role, created_at, expires_at, revoked_at, last_used_at
FROM tokens
WHERE ?1 IS NULL OR tenant = ?1
ORDER BY created_at, id
