WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now
),
seen AS (
    UPDATE workers w SET seen_at = now.now FROM now WHERE w.id = $2 RETURNING w.id
)
SELECT now.now, EXISTS (SELECT 1 FROM seen) AS listed FROM now
