-- `d.way` says what is next: 0 its taker goes on, 1 it is let go, 2 it is tried again, 3 it ends; `d.wait` is
-- how long until it is due in cases 0 and 2. `d` comes in the order of ids.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now
)
UPDATE outbox o
SET sent     = greatest(o.sent, d.sent),
    attempts = d.attempts,
    first_at = d.first_at,
    due_at   = CASE WHEN d.way = 3 THEN NULL WHEN d.way <> 1 THEN now.now + d.wait
                    WHEN o.last_seq > d.sent THEN now.now END,
    owner    = CASE WHEN d.way = 0 THEN o.owner END,
    ended    = d.way = 3
FROM now, unnest($2::bigint[], $3::uuid[], $4::text[], $5::uuid[], $6::bigint[], $7::integer[], $8::bigint[],
                 $9::smallint[], $10::bigint[])
          AS d (n, task, destination, owner, sent, attempts, first_at, way, wait)
WHERE o.task = ANY (ARRAY[d.task]) AND o.destination = d.destination AND o.owner = d.owner
RETURNING d.n
