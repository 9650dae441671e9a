-- What is to be sent again by request, to where its destination is now, or else was then.
SELECT d.task, d.destination, d.tenant,
       coalesce((SELECT e.webhook FROM endpoints e WHERE e.tenant = d.tenant AND 'endpoint:' || e.name = d.destination),
                (SELECT o.webhook FROM outbox o
                 WHERE o.task = d.task AND o.destination = d.destination AND o.destination = 'reply'),
                d.webhook),
       d.seq, d.attempts, d.first_at, d.id
FROM deliveries d
WHERE d.again = 1 AND d.next_at <= ?1 AND (?3 OR d.destination <> 'reply')
ORDER BY d.next_at
LIMIT ?2
