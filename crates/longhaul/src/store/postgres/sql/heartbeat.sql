-- No indexed column is set, so no index is touched. Rows are locked in the order given, by id.
UPDATE tasks t
SET lease_until = now.now + $2
FROM (SELECT lh_now($1) AS now OFFSET 0) AS now,
     unnest($3::uuid[], $4::bigint[]) AS d (id, fence)
WHERE t.id = ANY (ARRAY[d.id]) AND t.fence = d.fence AND t.state + 0 = 1
RETURNING t.id, t.fence, t.cancel, t.last_seq
