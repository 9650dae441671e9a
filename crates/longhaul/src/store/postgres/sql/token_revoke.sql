UPDATE tokens SET revoked_at = coalesce(revoked_at, lh_now($3)) WHERE id = $1 AND tenant = $2
RETURNING id, name, tenant, role, created_at, expires_at, revoked_at, last_used_at
