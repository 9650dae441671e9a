-- The rows are locked.
UPDATE locks l
SET holder      = d.holder,
    address     = d.address,
    token       = d.token,
    acquired_at = CASE WHEN l.token = d.token THEN l.acquired_at WHEN d.token IS NOT NULL THEN $1 END,
    until       = d.until
FROM unnest($2::text[], $3::uuid[], $4::text[], $5::bigint[], $6::bigint[]) AS d (name, holder, address, token, until)
WHERE l.name = ANY (ARRAY[d.name])
