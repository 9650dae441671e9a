SELECT t.id, l.records, t.tenant, t.handler, t.queue, t.state, t.phase, t.waiting, t.priority, t.result, t.error,
       t.attempts, t.crashes, t.progress, t.usage, t.tags, t.parent, t.fork_of, t.undo_of, t.created_at,
       t.updated_at, t.finished_at, t.deadline, t.last_seq, t.fence,
       t.concurrency_key, t.max_attempts, t.undone_by,
       CASE WHEN t.hooked THEN (SELECT o.webhook FROM outbox o WHERE o.task = t.id AND o.destination = 'reply') END
FROM tasks t
LEFT JOIN log l ON l.task = ANY (ARRAY[t.id]) AND l.seq = 1
WHERE t.id = ANY ($1::uuid[]) AND t.tenant = $2
