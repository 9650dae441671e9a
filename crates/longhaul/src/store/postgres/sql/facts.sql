-- Where a task stands, in one row. $2: the clock's shift; $3: up to how many ahead are counted; $4: the
-- lock it waits for.
SELECT lh_now($2), t.run_at, t.parked, t.owner, t.lease_until - lh_now($2),
       CASE WHEN t.ready THEN (
           SELECT count(*)
           FROM (SELECT 1
                 FROM tasks a
                 WHERE a.ready AND a.queue = t.queue AND a.handler = t.handler AND (a.rank, a.id) < (t.rank, t.id)
                 LIMIT $3) AS ahead
       ) ELSE 0 END,
       p.since, p.by, l.max, l.running,
       (SELECT array_agg(h.id)
        FROM (SELECT r.id
              FROM tasks r
              WHERE r.state = 1 AND r.tenant = t.tenant AND r.holds::jsonb ? t.parked
              LIMIT 5) AS h),
       k.name IS NOT NULL, k.holder, k.until,
       (SELECT count(*)
        FROM lock_waiters w
        WHERE w.name = $4
          AND w.place < (SELECT min(me.place) FROM lock_waiters me WHERE me.name = $4 AND me.task = t.id)),
       s.service, s.trouble, t.cancel
FROM tasks t
LEFT JOIN pauses p ON p.queue = t.queue
LEFT JOIN limits l ON l.name = t.parked
LEFT JOIN locks k ON k.name = $4
LEFT JOIN lock_sessions s ON s.name = $4
WHERE t.id = $1
