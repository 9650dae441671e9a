-- Keeps the newest `keep` that are not too old; the one just written always stays.
DELETE FROM checkpoints c
USING unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[]) AS d (task, seq, keep, since)
WHERE c.task = ANY (ARRAY[d.task])
  AND c.seq <> d.seq
  AND (c.created_at < d.since
       OR (SELECT count(*) FROM checkpoints newer WHERE newer.task = c.task AND newer.seq > c.seq) >= d.keep)
