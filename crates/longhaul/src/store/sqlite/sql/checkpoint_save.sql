INSERT INTO checkpoints (task, seq, version, iteration, checksum, data, created_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (task, seq) DO UPDATE
SET version = excluded.version, iteration = excluded.iteration, checksum = excluded.checksum,
    data = excluded.data, created_at = excluded.created_at
