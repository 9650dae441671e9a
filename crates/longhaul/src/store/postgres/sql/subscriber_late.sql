-- Those that may be behind for longer than they may, as far as was noted. Nobody notes what one that is not held has
-- passed, so what it has not passed is looked at next (`subscriber_lag.sql`).
SELECT s.name, s.at_order, s.at_task, s.at_seq, s.passed_at, s.max_behind, s.created_at, now.now
FROM (SELECT lh_now($1) AS now) AS now, subscribers s
WHERE greatest(s.passed_at, s.created_at) < now.now - s.max_behind
ORDER BY s.passed_at
LIMIT $2
