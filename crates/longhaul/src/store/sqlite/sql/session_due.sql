-- Sessions at ?1 for which it is time at ?2; their caller's until ?3.
UPDATE lock_sessions
SET look_at = ?3
WHERE name IN (SELECT name FROM lock_sessions WHERE service = ?1 AND look_at <= ?2 ORDER BY look_at LIMIT ?4)
RETURNING name, id, stage, token
