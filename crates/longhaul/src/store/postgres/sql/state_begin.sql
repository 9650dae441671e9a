-- The states that forks and undos begin with. One that was accepted before has gone on since.
INSERT INTO states (task, version, state)
SELECT d.task, d.version, d.state
FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS d (task, version, state)
ON CONFLICT (task) DO NOTHING
