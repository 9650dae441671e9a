-- Log rows of entries that were not accepted and are no tasks.
DELETE FROM log l
WHERE l.task = ANY ($1::uuid[]) AND (SELECT t.id FROM tasks t WHERE t.id = l.task) IS NULL
