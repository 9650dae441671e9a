-- Sessions at $1 for which it is time, as far as nobody else has them; their caller's for $3 from now on.
WITH now AS MATERIALIZED (SELECT lh_now($2) AS at),
due AS MATERIALIZED (
    SELECT s.name
    FROM lock_sessions s
    WHERE s.service = $1 AND s.look_at <= (SELECT at FROM now)
    ORDER BY s.look_at
    LIMIT $4
    FOR UPDATE SKIP LOCKED
)
UPDATE lock_sessions s
SET look_at = now.at + $3
FROM due, now
WHERE s.name = ANY (ARRAY[due.name])
RETURNING s.name, s.id, s.stage, s.token, now.at
