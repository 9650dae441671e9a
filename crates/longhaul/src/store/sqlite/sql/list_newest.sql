-- Pages by id, which grows with time. The unary plus keeps the planner off the other indexes,
-- whose order would need a sort of everything.
SELECT t.id, l.records, t.tenant, t.handler, t.queue, t.state, t.phase, t.waiting, t.priority, t.result, t.error,
       t.attempts, t.crashes, t.progress, t.usage, t.tags, t.parent, t.fork_of, t.undo_of, t.created_at,
       t.updated_at, t.finished_at, t.deadline, t.last_seq, t.fence,
       t.concurrency_key, t.max_attempts, t.undone_by
FROM tasks t
LEFT JOIN log l ON l.task = t.id AND l.seq = 1
WHERE +t.tenant = ?1
  AND (?2 IS NULL OR +t.state = ?2)
  AND (?3 IS NULL OR +t.handler = ?3)
  AND (?4 IS NULL OR +t.queue = ?4)
  AND (?5 IS NULL OR EXISTS (SELECT 1 FROM json_each(t.tags) tag WHERE tag.key = ?5 AND tag.value = ?6))
  AND (?7 IS NULL OR t.id < ?7)
ORDER BY t.id DESC
LIMIT ?8
