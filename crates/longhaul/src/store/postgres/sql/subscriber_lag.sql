-- How many log rows a subscriber has not passed, and the oldest of them; not more are looked at than $4. By the BRIN
-- index, see feed.rs.
SELECT count(*), min(behind.time)
FROM (
    SELECT l.time
    FROM log l
    WHERE l.xact >= $1 AND (l.xact, l.task, l.seq) >= ($1, $2::uuid, $3::bigint)
    LIMIT $4
) AS behind
