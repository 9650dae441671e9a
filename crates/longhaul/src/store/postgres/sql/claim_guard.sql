-- A repeated claim waits until the first one, whose answer was lost, has ended on the server.
-- The second column saves everyone without limits from asking for them.
SELECT pg_advisory_xact_lock($1::bigint), EXISTS (SELECT 1 FROM limits) AS limited
