-- Near its bound a queue is filled by one at a time, after all who shared it have committed.
SELECT pg_advisory_xact_lock($1::integer, q.key) FROM unnest($2::integer[]) AS q (key)
