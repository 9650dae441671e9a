-- Lines of tasks that were just accepted; their first events are there already.
WITH lines AS (
    INSERT INTO outbox (task, destination, tenant, webhook, lane, finals, last_seq, due_at, created_at)
    SELECT d.task, d.destination, d.tenant, d.webhook, d.lane, d.finals, 1, CASE WHEN NOT d.finals THEN $1::bigint END, $1
    FROM unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::boolean[])
         AS d (task, destination, tenant, webhook, lane, finals)
)
UPDATE tasks SET hooked = true WHERE id = ANY ($2::uuid[])
