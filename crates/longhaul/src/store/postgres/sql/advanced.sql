SELECT d.id, coalesce(t.last_seq, 0) AS last_seq
FROM unnest($1::uuid[], $2::bigint[]) AS d (id, seen)
LEFT JOIN tasks t ON t.id = ANY (ARRAY[d.id])
WHERE t.id IS NULL OR t.last_seq > d.seen
