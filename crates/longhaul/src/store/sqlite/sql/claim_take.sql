UPDATE tasks
SET state       = 1,
    ready       = 0,
    run_at      = NULL,
    due_at      = deadline + ?7,
    holds       = ?6,
    fence       = fence + 1,
    owner       = ?2,
    claim_no    = ?3,
    lease_until = ?4,
    lease_boot  = ?5,
    commit_no   = 0,
    last_seq    = last_seq + 1,
    updated_at  = ?8
WHERE id = ?1
RETURNING id, fence, tenant, handler, queue, attempts, max_attempts, crashes, deadline, last_seq
