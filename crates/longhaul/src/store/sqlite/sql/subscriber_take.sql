-- Only when nobody has it. Every holder has a fence of its own.
UPDATE subscribers
SET fence = fence + 1, held_by = ?2, lease_until = ?3, lease_boot = ?4
WHERE name = ?1 AND (lease_until IS NULL OR lease_boot <> ?4 OR lease_until <= ?5)
RETURNING fence, at_order, at_task, at_seq, given, passed_at
