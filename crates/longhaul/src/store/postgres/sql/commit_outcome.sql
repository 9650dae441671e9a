-- As `commit_record.sql`, for batches in which some runs end: `d.state` is the state they leave
-- their task in, NULL for a run that goes on (whose other columns keep their values). `d.after` is
-- the pause before a retry or the longest wait. `d.waiting` is a JSON object to which the times are
-- added as text, because jsonb refuses some of what JSON may say. `holds` is returned and emptied by the caller, who
-- frees the limits; only tasks under a limit have any, and without `$23` those that end are left alone. `d.uses` are the approvals that are used, with
-- commas in between; one that has expired (`ask_expired.sql`) is not.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now, pg_current_xact_id()::text::bigint AS xact
),
written AS (
    UPDATE tasks t
    SET commit_no   = d.number,
        xact        = greatest(t.xact, now.xact),
        last_seq    = t.last_seq + d.count,
        crashes     = CASE WHEN d.recorded THEN 0 ELSE t.crashes END,
        progress    = coalesce(d.progress, t.progress),
        updated_at  = now.now,
        state       = coalesce(d.state, t.state),
        ready       = CASE WHEN d.state IS NULL THEN t.ready ELSE d.state = 0 AND d.after IS NULL END,
        run_at      = CASE WHEN d.state = 0 THEN now.now + d.after END,
        due_at      = CASE WHEN d.state IS NULL THEN t.due_at
                           WHEN d.state IN (0, 2)
                           THEN least(now.now + d.after, CASE WHEN coalesce(d.phase, t.phase) = 0 THEN t.deadline END) END,
        waiting     = CASE WHEN d.waiting IS NOT NULL
                           THEN left(d.waiting, -1) || ',"since":"' || lh_time(now.now) || '"'
                                || coalesce(',"until":"' || lh_time(now.now + d.after) || '"', '') || '}' END,
        result      = d.result,
        error       = CASE WHEN d.state IS NULL OR (d.error IS NULL AND t.phase = 1 AND d.state <> 3) THEN t.error ELSE d.error END,
        attempts    = t.attempts + d.attempts,
        finished_at = CASE WHEN d.state >= 3 THEN now.now END,
        undoable    = t.undoable OR d.undoable,
        phase       = CASE WHEN d.state >= 3 THEN 0 ELSE coalesce(d.phase, t.phase) END,
        usage       = coalesce(d.usage, t.usage),
        undo_on     = coalesce(d.undo_on, t.undo_on),
        untold      = d.state IS NOT NULL AND d.state >= 3 AND t.parent IS NOT NULL,
        owner       = CASE WHEN d.state IS NULL THEN t.owner END,
        claim_no    = CASE WHEN d.state IS NULL THEN t.claim_no END,
        lease_until = CASE WHEN d.state IS NULL THEN t.lease_until END
    FROM now, unnest($2::uuid[], $3::bigint[], $4::bigint[], $5::boolean[], $6::boolean[], $7::bigint[],
                     $8::integer[], $9::text[], $10::text[], $11::text[], $12::smallint[], $13::bigint[],
                     $14::integer[], $15::text[], $16::text[], $17::text[], $18::boolean[], $19::smallint[], $20::text[],
                     $21::text[], $22::smallint[])
              AS d (id, fence, number, forward, recorded, known_seq, count, events, records, progress, state, after,
                    attempts, waiting, result, error, undoable, phase, uses, usage, undo_on)
    WHERE t.id = ANY (ARRAY[d.id])
      AND t.fence = d.fence
      AND t.state + 0 = 1
      AND t.commit_no < d.number
      AND (NOT d.forward OR (t.cancel IS NULL AND (t.deadline IS NULL OR t.deadline > now.now)))
      AND (d.known_seq IS NULL OR d.known_seq >= t.last_seq)
      AND ($23 OR d.state IS NULL OR t.holds IS NULL)
      AND (d.uses IS NULL
           OR (SELECT min(a.id)
               FROM asks a
               WHERE a.task = d.id AND a.id = ANY (string_to_array(d.uses, ','))
                 AND (a.status = 4 OR (a.status = 2 AND a.expires_at <= now.now))) IS NULL)
    RETURNING t.id, t.fence, t.last_seq, t.queue, t.holds, t.state, t.untold, t.xact, now.now, d.count, d.events, d.records
),
told AS (
    INSERT INTO log (task, seq, count, time, run, events, records, xact)
    SELECT w.id, w.last_seq - w.count + 1, w.count, w.now, w.fence, w.events, w.records, w.xact
    FROM written w
    WHERE w.count > 0
)
SELECT id,
       last_seq,
       now,
       CASE WHEN state = 0 THEN queue END AS queue,
       CASE WHEN state <> 1 THEN holds END AS holds,
       untold
FROM written
