SELECT count(*) FROM tokens
WHERE tenant = $1 AND id <> $2 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > lh_now($3))
