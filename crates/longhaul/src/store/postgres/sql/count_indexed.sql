-- The same where the history is longer, by the indexes of states: running ones all, $2 of each of the others.
SELECT (SELECT count(*) FROM (SELECT t.tenant FROM tasks t WHERE t.ready LIMIT $2) AS f WHERE f.tenant = $1)
       + (SELECT count(*) FROM (SELECT t.tenant FROM tasks t WHERE t.parked IS NOT NULL LIMIT $2) AS f
          WHERE f.tenant = $1),
       (SELECT count(*) FROM tasks t WHERE t.state = 1 AND t.tenant = $1),
       (SELECT count(*)
        FROM (SELECT t.tenant FROM tasks t WHERE t.state = 2 AND t.state IN (2, 4, 5) LIMIT $2) AS f
        WHERE f.tenant = $1),
       (SELECT count(*)
        FROM (SELECT t.tenant FROM tasks t WHERE t.state = 4 AND t.state IN (2, 4, 5) LIMIT $2) AS f
        WHERE f.tenant = $1),
       (SELECT count(*)
        FROM (SELECT t.tenant FROM tasks t WHERE t.state = 5 AND t.state IN (2, 4, 5) LIMIT $2) AS f
        WHERE f.tenant = $1)
