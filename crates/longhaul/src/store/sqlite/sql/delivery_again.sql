UPDATE deliveries
SET status = ?3, attempts = ?4, http_status = ?5, error = ?6, next_at = ?7, again = ?7 IS NOT NULL, first_at = ?8,
    webhook = ?9, owner = NULL, updated_at = ?10
WHERE id = ?1 AND owner = ?2
