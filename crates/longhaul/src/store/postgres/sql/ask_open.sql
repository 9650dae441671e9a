INSERT INTO asks (task, id, kind, status, step, text, subject, digest, requested_at, expires_at)
SELECT d.task, d.id, d.kind, 0, d.step, d.text, d.subject, d.digest, $1, d.expires_at
FROM unnest($2::uuid[], $3::text[], $4::smallint[], $5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[])
     AS d (task, id, kind, step, text, subject, digest, expires_at)
ON CONFLICT (task, id) DO NOTHING
