-- What a holder has passed, and until when it goes on (?8; it lets go when missing). Nothing is written under an
-- older fence.
UPDATE subscribers
SET at_order    = coalesce(?3, at_order),
    at_task     = coalesce(?4, at_task),
    at_seq      = coalesce(?5, at_seq),
    given       = coalesce(?6, given),
    passed_at   = max(passed_at, coalesce(?7, passed_at)),
    held_by     = CASE WHEN ?8 IS NOT NULL THEN held_by END,
    lease_until = ?8
WHERE name = ?1 AND fence = ?2 AND held_by IS NOT NULL
