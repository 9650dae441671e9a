SELECT id, parent, state, result, error
FROM tasks INDEXED BY tasks_untold
WHERE untold = 1 AND state >= 3
ORDER BY parent
LIMIT ?1
