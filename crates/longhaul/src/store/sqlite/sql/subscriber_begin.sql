-- A new one stands where it was told to; one that is known stays where it is, and may be behind for as long as is
-- said now.
INSERT INTO subscribers (name, tenant, at_order, at_task, at_seq, given, passed_at, max_behind, created_at)
VALUES (?1, ?2, ?3, ?4, ?5, 0, CASE WHEN ?3 > 0 THEN ?7 ELSE 0 END, ?6, ?7)
ON CONFLICT (name) DO UPDATE SET max_behind = excluded.max_behind
RETURNING tenant
