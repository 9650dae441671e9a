-- A parent that had ended was not told how its children ended; now it can be.
UPDATE tasks SET untold = 1 WHERE parent = ?1 AND state >= 3
