-- The rows are locked already (`claim_candidates.sql`). The log is fed from what the update
-- returns, so nothing is joined twice.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now, pg_current_xact_id()::text::bigint AS xact
),
taken AS (
    UPDATE tasks t
    SET state       = 1,
        ready       = false,
        parked      = NULL,
        run_at      = NULL,
        deadline    = coalesce(t.deadline, d.deadline),
        due_at      = CASE WHEN t.phase = 0 THEN coalesce(t.deadline, d.deadline) + $5 END,
        holds       = d.holds,
        fence       = t.fence + 1,
        owner       = $2,
        claim_no    = $3,
        lease_until = now.now + $4,
        commit_no   = 0,
        last_seq    = t.last_seq + 1,
        xact        = greatest(t.xact, now.xact),
        updated_at  = now.now
    FROM now, unnest($6::uuid[], $7::text[], $9::bigint[]) AS d (id, holds, deadline)
    WHERE t.id = ANY (ARRAY[d.id])
    RETURNING t.id, t.fence, t.last_seq, t.xact, now.now
),
told AS (
    INSERT INTO log (task, seq, count, time, run, events, xact)
    SELECT taken.id, taken.last_seq, 1, taken.now, taken.fence, $8, taken.xact FROM taken
)
SELECT id, fence, now FROM taken
