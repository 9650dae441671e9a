SELECT id, task, kind, status, step, text, subject, digest, requested_at, expires_at, decided_by, decided_at, reason
FROM asks
WHERE task = ?1
ORDER BY requested_at, id
