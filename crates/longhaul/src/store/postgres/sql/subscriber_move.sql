-- What a holder has passed, and for how long it goes on ($8; it lets go when missing). Nothing is written under an
-- older fence.
UPDATE subscribers s
SET at_order    = coalesce($3, s.at_order),
    at_task     = coalesce($4, s.at_task),
    at_seq      = coalesce($5, s.at_seq),
    given       = coalesce($6, s.given),
    passed_at   = greatest(s.passed_at, coalesce($7, s.passed_at)),
    held_by     = CASE WHEN $8::bigint IS NOT NULL THEN s.held_by END,
    lease_until = lh_now($9) + $8::bigint
WHERE s.name = $1 AND s.fence = $2 AND s.held_by IS NOT NULL
