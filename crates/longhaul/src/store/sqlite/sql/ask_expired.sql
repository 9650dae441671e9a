-- Whether an approval can no longer be used.
SELECT 1
FROM asks
WHERE task = ?1 AND id = ?2 AND (status = 4 OR (status = 2 AND expires_at <= ?3))
