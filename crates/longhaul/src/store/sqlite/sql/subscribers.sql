SELECT name, tenant, CASE WHEN lease_boot = ?2 AND lease_until > ?1 THEN held_by END, at_order, at_task, at_seq,
       passed_at, max_behind, CASE WHEN lease_boot = ?2 THEN lease_until - ?1 END
FROM subscribers
WHERE name = coalesce(?3, name)
ORDER BY name
