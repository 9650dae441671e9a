-- Two equal submits with a window must see each other, so the second waits for the first.
SELECT pg_advisory_xact_lock(d.key) FROM unnest($1::bigint[]) AS d (key)
