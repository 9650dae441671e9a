-- How long until something is due. A lease is not taken back within $2 after the server started.
SELECT least(
           (SELECT min(t.due_at) FROM tasks t WHERE t.due_at IS NOT NULL),
           (SELECT greatest(min(t.lease_until),
                            (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint + $2)
            FROM tasks t
            WHERE t.state = 1
            HAVING min(t.lease_until) IS NOT NULL),
           (SELECT min(l.until) FROM locks l WHERE l.until IS NOT NULL),
           (SELECT min(w.until) FROM lock_waiters w WHERE w.until IS NOT NULL)
       ) - lh_now($1) AS next
