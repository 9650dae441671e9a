-- Where a task stands, in one row. ?2: up to how many ahead are counted; ?3: the lock it waits for.
SELECT t.run_at, t.parked, t.owner, t.lease_until, t.lease_boot,
       CASE WHEN t.ready = 1 THEN (
           SELECT count(*)
           FROM (SELECT 1
                 FROM tasks a INDEXED BY tasks_ready
                 WHERE a.ready = 1 AND a.queue = t.queue AND a.handler = t.handler AND (a.rank, a.id) < (t.rank, t.id)
                 LIMIT ?2)
       ) ELSE 0 END,
       p.since, p.by, l.max, l.running,
       (SELECT json_group_array(hex(h.id))
        FROM (SELECT r.id
              FROM tasks r INDEXED BY tasks_running
              WHERE r.state = 1 AND r.tenant = t.tenant
                AND EXISTS (SELECT 1 FROM json_each(r.holds) held WHERE held.value = t.parked)
              LIMIT 5) h),
       k.name IS NOT NULL, k.holder, k.until,
       (SELECT count(*)
        FROM lock_waiters w
        WHERE w.name = ?3
          AND w.place < (SELECT min(me.place) FROM lock_waiters me WHERE me.name = ?3 AND me.task = t.id)),
       s.service, s.trouble, t.cancel
FROM tasks t
LEFT JOIN pauses p ON p.queue = t.queue
LEFT JOIN limits l ON l.name = t.parked
LEFT JOIN locks k ON k.name = ?3
LEFT JOIN lock_sessions s ON s.name = ?3
WHERE t.id = ?1
