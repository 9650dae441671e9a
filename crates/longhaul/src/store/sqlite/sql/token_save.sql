INSERT INTO tokens (id, hash, name, tenant, role, created_at, expires_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (id) DO UPDATE SET name = excluded.name
RETURNING id, name, tenant, role, created_at, expires_at, revoked_at, last_used_at
