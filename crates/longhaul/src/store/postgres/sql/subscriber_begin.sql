-- A new one stands where it was told to; one that is known stays where it is, and may be behind for as long as is
-- said now.
INSERT INTO subscribers AS s (name, tenant, at_order, at_task, at_seq, given, passed_at, max_behind, created_at)
SELECT $1, $2, $3::bigint, $4, $5, 0, CASE WHEN $3::bigint > 0 THEN now.now ELSE 0 END, $6, now.now
FROM (SELECT lh_now($7) AS now) AS now
ON CONFLICT (name) DO UPDATE SET max_behind = excluded.max_behind
RETURNING s.tenant
