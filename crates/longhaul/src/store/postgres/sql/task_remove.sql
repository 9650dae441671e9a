-- A task and everything that belongs to it; the tasks' rows are locked.
WITH states_gone AS (DELETE FROM states WHERE task = ANY ($1::uuid[])),
     checkpoints_gone AS (DELETE FROM checkpoints WHERE task = ANY ($1::uuid[])),
     asks_gone AS (DELETE FROM asks WHERE task = ANY ($1::uuid[])),
     log_gone AS (DELETE FROM log WHERE task = ANY ($1::uuid[]))
DELETE FROM tasks WHERE id = ANY ($1::uuid[])
