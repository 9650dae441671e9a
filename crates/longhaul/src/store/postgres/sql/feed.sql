-- Rows of transactions from $1 to before $4, older than every transaction under way. All conditions on
-- `xact` are by the BRIN index log_xact, which bitmap scans alone can use (see feed.rs).
WITH horizon AS MATERIALIZED (
    SELECT pg_snapshot_xmin(snapshot)::text::bigint AS oldest, pg_snapshot_xmax(snapshot)::text::bigint AS next
    FROM (SELECT pg_current_snapshot() AS snapshot) AS now
),
page AS MATERIALIZED (
    SELECT l.xact, l.task, l.seq, l.count, l.time, l.run, l.events,
           sum(octet_length(l.events))
               OVER (ORDER BY l.xact, l.task, l.seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
        SELECT l.*
        FROM log l
        WHERE l.xact >= $1
          AND l.xact < $4
          AND l.xact < (SELECT oldest FROM horizon)
          AND (l.xact, l.task, l.seq) >= ($1, $2::uuid, $3::bigint)
        ORDER BY l.xact, l.task, l.seq
        LIMIT $5
    ) AS l
)
SELECT h.oldest, h.next, p.xact, p.task, t.tenant, p.seq, p.count, p.time, p.run, p.events, NULL::text
FROM horizon h
LEFT JOIN page p ON coalesce(p.before, 0) < $6
LEFT JOIN tasks t ON t.id = ANY (ARRAY[p.task])
ORDER BY p.xact, p.task, p.seq
