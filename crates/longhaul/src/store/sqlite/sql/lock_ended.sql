-- Whether the task ended and has not let go yet.
SELECT id FROM tasks WHERE id = ?1 AND locked = 1 AND state >= 3
