-- Running tasks whose lease has run out. Not within $3 after the server started: workers could not
-- extend their leases while it was away, which is no fault of their tasks. tasks_running holds only
-- running tasks and is read whole: an index on lease_until would have to follow every heartbeat.
SELECT t.id
FROM tasks t
WHERE t.state = 1
  AND t.lease_until <= (SELECT lh_now($1))
  AND (SELECT lh_now($1)) >= (SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint + $3)
LIMIT $2
FOR UPDATE SKIP LOCKED
