UPDATE asks a
SET status = d.status, decided_at = $1, decided_by = d.decided_by, reason = d.reason
FROM unnest($2::uuid[], $3::text[], $4::smallint[], $5::text[], $6::text[]) AS d (task, id, status, decided_by, reason)
WHERE a.task = ANY (ARRAY[d.task]) AND a.id = d.id
