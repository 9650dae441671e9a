-- The newest equal task of each entry, when it is young enough. Runs under the digests' locks.
SELECT d.n, known.id, known.created_at
FROM unnest($1::text[], $2::bytea[], $3::bigint[]) WITH ORDINALITY AS d (tenant, digest, since, n)
CROSS JOIN LATERAL (
    SELECT t.id, t.created_at
    FROM tasks t
    WHERE t.tenant = d.tenant AND t.digest = d.digest AND t.digest IS NOT NULL AND t.idem_key IS NULL
      AND t.created_at > d.since
    ORDER BY t.created_at DESC
    LIMIT 1
) AS known
