SELECT id, task, destination, seq, event, webhook, status, attempts, http_status, error, next_at, created_at, updated_at
FROM deliveries
WHERE tenant = ?1 AND status = 3
ORDER BY updated_at DESC
LIMIT ?2
