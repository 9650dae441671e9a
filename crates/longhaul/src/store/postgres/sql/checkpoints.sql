SELECT seq, version, iteration, checksum, data, created_at
FROM checkpoints
WHERE task = $1
ORDER BY seq DESC
