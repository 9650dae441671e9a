-- Locks: named mutual exclusion between tasks. `name` is TENANT/NAME. A lock that is free and that
-- nobody waits for has no row; tokens come from one counter (`lock_token` in `settings`), so they
-- grow for every lock, for ever.
CREATE TABLE locks (
    name        TEXT    NOT NULL PRIMARY KEY,
    holder      BLOB,
    -- where it was given: the address of the operation that asked for it
    address     TEXT,
    token       INTEGER,
    acquired_at INTEGER,
    -- when it goes to the next in line, whatever its holder does
    until       INTEGER
) WITHOUT ROWID;
-- What a task holds, what waits to be given, and what was held for too long.
CREATE INDEX locks_held ON locks (holder) WHERE holder IS NOT NULL;
CREATE INDEX locks_free ON locks (name) WHERE holder IS NULL;
CREATE INDEX locks_until ON locks (until) WHERE until IS NOT NULL;

-- Who waits for a lock, in the order of `place`.
CREATE TABLE lock_waiters (
    name     TEXT    NOT NULL,
    place    INTEGER NOT NULL,
    task     BLOB    NOT NULL,
    address  TEXT    NOT NULL,
    max_hold INTEGER NOT NULL,
    -- when it stops waiting; never, when missing
    until    INTEGER,
    PRIMARY KEY (name, place)
) WITHOUT ROWID;
CREATE INDEX lock_waiters_task ON lock_waiters (task);
CREATE INDEX lock_waiters_until ON lock_waiters (until) WHERE until IS NOT NULL;

-- The task may hold a lock or wait for one. Those that ended have to let go.
ALTER TABLE tasks ADD COLUMN locked INTEGER NOT NULL DEFAULT 0;
CREATE INDEX tasks_locked ON tasks (id) WHERE locked = 1 AND state >= 3;
