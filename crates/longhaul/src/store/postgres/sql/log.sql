-- Rows with events after number $2, up to about $3 bytes. Starts at the row that holds number
-- $2 + 1, found by one step into the primary key; looks at no more rows than a page can need.
SELECT page.seq, page.count, page.time, page.run, page.events, page.records
FROM (
    SELECT l.*,
           sum(octet_length(l.events) + coalesce(octet_length(l.records), 0))
               OVER (ORDER BY l.seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
        SELECT *
        FROM log
        WHERE task = $1
          AND seq >= coalesce((SELECT max(seq) FROM log WHERE task = $1 AND seq <= $2::bigint + 1), 1)
          AND seq + count > $2::bigint + 1
        ORDER BY seq
        LIMIT 4000
    ) AS l
) AS page
WHERE coalesce(page.before, 0) < $3::bigint
ORDER BY page.seq
