-- Which of these approvals can no longer be used.
SELECT a.task, a.id
FROM unnest($1::uuid[], $2::text[]) AS d (task, id)
JOIN asks a ON a.task = ANY (ARRAY[d.task]) AND a.id = d.id
WHERE a.status = 4 OR (a.status = 2 AND a.expires_at <= lh_now($3))
