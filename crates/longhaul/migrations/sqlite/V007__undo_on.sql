-- When what a task did is undone without a request: 1 when it fails, 2 when it is cancelled, 3 both.
ALTER TABLE tasks ADD COLUMN undo_on INTEGER NOT NULL DEFAULT 3;
