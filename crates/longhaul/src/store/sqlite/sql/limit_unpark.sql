UPDATE tasks
SET ready = 1, parked = NULL
WHERE rowid IN (SELECT rowid
                FROM tasks
                WHERE parked = ?1
                ORDER BY rank, id
                LIMIT coalesce((SELECT max(max - running, 0) FROM limits WHERE name = ?1), 0))
