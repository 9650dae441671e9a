SELECT id, tenant, queue, deadline, priority, rank, state, phase, ready, due_at, run_at, parked, holds, fence,
       last_seq, attempts, crashes, cancel, waiting, error, finished_at, undoable, untold, undo_of, undone_by, undo_on
FROM tasks
WHERE id = ?1
