-- Pages by id, which grows with time; what does not match is passed by. read.rs puts in where from, and
-- what a partial index needs to be said again.
SELECT t.id
FROM {from} t
WHERE t.tenant = $1
  AND ($2::smallint IS NULL OR t.state = $2)
  AND ($3::text IS NULL OR t.handler = $3)
  AND ($4::text IS NULL OR t.queue = $4)
  AND ($5::text IS NULL OR t.tags::jsonb ->> $5 = $6::text)
  AND t.id {beyond} coalesce($7::uuid, '{edge}')
  AND ($9::uuid IS NULL OR t.parent = $9)
  {again}
ORDER BY t.id {order}
LIMIT $8
