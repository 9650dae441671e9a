-- Children that ended and whose parents have not been told.
SELECT t.id, t.parent, t.state, t.result, t.error
FROM tasks t
WHERE t.untold AND t.state >= 3
ORDER BY t.parent
LIMIT $1
