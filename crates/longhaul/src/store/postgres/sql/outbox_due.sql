-- Takes what is due in each lane, as much as there is room for. An endpoint that is not there any more,
-- or was added since, gives no webhook.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now
),
picked AS MATERIALIZED (
    SELECT p.task, p.destination
    FROM now
    CROSS JOIN unnest($2::text[], $3::bigint[]) AS l (lane, room)
    CROSS JOIN LATERAL (
        SELECT o.task, o.destination
        FROM outbox o
        WHERE o.lane = l.lane AND o.due_at <= now.now
        ORDER BY o.due_at
        LIMIT l.room
        FOR UPDATE SKIP LOCKED
    ) p
    LIMIT $4
)
UPDATE outbox o
SET owner  = $5,
    due_at = now.now + $6
FROM now, picked p
WHERE o.task = ANY (ARRAY[p.task]) AND o.destination = p.destination
RETURNING o.task, o.destination, o.tenant,
          coalesce(o.webhook, (SELECT e.webhook FROM endpoints e
                               WHERE e.tenant = o.tenant AND 'endpoint:' || e.name = o.destination
                                 AND e.created_at <= o.created_at)),
          o.sent, o.attempts, o.first_at, o.lane
