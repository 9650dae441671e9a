WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now
)
UPDATE deliveries d
SET status = $4, attempts = $5, http_status = $6, error = $7, next_at = now.now + $8::bigint, again = $8 IS NOT NULL,
    first_at = $9, webhook = $10, owner = NULL, updated_at = now.now
FROM now
WHERE d.id = $2 AND d.owner = $3
