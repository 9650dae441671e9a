INSERT INTO states (task, version, state)
SELECT d.task, d.version, d.state
FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS d (task, version, state)
ON CONFLICT (task) DO UPDATE SET version = excluded.version, state = excluded.state
