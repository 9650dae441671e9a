-- A task is one row of `tasks` (where it stands) and its rows of `log` (everything that was told
-- or recorded about it, in order; the first row carries the input). Times are microseconds.

CREATE TABLE tasks (
    id              BLOB    NOT NULL PRIMARY KEY,
    tenant          TEXT    NOT NULL,
    handler         TEXT    NOT NULL,
    queue           TEXT    NOT NULL,
    concurrency_key TEXT,
    idem_key        TEXT,
    digest          BLOB,
    tags            TEXT,
    parent          BLOB,
    fork_of         BLOB,
    undo_of         BLOB,
    max_attempts    INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    deadline        INTEGER,
    -- what changes
    priority        INTEGER NOT NULL,
    rank            INTEGER NOT NULL,
    state           INTEGER NOT NULL,
    phase           INTEGER NOT NULL DEFAULT 0,
    -- something was done that is undone if the task fails
    undoable        INTEGER NOT NULL DEFAULT 0,
    -- it ended, and its parent has not been told
    untold          INTEGER NOT NULL DEFAULT 0,
    ready           INTEGER NOT NULL,
    due_at          INTEGER,
    run_at          INTEGER,
    parked          TEXT,
    holds           TEXT,
    fence           INTEGER NOT NULL DEFAULT 0,
    owner           BLOB,
    claim_no        INTEGER,
    lease_until     INTEGER,
    lease_boot      TEXT,
    commit_no       INTEGER NOT NULL DEFAULT 0,
    last_seq        INTEGER NOT NULL,
    attempts        INTEGER NOT NULL DEFAULT 0,
    crashes         INTEGER NOT NULL DEFAULT 0,
    cancel          TEXT,
    waiting         TEXT,
    result          TEXT,
    error           TEXT,
    progress        TEXT,
    usage           TEXT,
    updated_at      INTEGER NOT NULL,
    finished_at     INTEGER
);

-- What can be claimed, in the order in which it is.
CREATE INDEX tasks_ready ON tasks (queue, handler, rank, id) WHERE ready = 1;
-- Who holds what; small, because only running tasks are in it.
CREATE INDEX tasks_running ON tasks (owner, claim_no) WHERE state = 1;
-- What the sweep must look at, and when.
CREATE INDEX tasks_due ON tasks (due_at) WHERE due_at IS NOT NULL;
-- What a limit holds back, in the order in which it is let go.
CREATE INDEX tasks_parked ON tasks (parked, rank, id) WHERE parked IS NOT NULL;
-- Whose parents have not been told that they ended, and whose child is whose.
CREATE INDEX tasks_untold ON tasks (parent) WHERE untold = 1;
CREATE INDEX tasks_parent ON tasks (parent) WHERE parent IS NOT NULL;
-- Retention.
CREATE INDEX tasks_finished ON tasks (finished_at) WHERE finished_at IS NOT NULL;
-- Lists of what needs someone's attention: waiting, failed, cancelled.
-- (Not an IN list: SQLite would build a table of it at every change of a task.)
CREATE INDEX tasks_state ON tasks (state, id) WHERE state = 2 OR state >= 4;
CREATE UNIQUE INDEX tasks_idem_key ON tasks (tenant, idem_key) WHERE idem_key IS NOT NULL;
CREATE INDEX tasks_digest ON tasks (tenant, digest) WHERE digest IS NOT NULL AND idem_key IS NULL;

-- One row per accepted transaction: `count` events from number `seq` on, and what replay needs.
CREATE TABLE log (
    task    BLOB    NOT NULL,
    seq     INTEGER NOT NULL,
    count   INTEGER NOT NULL,
    time    INTEGER NOT NULL,
    run     INTEGER NOT NULL,
    events  TEXT    NOT NULL,
    records TEXT,
    PRIMARY KEY (task, seq)
);

CREATE TABLE states (
    task    BLOB    NOT NULL PRIMARY KEY,
    version INTEGER NOT NULL,
    state   TEXT    NOT NULL
) WITHOUT ROWID;

CREATE TABLE checkpoints (
    task       BLOB    NOT NULL,
    seq        INTEGER NOT NULL,
    version    INTEGER NOT NULL,
    iteration  INTEGER NOT NULL,
    checksum   INTEGER NOT NULL,
    data       TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (task, seq)
);

-- What is asked of people: questions (kind 0) and approvals (kind 1). `step` is where the answer
-- arrives, `digest` names exactly what is approved.
CREATE TABLE asks (
    task         BLOB    NOT NULL,
    id           TEXT    NOT NULL,
    kind         INTEGER NOT NULL,
    status       INTEGER NOT NULL,
    step         TEXT    NOT NULL,
    text         TEXT    NOT NULL,
    subject      TEXT    NOT NULL,
    digest       TEXT    NOT NULL,
    requested_at INTEGER NOT NULL,
    expires_at   INTEGER,
    decided_at   INTEGER,
    decided_by   TEXT,
    reason       TEXT,
    PRIMARY KEY (task, id)
);
CREATE INDEX asks_open ON asks (requested_at) WHERE status = 0;

CREATE TABLE queues (
    name        TEXT    NOT NULL PRIMARY KEY,
    max_pending INTEGER NOT NULL,
    max_running INTEGER,
    ageing      INTEGER NOT NULL
) WITHOUT ROWID;

-- How many tasks are pending per queue: the sum of its rows. PostgreSQL has several per queue, so
-- that those who add and those who take do not wait for each other; here there is one.
CREATE TABLE depths (
    queue   TEXT    NOT NULL,
    shard   INTEGER NOT NULL,
    pending INTEGER NOT NULL,
    PRIMARY KEY (queue, shard)
) WITHOUT ROWID;

-- Bounds on running tasks and how many count in each. `max` of a concurrency key that no
-- setting names is 1; such a row lives only while something counts in it or waits for it.
CREATE TABLE limits (
    name    TEXT    NOT NULL PRIMARY KEY,
    max     INTEGER NOT NULL,
    running INTEGER NOT NULL DEFAULT 0,
    lasting INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

CREATE TABLE workers (
    id         BLOB    NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL,
    handlers   TEXT    NOT NULL,
    queues     TEXT    NOT NULL,
    slots      INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at    INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE handlers (
    name       TEXT    NOT NULL PRIMARY KEY,
    first_seen INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE settings (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
