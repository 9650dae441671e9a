-- The same for several queues and handlers. First, without locks, how many of the best rows each
-- pair has; then so many are locked per pair. Locking the best of each pair at once would hide up
-- to pairs x limit rows from other workers.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now
),
share AS MATERIALIZED (
    SELECT best.queue, best.handler, count(*) AS wanted
    FROM (
        SELECT head.queue, head.handler
        FROM now
        CROSS JOIN (
            SELECT asked.name FROM unnest($2::text[]) AS asked (name)
            WHERE NOT EXISTS (SELECT 1 FROM pauses p WHERE p.queue = asked.name)
        ) AS q
        CROSS JOIN unnest($3::text[]) AS h (name)
        CROSS JOIN LATERAL (
            SELECT t.queue, t.handler, t.rank, t.id
            FROM tasks t
            WHERE t.ready AND t.queue = q.name AND t.handler = h.name
              AND (t.deadline IS NULL OR t.deadline > now.now OR t.phase = 1)
              AND t.crashes < $5
            ORDER BY t.rank, t.id
            LIMIT $4
        ) AS head
        ORDER BY head.rank, head.id
        LIMIT $4
    ) AS best
    GROUP BY best.queue, best.handler
)
SELECT c.*
FROM now
CROSS JOIN share
CROSS JOIN LATERAL (
    SELECT t.id, t.rank, t.tenant, t.queue, t.handler, t.concurrency_key, t.attempts, t.max_attempts, t.crashes,
           t.deadline, t.last_seq, t.phase, t.created_at, t.trace, t.tags, t.updated_at, t.undo_on
    FROM tasks t
    WHERE t.ready AND t.queue = share.queue AND t.handler = share.handler
      AND (t.deadline IS NULL OR t.deadline > now.now OR t.phase = 1)
      AND t.crashes < $5
    ORDER BY t.rank, t.id
    LIMIT share.wanted
    FOR UPDATE SKIP LOCKED
) AS c
ORDER BY c.rank, c.id
