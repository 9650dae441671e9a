-- Only when nobody has it. Every holder has a fence of its own.
UPDATE subscribers s
SET fence = s.fence + 1, held_by = $2, lease_until = now.now + $3
FROM (SELECT lh_now($4) AS now) AS now
WHERE s.name = $1 AND (s.lease_until IS NULL OR s.lease_until <= now.now)
RETURNING s.fence, s.at_order, s.at_task, s.at_seq, s.given, s.passed_at
