SELECT id, created_at
FROM tasks
WHERE tenant = ?1 AND digest = ?2 AND idem_key IS NULL AND created_at > ?3
ORDER BY created_at DESC
LIMIT 1
