-- Tasks, their first log rows and the pending counts in one statement. An entry whose id or key
-- is known is skipped and not returned. Its log row is skipped too when the id is known; for a
-- known key the caller removes it (`submit_orphans.sql`), which is rare: joining the accepted ids
-- back to the payload would compare every pair of them.
WITH here AS MATERIALIZED (
    SELECT pg_current_xact_id()::text::bigint AS xact
),
accepted AS (
    INSERT INTO tasks (id, tenant, handler, queue, concurrency_key, idem_key, digest, tags, max_attempts,
                       created_at, deadline, priority, rank, state, ready, due_at, run_at, parent, fork_of, trace,
                       last_seq, updated_at, undo_of, phase, undoable, xact)
    SELECT d.id, d.tenant, d.handler, d.queue, d.concurrency_key, d.idem_key, d.digest, d.tags, d.max_attempts,
           $1, d.deadline, d.priority, d.rank, 0, d.run_at IS NULL, least(d.run_at, d.deadline), d.run_at, d.parent, d.fork_of,
           d.trace, 1, $1, d.undo_of, CASE WHEN d.undo_of IS NULL THEN 0 ELSE 1 END, d.undo_of IS NOT NULL, here.xact
    FROM here, unnest($3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::bytea[], $10::text[],
                $11::integer[], $12::bigint[], $13::smallint[], $14::bigint[], $15::bigint[], $18::uuid[], $19::uuid[],
                $20::text[], $21::uuid[])
         AS d (id, tenant, handler, queue, concurrency_key, idem_key, digest, tags, max_attempts, deadline, priority,
               rank, run_at, parent, fork_of, trace, undo_of)
    ON CONFLICT DO NOTHING
    RETURNING id, queue
),
told AS (
    INSERT INTO log (task, seq, count, time, run, events, records, xact)
    SELECT d.id, 1, 1, $1, 0, d.events, d.records, here.xact
    FROM here, unnest($3::uuid[], $16::text[], $17::text[]) AS d (id, events, records)
    ON CONFLICT DO NOTHING
),
counted AS (
    INSERT INTO depths (queue, shard, pending)
    SELECT a.queue, $2::integer, count(*)
    FROM accepted a
    GROUP BY a.queue
    ORDER BY a.queue
    ON CONFLICT (queue, shard) DO UPDATE SET pending = depths.pending + excluded.pending
)
SELECT id FROM accepted
