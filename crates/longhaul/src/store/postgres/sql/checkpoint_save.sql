INSERT INTO checkpoints (task, seq, version, iteration, checksum, data, created_at)
SELECT d.task, d.seq, d.version, d.iteration, d.checksum, d.data, $1
FROM unnest($2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[])
     AS d (task, seq, version, iteration, checksum, data)
ON CONFLICT (task, seq) DO UPDATE
SET version = excluded.version, iteration = excluded.iteration, checksum = excluded.checksum,
    data = excluded.data, created_at = excluded.created_at
