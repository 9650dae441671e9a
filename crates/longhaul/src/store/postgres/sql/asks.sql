SELECT a.id, a.task, a.kind, a.status, a.step, a.text, a.subject, a.digest, a.requested_at, a.expires_at, a.decided_by,
       a.decided_at, a.reason
FROM asks a
WHERE a.task = ANY ($1::uuid[])
ORDER BY a.requested_at, a.id
