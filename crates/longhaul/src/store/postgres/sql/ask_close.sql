-- Only what was approved (2) can be used (5). Only what is pending (0) can expire (4), or what was
-- approved and not used in its time.
UPDATE asks a
SET status = d.status
FROM unnest($1::uuid[], $2::text[], $3::smallint[]) AS d (task, id, status)
WHERE a.task = ANY (ARRAY[d.task]) AND a.id = d.id
  AND CASE WHEN d.status = 5 THEN a.status = 2 ELSE a.status = 0 OR (a.status = 2 AND a.expires_at <= $4) END
