-- The newest ?2 tasks by state: those of the tenant, or, for the default one, those of its among all.
SELECT sum(tenant = ?1 AND state = 0), sum(tenant = ?1 AND state = 1), sum(tenant = ?1 AND state = 2),
       sum(tenant = ?1 AND state = 3), sum(tenant = ?1 AND state = 4), sum(tenant = ?1 AND state = 5), count(*)
FROM (SELECT t.tenant, t.state FROM tasks t {index} WHERE {again} ORDER BY t.id DESC LIMIT ?2)
