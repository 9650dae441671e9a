SELECT id, task, destination, seq, event, webhook, status, attempts, http_status, error, next_at, created_at, updated_at
FROM deliveries
WHERE task = $1 AND tenant = $2
ORDER BY seq DESC, destination
LIMIT $3
