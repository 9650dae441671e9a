SELECT id, digest, created_at
FROM tasks
WHERE tenant = ?1 AND idem_key = ?2
