SELECT id, tenant, queue, deadline, priority, rank, state, phase, ready, due_at, run_at, parked, holds, fence,
       last_seq, attempts, crashes, cancel, waiting, error, finished_at, undoable, untold, undo_of, undone_by, undo_on
FROM tasks INDEXED BY tasks_due
WHERE due_at IS NOT NULL AND due_at <= ?1
ORDER BY due_at
LIMIT ?2
