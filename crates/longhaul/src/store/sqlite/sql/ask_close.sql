-- Only what was approved (2) can be used (5). Only what is pending (0) can expire (4), or what was
-- approved and not used in its time.
UPDATE asks
SET status = ?3
WHERE task = ?1 AND id = ?2
  AND CASE WHEN ?3 = 5 THEN status = 2 ELSE status = 0 OR (status = 2 AND expires_at <= ?4) END
