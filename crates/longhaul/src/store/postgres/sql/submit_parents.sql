-- Locked, so that a cancel sees the child or the child sees the cancel.
SELECT t.id
FROM tasks t
WHERE t.id = ANY ($1::uuid[]) AND t.state < 3 AND t.cancel IS NULL AND t.phase = 0
ORDER BY t.id
FOR SHARE
