SELECT name, service, id, stage, token, until, look_at, trouble FROM lock_sessions WHERE name = ?1
