-- The newest $2 tasks by state: those of the tenant, or, for the default one, those of its among all.
SELECT count(*) FILTER (WHERE tenant = $1 AND state = 0), count(*) FILTER (WHERE tenant = $1 AND state = 1),
       count(*) FILTER (WHERE tenant = $1 AND state = 2), count(*) FILTER (WHERE tenant = $1 AND state = 3),
       count(*) FILTER (WHERE tenant = $1 AND state = 4), count(*) FILTER (WHERE tenant = $1 AND state = 5), count(*)
FROM (SELECT t.tenant, t.state FROM tasks t WHERE {again} ORDER BY t.id DESC LIMIT $2) AS newest
