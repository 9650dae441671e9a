-- As `list_oldest.sql`, for the states that have an index of their own: few among many.
SELECT t.id
FROM tasks t
WHERE t.tenant = $1
  AND t.state = $2
  AND t.state IN (2, 4, 5)
  AND ($3::text IS NULL OR t.handler = $3)
  AND ($4::text IS NULL OR t.queue = $4)
  AND ($5::text IS NULL OR t.tags::jsonb ->> $5 = $6::text)
  AND t.id > coalesce($7::uuid, '00000000-0000-0000-0000-000000000000')
ORDER BY t.id
LIMIT $8
