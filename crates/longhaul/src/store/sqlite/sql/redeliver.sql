-- One that is under way is left alone.
UPDATE deliveries
SET status = 0, attempts = 0, first_at = NULL, again = 1, next_at = ?2, updated_at = ?2
WHERE id = ?1 AND owner IS NULL
