SELECT state, fence, commit_no, last_seq, cancel IS NOT NULL, deadline, queue, holds, rowid, phase, parent IS NOT NULL, hooked
FROM tasks
WHERE id = ?1
