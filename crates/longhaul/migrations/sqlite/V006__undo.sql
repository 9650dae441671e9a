-- The task that undoes this one, by request; it stays known after that task is gone.
ALTER TABLE tasks ADD COLUMN undone_by BLOB;
