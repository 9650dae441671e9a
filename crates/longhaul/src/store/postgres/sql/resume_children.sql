-- A parent that had ended was not told how its children ended; now it can be.
UPDATE tasks SET untold = true WHERE parent = ANY ($1::uuid[]) AND state >= 3
