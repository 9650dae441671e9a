SELECT rowid, id, rank, concurrency_key, tenant, handler, queue, attempts, max_attempts, crashes, deadline, fence,
       last_seq, phase, created_at, trace, tags, NULL, undo_on, hooked
FROM tasks INDEXED BY tasks_running
WHERE state = 1 AND owner = ?1 AND claim_no = ?2
ORDER BY rank, id
