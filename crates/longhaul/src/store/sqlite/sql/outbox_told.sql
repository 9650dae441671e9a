-- The lines of a task that tells something are due. A line that wants only ends, and that nothing was left to
-- do for, need not look at what came before this one. (Not a trigger on `tasks`, as on PostgreSQL: it would
-- make every update of a task one that can be taken back, which costs a copy of each page it changes.)
UPDATE outbox
SET last_seq = ?2,
    sent     = CASE WHEN due_at IS NULL AND finals = 1 AND ?3 THEN max(sent, ?4) ELSE sent END,
    due_at   = CASE WHEN due_at IS NULL AND (finals = 0 OR ?3) THEN ?5 ELSE due_at END
WHERE task = ?1 AND ended = 0
