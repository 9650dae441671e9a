UPDATE tasks t
SET holds = d.holds
FROM unnest($1::uuid[], $2::text[]) AS d (id, holds)
WHERE t.id = ANY (ARRAY[d.id])
