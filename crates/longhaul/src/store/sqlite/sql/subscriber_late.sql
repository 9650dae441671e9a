-- Those that may be behind for longer than they may, as far as was noted. Nobody notes what one that is not held has
-- passed, so what it has not passed is looked at next (`subscriber_lag.sql`).
SELECT name, at_order, at_task, at_seq, passed_at, max_behind, created_at
FROM subscribers
WHERE max(passed_at, created_at) < ?1 - max_behind
ORDER BY passed_at
LIMIT ?2
