INSERT INTO depths (queue, shard, pending) VALUES (?1, 0, ?2)
ON CONFLICT (queue, shard) DO UPDATE SET pending = pending + excluded.pending
