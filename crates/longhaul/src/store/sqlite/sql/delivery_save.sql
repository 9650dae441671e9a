INSERT INTO deliveries (id, task, destination, tenant, seq, event, webhook, status, attempts, http_status, error,
                        next_at, created_at, updated_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?13)
ON CONFLICT (id) DO UPDATE
SET webhook = excluded.webhook, status = excluded.status, attempts = excluded.attempts,
    http_status = excluded.http_status, error = excluded.error, next_at = excluded.next_at,
    updated_at = excluded.updated_at
