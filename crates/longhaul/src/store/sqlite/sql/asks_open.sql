-- What waits for people in a tenant, oldest first. Tasks that ended wait no longer.
SELECT a.id, a.task, a.kind, a.status, a.step, a.text, a.subject, a.digest, a.requested_at, a.expires_at, a.decided_by,
       a.decided_at, a.reason
FROM asks a INDEXED BY asks_open
JOIN tasks t ON t.id = a.task
WHERE a.status = 0 AND (a.expires_at IS NULL OR a.expires_at > ?2) AND t.tenant = ?1 AND t.state < 3 AND t.phase = 0
ORDER BY a.requested_at, a.id
LIMIT 1000
