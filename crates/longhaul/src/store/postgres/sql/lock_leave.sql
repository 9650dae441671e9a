DELETE FROM lock_waiters w
USING unnest($1::text[], $2::uuid[], $3::text[]) AS d (name, task, address)
WHERE w.task = ANY (ARRAY[d.task]) AND w.name = d.name AND w.address = d.address
