-- Locks: named mutual exclusion between tasks. `name` is TENANT/NAME. A lock that is free and that
-- nobody waits for has no row; tokens come from one counter, so they grow for every lock, for ever.
CREATE TABLE locks (
    name        text   NOT NULL COLLATE "C" PRIMARY KEY,
    holder      uuid,
    -- where it was given: the address of the operation that asked for it
    address     text,
    token       bigint,
    acquired_at bigint,
    -- when it goes to the next in line, whatever its holder does
    until       bigint
) WITH (fillfactor = 50);
-- What a task holds, what waits to be given, and what was held for too long.
CREATE INDEX locks_held ON locks (holder) WHERE holder IS NOT NULL;
CREATE INDEX locks_free ON locks (name) WHERE holder IS NULL;
CREATE INDEX locks_until ON locks (until) WHERE until IS NOT NULL;

CREATE SEQUENCE lock_tokens;

-- Who waits for a lock, in the order of `place`. Whoever writes here has the lock's row locked.
CREATE TABLE lock_waiters (
    name     text   NOT NULL COLLATE "C",
    place    bigint NOT NULL,
    task     uuid   NOT NULL,
    address  text   NOT NULL,
    max_hold bigint NOT NULL,
    -- when it stops waiting; never, when missing
    until    bigint,
    PRIMARY KEY (name, place)
);
CREATE INDEX lock_waiters_task ON lock_waiters (task);
CREATE INDEX lock_waiters_until ON lock_waiters (until) WHERE until IS NOT NULL;

-- The task may hold a lock or wait for one. Those that ended have to let go.
ALTER TABLE tasks ADD COLUMN locked boolean NOT NULL DEFAULT false;
CREATE INDEX tasks_locked ON tasks (id) WHERE locked AND state >= 3;
