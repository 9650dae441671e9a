-- Runs that go on. The conditions are those of `rules::check_commit`; a row that is not returned is
-- read again to say why. No indexed column is set, so the new version of the row stays on its page
-- (HOT) and no index is touched. `d` comes in id order and is always the outer side of the join (see
-- `connect.rs`), so rows are locked in id order.
WITH now AS MATERIALIZED (
    SELECT lh_now($1) AS now, pg_current_xact_id()::text::bigint AS xact
),
written AS (
    UPDATE tasks t
    SET commit_no  = d.number,
        xact       = greatest(t.xact, now.xact),
        last_seq   = t.last_seq + d.count,
        crashes    = CASE WHEN d.recorded THEN 0 ELSE t.crashes END,
        progress   = coalesce(d.progress, t.progress),
        updated_at = now.now,
        undoable   = t.undoable OR d.undoable,
        phase      = coalesce(d.phase, t.phase),
        usage      = coalesce(d.usage, t.usage),
        undo_on    = coalesce(d.undo_on, t.undo_on)
    FROM now, unnest($2::uuid[], $3::bigint[], $4::bigint[], $5::boolean[], $6::boolean[], $7::bigint[],
                     $8::integer[], $9::text[], $10::text[], $11::text[], $12::boolean[], $13::smallint[],
                     $14::text[], $15::smallint[])
              AS d (id, fence, number, forward, recorded, known_seq, count, events, records, progress, undoable, phase,
                    usage, undo_on)
    WHERE t.id = ANY (ARRAY[d.id])
      AND t.fence = d.fence
      AND t.state + 0 = 1
      AND t.commit_no < d.number
      AND (NOT d.forward OR (t.cancel IS NULL AND (t.deadline IS NULL OR t.deadline > now.now)))
      AND (d.known_seq IS NULL OR d.known_seq >= t.last_seq)
    RETURNING t.id, t.fence, t.last_seq, t.xact, now.now, d.count, d.events, d.records
),
told AS (
    INSERT INTO log (task, seq, count, time, run, events, records, xact)
    SELECT w.id, w.last_seq - w.count + 1, w.count, w.now, w.fence, w.events, w.records, w.xact
    FROM written w
    WHERE w.count > 0
)
SELECT id, last_seq, now FROM written
