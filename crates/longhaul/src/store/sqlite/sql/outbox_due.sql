-- An endpoint that is not there any more, or was added since, gives no webhook.
SELECT o.task, o.destination, o.tenant,
       coalesce(o.webhook, (SELECT e.webhook FROM endpoints e
                            WHERE e.tenant = o.tenant AND 'endpoint:' || e.name = o.destination
                              AND e.created_at <= o.created_at)),
       o.sent, o.attempts, o.first_at
FROM outbox o INDEXED BY outbox_lane
WHERE o.lane = ?1 AND o.due_at <= ?2
ORDER BY o.due_at
LIMIT ?3
