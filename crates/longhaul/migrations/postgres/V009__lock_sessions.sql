-- Sessions: what keeps a lock at a lock service outside (Redis, etcd). `name` is that of the lock. A lock
-- that is kept by the store alone has none. Whoever writes more than `look_at` has the lock's row locked.
CREATE TABLE lock_sessions (
    name    text     NOT NULL COLLATE "C" PRIMARY KEY,
    service text     NOT NULL COLLATE "C",
    -- who owns the lock there
    id      text     NOT NULL,
    -- 0: asked for, 1: held, 2: to be given back
    stage   smallint NOT NULL,
    -- the token of who has it, or gets it
    token   bigint   NOT NULL,
    -- how long it counts without a word from the service
    until   bigint,
    -- when a process must turn to the service
    look_at bigint   NOT NULL,
    -- what the service, or the way to it, said last if that was bad news
    trouble text
) WITH (fillfactor = 50);
CREATE INDEX lock_sessions_look ON lock_sessions (service, look_at);
CREATE INDEX lock_sessions_until ON lock_sessions (until) WHERE until IS NOT NULL;
