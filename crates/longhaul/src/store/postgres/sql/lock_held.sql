-- Which of the locks are held under these tokens; they stay so until this transaction ends.
SELECT l.name, l.token
FROM unnest($1::text[], $2::bigint[]) AS d (name, token)
JOIN locks l ON l.name = ANY (ARRAY[d.name])
WHERE l.token = d.token
  AND l.holder IS NOT NULL
  AND l.until > lh_now($3)
  AND NOT EXISTS (SELECT 1 FROM lock_sessions s WHERE s.name = l.name AND s.stage = 1 AND s.until <= lh_now($3))
ORDER BY d.name
FOR SHARE OF l
