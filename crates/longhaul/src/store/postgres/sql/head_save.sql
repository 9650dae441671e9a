-- Writes what a decision changed. Whoever is not running holds no lease.
UPDATE tasks t
SET priority    = d.priority,
    rank        = d.rank,
    state       = d.state,
    phase       = d.phase,
    ready       = d.ready,
    due_at      = d.due_at,
    run_at      = d.run_at,
    parked      = d.parked,
    holds       = d.holds,
    fence       = d.fence,
    last_seq    = d.last_seq,
    xact        = greatest(t.xact, pg_current_xact_id()::text::bigint),
    attempts    = d.attempts,
    crashes     = d.crashes,
    cancel      = d.cancel,
    waiting     = d.waiting,
    error       = d.error,
    finished_at = d.finished_at,
    untold      = d.state >= 3 AND (t.untold OR (t.state < 3 AND t.parent IS NOT NULL)),
    updated_at  = $1,
    owner       = CASE WHEN d.state = 1 THEN t.owner END,
    claim_no    = CASE WHEN d.state = 1 THEN t.claim_no END,
    lease_until = CASE WHEN d.state = 1 THEN t.lease_until END
FROM unnest($2::uuid[], $3::smallint[], $4::bigint[], $5::smallint[], $6::smallint[], $7::boolean[], $8::bigint[],
            $9::bigint[], $10::text[], $11::text[], $12::bigint[], $13::bigint[], $14::integer[], $15::integer[],
            $16::text[], $17::text[], $18::text[], $19::bigint[])
     AS d (id, priority, rank, state, phase, ready, due_at, run_at, parked, holds, fence, last_seq, attempts, crashes,
           cancel, waiting, error, finished_at)
WHERE t.id = ANY (ARRAY[d.id])
