UPDATE limits l
SET running = d.running
FROM unnest($1::text[], $2::bigint[]) AS d (name, running)
WHERE l.name = ANY (ARRAY[d.name])
