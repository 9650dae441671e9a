-- What each queue allows and holds, and the time. Runs after the queues' locks are taken, with a
-- snapshot of its own, so that it sees everyone who let go of the lock.
SELECT q.name,
       s.max_pending,
       s.ageing,
       (SELECT coalesce(sum(d.pending), 0)::bigint FROM depths d WHERE d.queue = q.name) AS pending,
       lh_now($2) AS now
FROM unnest($1::text[]) AS q (name)
LEFT JOIN queues s ON s.name = ANY (ARRAY[q.name])
