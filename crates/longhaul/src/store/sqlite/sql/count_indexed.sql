-- The same where the history is longer, by the indexes of states: running ones all, ?2 of each of the others.
SELECT (SELECT count(*)
        FROM (SELECT tenant FROM tasks INDEXED BY tasks_ready WHERE ready = 1 LIMIT ?2) WHERE tenant = ?1)
       + (SELECT count(*)
          FROM (SELECT tenant FROM tasks INDEXED BY tasks_parked WHERE parked IS NOT NULL LIMIT ?2) WHERE tenant = ?1),
       (SELECT count(*) FROM tasks INDEXED BY tasks_running WHERE state = 1 AND +tenant = ?1),
       (SELECT count(*)
        FROM (SELECT tenant FROM tasks INDEXED BY tasks_state WHERE state = 2 AND (state = 2 OR state >= 4) LIMIT ?2)
        WHERE tenant = ?1),
       (SELECT count(*)
        FROM (SELECT tenant FROM tasks INDEXED BY tasks_state WHERE state = 4 AND (state = 2 OR state >= 4) LIMIT ?2)
        WHERE tenant = ?1),
       (SELECT count(*)
        FROM (SELECT tenant FROM tasks INDEXED BY tasks_state WHERE state = 5 AND (state = 2 OR state >= 4) LIMIT ?2)
        WHERE tenant = ?1)
