-- In order of the queues' names, so that two who count cannot wait for each other.
INSERT INTO depths (queue, shard, pending)
SELECT d.queue, $1::integer, d.pending
FROM unnest($2::text[], $3::bigint[]) AS d (queue, pending)
ORDER BY d.queue COLLATE "C"
ON CONFLICT (queue, shard) DO UPDATE SET pending = depths.pending + excluded.pending
