-- What firing changes; the rows are locked.
UPDATE schedules s
SET next_at = d.next_at, due_at = d.next_at, last_at = d.last_at, last_task = d.last_task, last_error = d.last_error
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::uuid[], $6::text[])
     AS d (tenant, name, next_at, last_at, last_task, last_error)
WHERE s.tenant = ANY (ARRAY[d.tenant]) AND s.name = ANY (ARRAY[d.name])
