-- Only what is pending (0) can expire, only what was approved (2) can be used (5).
UPDATE asks a
SET status = d.status
FROM unnest($1::uuid[], $2::text[], $3::smallint[]) AS d (task, id, status)
WHERE a.task = ANY (ARRAY[d.task]) AND a.id = d.id AND a.status = CASE WHEN d.status = 5 THEN 2 ELSE 0 END
