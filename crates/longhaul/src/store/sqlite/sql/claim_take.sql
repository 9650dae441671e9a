-- Without RETURNING, which would cost a temporary table and a statement journal for every row; what
-- it would return is known.
UPDATE tasks
SET state       = 1,
    ready       = 0,
    run_at      = NULL,
    due_at      = ?7,
    deadline    = ?11,
    holds       = ?6,
    fence       = ?9,
    owner       = ?2,
    claim_no    = ?3,
    lease_until = ?4,
    lease_boot  = ?5,
    commit_no   = 0,
    last_seq    = ?10,
    updated_at  = ?8
WHERE rowid = ?1
