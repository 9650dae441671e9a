-- Why a commit was not written, or where it was written before (the newest row of its run).
SELECT t.id, t.state, t.fence, t.commit_no, t.last_seq, t.cancel IS NOT NULL AS cancelled, t.deadline,
       own.seq, own.count, lh_now($3) AS now
FROM unnest($1::uuid[], $2::bigint[]) AS d (id, fence)
JOIN tasks t ON t.id = ANY (ARRAY[d.id])
LEFT JOIN LATERAL (
    SELECT l.seq, l.count
    FROM log l
    WHERE l.task = d.id AND l.run = d.fence
    ORDER BY l.seq DESC
    LIMIT 1
) AS own ON true
