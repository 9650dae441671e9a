SELECT state, fence, commit_no, last_seq, cancel IS NOT NULL, deadline, queue, holds, rowid
FROM tasks
WHERE id = ?1
