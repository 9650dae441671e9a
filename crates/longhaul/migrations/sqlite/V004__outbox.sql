-- What is to be told of tasks to others: to the webhook a task was submitted with, and to the
-- endpoints its tenant had then. Times are microseconds.

-- `webhook` is JSON: the URL and the types of events it wants. What is derived from it at the time of
-- a submit stands beside it: `lane`, the receiver's host, and `finals`, that only ends are wanted.
CREATE TABLE endpoints (
    tenant     TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    webhook    TEXT    NOT NULL,
    lane       TEXT    NOT NULL,
    finals     INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;

-- A task's line to one destination: `webhook`, or `endpoint:NAME`. Events after `sent` are to be looked
-- at; up to it they were delivered, given up, or not wanted. `due_at` is when to look: not set when there
-- is nothing to do, and as long as someone is at it (`owner`), the time at which another may take over.
CREATE TABLE outbox (
    task        BLOB    NOT NULL,
    destination TEXT    NOT NULL,
    tenant      TEXT    NOT NULL,
    -- the task's own webhook; an endpoint's is in `endpoints`
    webhook     TEXT,
    -- lines that share a receiver
    lane        TEXT    NOT NULL,
    finals      INTEGER NOT NULL,
    last_seq    INTEGER NOT NULL,
    sent        INTEGER NOT NULL DEFAULT 0,
    due_at      INTEGER,
    owner       BLOB,
    -- of the event at the front: how often it failed, and when first
    attempts    INTEGER NOT NULL DEFAULT 0,
    first_at    INTEGER,
    -- the receiver wants no more
    ended       INTEGER NOT NULL DEFAULT 0,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (task, destination)
) WITHOUT ROWID;
CREATE INDEX outbox_due ON outbox (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX outbox_lane ON outbox (lane, due_at) WHERE due_at IS NOT NULL;

-- What became of each event that was sent. `status`: 0 pending, 1 delivered, 2 failed (and tried again
-- in its line), 3 dead. One that is to be sent again by request (`again`) leaves at `next_at`,
-- whatever its line does.
CREATE TABLE deliveries (
    id          BLOB    NOT NULL PRIMARY KEY,
    task        BLOB    NOT NULL,
    destination TEXT    NOT NULL,
    tenant      TEXT    NOT NULL,
    seq         INTEGER NOT NULL,
    event       TEXT    NOT NULL,
    webhook     TEXT    NOT NULL,
    status      INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    http_status INTEGER,
    error       TEXT,
    next_at     INTEGER,
    again       INTEGER NOT NULL DEFAULT 0,
    owner       BLOB,
    first_at    INTEGER,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX deliveries_task ON deliveries (task, seq);
CREATE INDEX deliveries_again ON deliveries (next_at) WHERE again = 1;
CREATE INDEX deliveries_dead ON deliveries (tenant, updated_at) WHERE status = 3;

-- The task has lines in the outbox.
ALTER TABLE tasks ADD COLUMN hooked INTEGER NOT NULL DEFAULT 0;

CREATE TRIGGER tasks_unhooked AFTER DELETE ON tasks
WHEN OLD.hooked = 1
BEGIN
    DELETE FROM outbox WHERE task = OLD.id;
    DELETE FROM deliveries WHERE task = OLD.id;
END;
