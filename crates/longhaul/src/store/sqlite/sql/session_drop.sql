DELETE FROM lock_sessions WHERE name = ?1
