-- What a server needs beside running tasks: traces, lists by tenant.

-- The W3C traceparent a task was submitted with.
ALTER TABLE tasks ADD COLUMN trace TEXT;
-- Lists of one tenant among many. Who has no tenants pays nothing for it.
CREATE INDEX tasks_tenant ON tasks (tenant, id) WHERE tenant <> 'default';

-- What programs and people show to be let in: only the hash of it.
CREATE TABLE tokens (
    id           BLOB    NOT NULL PRIMARY KEY,
    hash         BLOB    NOT NULL UNIQUE,
    name         TEXT    NOT NULL,
    tenant       TEXT    NOT NULL,
    role         INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER,
    revoked_at   INTEGER,
    -- within some minutes
    last_used_at INTEGER
) WITHOUT ROWID;
CREATE INDEX tokens_tenant ON tokens (tenant);

-- Queues whose tasks are not claimed for now. Apart from `queues`, because a queue need not be known to
-- be paused.
CREATE TABLE pauses (
    queue TEXT    NOT NULL PRIMARY KEY,
    since INTEGER NOT NULL,
    by    TEXT    NOT NULL
) WITHOUT ROWID;

-- Readers of all tasks' events go by the number of a log row, which is in the order of commits as long as
-- no number is given twice. The number of the newest row would be, once that is deleted: a marker without a
-- task and without events stays in its place.
CREATE TRIGGER log_mark AFTER DELETE ON log
WHEN OLD.rowid > (SELECT coalesce(max(rowid), 0) FROM log)
BEGIN
    DELETE FROM log WHERE task = zeroblob(16);
    INSERT INTO log (rowid, task, seq, count, time, run, events)
    VALUES (OLD.rowid, zeroblob(16), OLD.rowid, 0, OLD.time, 0, '[]');
END;
