-- The input is what follows `[{"input":` in the first row of a task's log. Under "C", lower() knows only
-- A to Z, as LIKE does on SQLite.
SELECT l.task
FROM unnest($1::uuid[]) AS d (id)
JOIN log l ON l.task = ANY (ARRAY[d.id]) AND l.seq = 1
WHERE lower(substr(l.records, 11) COLLATE "C") LIKE $2 ESCAPE '\'
