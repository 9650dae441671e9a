-- The rows that decisions are made from, locked in id order.
SELECT t.id, t.tenant, t.queue, t.deadline, t.priority, t.rank, t.state, t.phase, t.ready, t.due_at, t.run_at, t.parked, t.holds, t.fence, t.last_seq, t.attempts,
       t.crashes, t.cancel, t.waiting, t.error, t.finished_at, t.undoable, t.untold, t.undo_of, t.undone_by, t.undo_on
FROM tasks t
WHERE t.id = ANY ($1::uuid[])
ORDER BY t.id
FOR UPDATE
