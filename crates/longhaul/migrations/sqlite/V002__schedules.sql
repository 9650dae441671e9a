-- A schedule is one row; what it submitted are tasks like any other. Times are microseconds.

CREATE TABLE schedules (
    tenant     TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    -- when it fires, the task it submits, what becomes of missed ticks
    plan       TEXT    NOT NULL,
    paused     INTEGER NOT NULL,
    -- the moment from which intervals are counted
    anchor     INTEGER NOT NULL,
    -- the next tick; none while it is paused
    next_at    INTEGER,
    -- when a sweep must look: at the next tick, or later if the row could not be understood then
    due_at     INTEGER,
    last_at    INTEGER,
    last_task  BLOB,
    last_error TEXT,
    PRIMARY KEY (tenant, name)
);

CREATE INDEX schedules_due ON schedules (due_at) WHERE due_at IS NOT NULL;
