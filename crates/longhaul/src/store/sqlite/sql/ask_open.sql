INSERT INTO asks (task, id, kind, status, step, text, subject, digest, requested_at, expires_at)
VALUES (?1, ?2, ?3, 0, ?4, ?5, ?6, ?7, ?8, ?9)
ON CONFLICT (task, id) DO NOTHING
