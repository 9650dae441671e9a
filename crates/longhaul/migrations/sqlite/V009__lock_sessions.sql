-- Sessions: what keeps a lock at a lock service outside (Redis, etcd). `name` is that of the lock. A lock
-- that is kept by the store alone has none.
CREATE TABLE lock_sessions (
    name    TEXT    NOT NULL PRIMARY KEY,
    service TEXT    NOT NULL,
    -- who owns the lock there
    id      TEXT    NOT NULL,
    -- 0: asked for, 1: held, 2: to be given back
    stage   INTEGER NOT NULL,
    -- the token of who has it, or gets it
    token   INTEGER NOT NULL,
    -- how long it counts without a word from the service
    until   INTEGER,
    -- when a process must turn to the service
    look_at INTEGER NOT NULL,
    -- what the service, or the way to it, said last if that was bad news
    trouble TEXT
) WITHOUT ROWID;
CREATE INDEX lock_sessions_look ON lock_sessions (service, look_at);
CREATE INDEX lock_sessions_until ON lock_sessions (until) WHERE until IS NOT NULL;
