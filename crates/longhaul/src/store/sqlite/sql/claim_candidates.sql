-- Reads tasks_ready from its start, in its own order, and stops: as many rows are visited with a
-- million pending tasks as with ten.
SELECT rowid, id, rank, concurrency_key, tenant, handler, queue, attempts, max_attempts, crashes, deadline, fence,
       last_seq, phase, created_at, trace, tags, updated_at, undo_on, hooked
FROM tasks INDEXED BY tasks_ready
WHERE queue = ?1 AND handler = ?2 AND ready = 1 AND (deadline IS NULL OR deadline > ?3 OR phase = 1) AND crashes < ?4
  AND NOT EXISTS (SELECT 1 FROM pauses WHERE pauses.queue = ?1)
ORDER BY rank, id
LIMIT ?5
