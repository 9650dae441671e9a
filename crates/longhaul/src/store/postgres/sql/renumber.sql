-- Rows with numbers of transactions that are still to come on this server: from before everything, and those that some
-- subscriber has not passed right after that. Each subscriber goes on there; what it is given again it has seen.
WITH horizon AS MATERIALIZED (
    SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next
),
renumbered AS (
    UPDATE log
    SET xact = CASE WHEN xact >= (SELECT min(s.at_order) FROM subscribers s) THEN 1 ELSE 0 END
    WHERE xact > (SELECT next FROM horizon)
    RETURNING 1
),
unnumbered AS (
    UPDATE tasks SET xact = 0 WHERE EXISTS (SELECT FROM renumbered) AND xact > (SELECT next FROM horizon)
)
UPDATE subscribers
SET at_order = 1, at_task = '00000000-0000-0000-0000-000000000000', at_seq = 0, given = 0
WHERE at_order > (SELECT next FROM horizon) OR EXISTS (SELECT FROM renumbered)
