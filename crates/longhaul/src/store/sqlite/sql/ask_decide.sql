UPDATE asks
SET status = ?3, decided_at = ?4, decided_by = ?5, reason = ?6
WHERE task = ?1 AND id = ?2
