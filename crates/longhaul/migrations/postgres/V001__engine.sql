-- A task is one row of `tasks` (where it stands) and its rows of `log` (everything that was told
-- or recorded about it, in order; the first row carries the input). Times are microseconds.
-- Names are compared byte by byte (COLLATE "C"): the order of locks must not depend on a locale.
-- Leases are measured by the server's clock, so there is no `lease_boot` as SQLite has it.

-- The store's clock. `shift` is what a test has moved it by, 0 otherwise.
CREATE FUNCTION lh_now(shift bigint) RETURNS bigint
    LANGUAGE sql VOLATILE
    AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + shift $$;

-- A moment as JSON has it.
CREATE FUNCTION lh_time(micros bigint) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
        SELECT to_char(timestamp 'epoch' + micros * interval '1 microsecond', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
    $$;

-- Room on each page, so that a recorded step rewrites its row in place and touches no index.
CREATE TABLE tasks (
    id              uuid     NOT NULL PRIMARY KEY,
    tenant          text     NOT NULL COLLATE "C",
    handler         text     NOT NULL COLLATE "C",
    queue           text     NOT NULL COLLATE "C",
    concurrency_key text     COLLATE "C",
    idem_key        text     COLLATE "C",
    digest          bytea,
    tags            text,
    parent          uuid,
    fork_of         uuid,
    undo_of         uuid,
    max_attempts    integer  NOT NULL,
    created_at      bigint   NOT NULL,
    deadline        bigint,
    -- what changes
    priority        smallint NOT NULL,
    rank            bigint   NOT NULL,
    state           smallint NOT NULL,
    phase           smallint NOT NULL DEFAULT 0,
    -- something was done that is undone if the task fails
    undoable        boolean  NOT NULL DEFAULT false,
    -- it ended, and its parent has not been told
    untold          boolean  NOT NULL DEFAULT false,
    ready           boolean  NOT NULL,
    due_at          bigint,
    run_at          bigint,
    parked          text     COLLATE "C",
    holds           text,
    fence           bigint   NOT NULL DEFAULT 0,
    owner           uuid,
    claim_no        bigint,
    lease_until     bigint,
    commit_no       bigint   NOT NULL DEFAULT 0,
    last_seq        bigint   NOT NULL,
    attempts        integer  NOT NULL DEFAULT 0,
    crashes         integer  NOT NULL DEFAULT 0,
    cancel          text,
    waiting         text,
    result          text,
    error           text,
    progress        text,
    usage           text,
    updated_at      bigint   NOT NULL,
    finished_at     bigint
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

-- What can be claimed, in the order in which it is.
CREATE INDEX tasks_ready ON tasks (queue, handler, rank, id) WHERE ready;
-- Who holds what; small, because only running tasks are in it.
CREATE INDEX tasks_running ON tasks (owner, claim_no) WHERE state = 1;
-- What the sweep must look at, and when.
CREATE INDEX tasks_due ON tasks (due_at) WHERE due_at IS NOT NULL;
-- What a limit holds back, in the order in which it is let go.
CREATE INDEX tasks_parked ON tasks (parked, rank, id) WHERE parked IS NOT NULL;
-- Whose parents have not been told that they ended, and whose child is whose.
CREATE INDEX tasks_untold ON tasks (parent) WHERE untold;
CREATE INDEX tasks_parent ON tasks (parent) WHERE parent IS NOT NULL;
-- Retention.
CREATE INDEX tasks_finished ON tasks (finished_at) WHERE finished_at IS NOT NULL;
-- Lists of what is neither simply done nor in the two indexes above (waiting, failed, cancelled).
CREATE INDEX tasks_state ON tasks (state, id) WHERE state IN (2, 4, 5);
CREATE UNIQUE INDEX tasks_idem_key ON tasks (tenant, idem_key) WHERE idem_key IS NOT NULL;
CREATE INDEX tasks_digest ON tasks (tenant, digest) WHERE digest IS NOT NULL AND idem_key IS NULL;

-- One row per accepted transaction: `count` events from number `seq` on, and what replay needs.
CREATE TABLE log (
    task    uuid    NOT NULL,
    seq     bigint  NOT NULL,
    count   integer NOT NULL,
    time    bigint  NOT NULL,
    run     bigint  NOT NULL,
    events  text    NOT NULL,
    records text,
    PRIMARY KEY (task, seq)
);

CREATE TABLE states (
    task    uuid   NOT NULL PRIMARY KEY,
    version bigint NOT NULL,
    state   text   NOT NULL
);

CREATE TABLE checkpoints (
    task       uuid   NOT NULL,
    seq        bigint NOT NULL,
    version    bigint NOT NULL,
    iteration  bigint NOT NULL,
    checksum   bigint NOT NULL,
    data       text   NOT NULL,
    created_at bigint NOT NULL,
    PRIMARY KEY (task, seq)
);

-- What is asked of people: questions (kind 0) and approvals (kind 1). `step` is where the answer
-- arrives, `digest` names exactly what is approved.
CREATE TABLE asks (
    task         uuid    NOT NULL,
    id           text    NOT NULL,
    kind         smallint NOT NULL,
    status       smallint NOT NULL,
    step         text    NOT NULL,
    text         text    NOT NULL,
    subject      text    NOT NULL,
    digest       text    NOT NULL,
    requested_at bigint NOT NULL,
    expires_at   bigint,
    decided_at   bigint,
    decided_by   text,
    reason       text,
    PRIMARY KEY (task, id)
);
CREATE INDEX asks_open ON asks (requested_at) WHERE status = 0;

CREATE TABLE queues (
    name        text   NOT NULL COLLATE "C" PRIMARY KEY,
    max_pending bigint NOT NULL,
    max_running bigint,
    ageing      bigint NOT NULL
);

-- How many tasks are pending per queue. Several rows per queue, so that those who add and those
-- who take do not wait for each other; their sum counts.
CREATE TABLE depths (
    queue   text    NOT NULL COLLATE "C",
    shard   integer NOT NULL,
    pending bigint  NOT NULL,
    PRIMARY KEY (queue, shard)
) WITH (fillfactor = 30);

-- Bounds on running tasks and how many count in each. `max` of a concurrency key that no
-- setting names is 1; such a row lives only while something counts in it or waits for it.
CREATE TABLE limits (
    name    text    NOT NULL COLLATE "C" PRIMARY KEY,
    max     bigint  NOT NULL,
    running bigint  NOT NULL DEFAULT 0,
    lasting boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

CREATE TABLE workers (
    id         uuid   NOT NULL PRIMARY KEY,
    name       text   NOT NULL,
    handlers   text   NOT NULL,
    queues     text   NOT NULL,
    slots      bigint NOT NULL,
    started_at bigint NOT NULL,
    seen_at    bigint NOT NULL
);

CREATE TABLE handlers (
    name       text   NOT NULL COLLATE "C" PRIMARY KEY,
    first_seen bigint NOT NULL
);

CREATE TABLE settings (
    name  text NOT NULL PRIMARY KEY,
    value text NOT NULL
);
