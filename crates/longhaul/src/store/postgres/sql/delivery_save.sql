INSERT INTO deliveries (id, task, destination, tenant, seq, event, webhook, status, attempts, http_status, error,
                        next_at, created_at, updated_at)
SELECT d.id, d.task, d.destination, d.tenant, d.seq, d.event, d.webhook, d.status, d.attempts, d.http_status, d.error,
       now.now + d.wait, now.now, now.now
FROM (SELECT lh_now($1) AS now) AS now,
     unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::bigint[], $7::text[], $8::text[], $9::smallint[],
            $10::integer[], $11::integer[], $12::text[], $13::bigint[])
     AS d (id, task, destination, tenant, seq, event, webhook, status, attempts, http_status, error, wait)
ON CONFLICT (id) DO UPDATE
SET webhook = excluded.webhook, status = excluded.status, attempts = excluded.attempts,
    http_status = excluded.http_status, error = excluded.error, next_at = excluded.next_at,
    updated_at = excluded.updated_at
