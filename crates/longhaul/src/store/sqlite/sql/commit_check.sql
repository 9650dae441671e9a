SELECT state, fence, commit_no, last_seq, cancel IS NOT NULL, deadline, queue, holds, rowid, phase
FROM tasks
WHERE id = ?1
