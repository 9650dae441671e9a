-- One that is under way is left alone.
UPDATE deliveries
SET status = 0, attempts = 0, first_at = NULL, again = true, next_at = lh_now($2), updated_at = lh_now($2)
WHERE id = $1 AND owner IS NULL
