SELECT state, fence, commit_no, last_seq, cancel IS NOT NULL, deadline, queue, holds
FROM tasks
WHERE id = ?1
