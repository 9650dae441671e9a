-- A lease of another boot of this host has ended with it.
SELECT id, tenant, queue, deadline, priority, rank, state, phase, ready, due_at, run_at, parked, holds, fence,
       last_seq, attempts, crashes, cancel, waiting, error, finished_at, undoable, untold, undo_of, undone_by, undo_on
FROM tasks INDEXED BY tasks_running
WHERE state = 1 AND (lease_boot <> ?1 OR lease_until <= ?2)
LIMIT ?3
