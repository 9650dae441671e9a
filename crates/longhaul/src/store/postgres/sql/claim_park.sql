UPDATE tasks t
SET ready = false, parked = d.parked
FROM unnest($1::uuid[], $2::text[]) AS d (id, parked)
WHERE t.id = ANY (ARRAY[d.id])
