-- Pages by id, which grows with time; what does not match is passed by.
SELECT t.id
FROM tasks t
WHERE t.tenant = $1
  AND ($2::smallint IS NULL OR t.state = $2)
  AND ($3::text IS NULL OR t.handler = $3)
  AND ($4::text IS NULL OR t.queue = $4)
  AND ($5::text IS NULL OR t.tags::jsonb ->> $5 = $6::text)
  AND ($7::uuid IS NULL OR t.id < $7)
ORDER BY t.id DESC
LIMIT $8
