-- Keeps the newest ?3 that are not too old; the one just written (?2) always stays.
DELETE FROM checkpoints
WHERE task = ?1 AND seq <> ?2
  AND (created_at < ?4
       OR seq NOT IN (SELECT seq FROM checkpoints WHERE task = ?1 ORDER BY seq DESC LIMIT ?3))
