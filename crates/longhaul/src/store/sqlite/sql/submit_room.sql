SELECT (SELECT max_pending FROM queues WHERE name = ?1),
       (SELECT ageing FROM queues WHERE name = ?1),
       (SELECT coalesce(sum(pending), 0) FROM depths WHERE queue = ?1)
