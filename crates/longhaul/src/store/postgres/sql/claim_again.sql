SELECT t.id, t.rank, t.tenant, t.queue, t.handler, t.concurrency_key, t.attempts, t.max_attempts, t.crashes,
       t.deadline, t.last_seq, t.phase, t.created_at, t.trace, t.tags, NULL::bigint AS in_line_since, t.undo_on, t.fence
FROM tasks t
WHERE t.state = 1 AND t.owner = $1 AND t.claim_no = $2
ORDER BY t.rank, t.id
