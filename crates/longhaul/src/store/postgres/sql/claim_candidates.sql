-- Reads tasks_ready from its start, in its own order, and stops: as many rows are visited with a
-- million pending tasks as with ten. For one queue and one handler, the common case.
SELECT t.id, t.rank, t.tenant, t.queue, t.handler, t.concurrency_key, t.attempts, t.max_attempts, t.crashes,
       t.deadline, t.last_seq, t.phase, t.created_at, t.trace, t.tags, t.updated_at, t.undo_on
FROM tasks t
WHERE t.ready AND t.queue = $2 AND t.handler = $3
  AND (t.deadline IS NULL OR t.deadline > (SELECT lh_now($1)) OR t.phase = 1)
  AND t.crashes < $5
  AND NOT EXISTS (SELECT 1 FROM pauses p WHERE p.queue = $2)
ORDER BY t.rank, t.id
LIMIT $4
FOR UPDATE SKIP LOCKED
