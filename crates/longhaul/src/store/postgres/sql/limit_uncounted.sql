-- Running tasks that do not count in limit $3 yet and that nobody else has locked.
SELECT t.id, t.holds
FROM tasks t
WHERE t.state = 1
  AND ($1::text IS NULL OR t.queue = $1)
  AND ($2::text IS NULL OR t.tenant = $2)
  AND NOT (coalesce(t.holds, '[]')::jsonb ? $3)
FOR UPDATE SKIP LOCKED
