-- Only what is pending (0) can expire, only what was approved (2) can be used (5).
UPDATE asks
SET status = ?3
WHERE task = ?1 AND id = ?2 AND status = CASE WHEN ?3 = 5 THEN 2 ELSE 0 END
