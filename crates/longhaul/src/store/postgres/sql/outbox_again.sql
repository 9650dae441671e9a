-- Takes what is to be sent again by request, to where its destination is now, or else was then.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now
),
picked AS MATERIALIZED (
    SELECT d.id
    FROM deliveries d
    WHERE d.again AND d.next_at <= (SELECT now FROM now) AND ($5 OR d.destination <> 'reply')
    ORDER BY d.next_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
UPDATE deliveries d
SET owner   = $3,
    next_at = now.now + $4
FROM now, picked p
WHERE d.id = ANY (ARRAY[p.id])
RETURNING d.task, d.destination, d.tenant,
          coalesce((SELECT e.webhook FROM endpoints e
                    WHERE e.tenant = d.tenant AND 'endpoint:' || e.name = d.destination),
                   (SELECT o.webhook FROM outbox o
                    WHERE o.task = d.task AND o.destination = d.destination AND o.destination = 'reply'), d.webhook),
          d.seq, d.attempts, d.first_at
