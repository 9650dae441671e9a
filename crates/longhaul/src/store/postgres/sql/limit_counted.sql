-- How many running tasks count in limit $3, and how many do not yet.
SELECT count(*) FILTER (WHERE coalesce(t.holds, '[]')::jsonb ? $3),
       count(*) FILTER (WHERE NOT coalesce(t.holds, '[]')::jsonb ? $3)
FROM tasks t
WHERE t.state = 1
  AND ($1::text IS NULL OR t.queue = $1)
  AND ($2::text IS NULL OR t.tenant = $2)
