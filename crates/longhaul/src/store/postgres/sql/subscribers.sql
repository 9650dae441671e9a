SELECT s.name, s.tenant, CASE WHEN s.lease_until > now.now THEN s.held_by END, s.at_order, s.at_task, s.at_seq,
       s.passed_at, s.max_behind, s.lease_until - now.now
FROM (SELECT lh_now($1) AS now) AS now, subscribers s
WHERE s.name = coalesce($2, s.name)
ORDER BY s.name
