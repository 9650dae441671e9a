-- Locks the counters of concurrency keys, making those that do not exist: `DO UPDATE` locks the row
-- in the same moment in which it is found, so a counter that is just being removed is made anew.
INSERT INTO limits (name, max)
SELECT d.name, coalesce((SELECT k.max FROM limits k WHERE k.name = 'keymax/' || d.key), 1)
FROM unnest($1::text[], $2::text[]) AS d (name, key)
ORDER BY d.name COLLATE "C"
ON CONFLICT (name) DO UPDATE SET lasting = limits.lasting
RETURNING name, max, running
