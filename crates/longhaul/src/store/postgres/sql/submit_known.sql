-- Which of these submits are known, by id or by key. LATERAL: two index lookups per entry.
SELECT d.n, known.id, known.tenant, known.digest, known.created_at
FROM unnest($1::uuid[], $2::text[], $3::text[]) WITH ORDINALITY AS d (id, tenant, idem_key, n)
CROSS JOIN LATERAL (
    (SELECT t.id, t.tenant, t.digest, t.created_at FROM tasks t WHERE t.id = d.id)
    UNION ALL
    (SELECT t.id, t.tenant, t.digest, t.created_at
     FROM tasks t
     WHERE t.tenant = d.tenant AND t.idem_key = d.idem_key AND t.idem_key IS NOT NULL)
    LIMIT 1
) AS known
