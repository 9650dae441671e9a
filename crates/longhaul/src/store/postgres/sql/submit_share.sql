-- Everyone who submits to a queue far from its bound may do so at the same time.
SELECT pg_advisory_xact_lock_shared($1::integer, q.key) FROM unnest($2::integer[]) AS q (key)
