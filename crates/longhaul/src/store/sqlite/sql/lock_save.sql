UPDATE locks
SET holder      = ?3,
    address     = ?4,
    acquired_at = CASE WHEN token = ?5 THEN acquired_at WHEN ?5 IS NOT NULL THEN ?1 END,
    token       = ?5,
    until       = ?6
WHERE name = ?2
