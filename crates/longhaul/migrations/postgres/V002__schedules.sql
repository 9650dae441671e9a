-- A schedule is one row; what it submitted are tasks like any other. Times are microseconds.

CREATE TABLE schedules (
    tenant     text    NOT NULL COLLATE "C",
    name       text    NOT NULL COLLATE "C",
    -- when it fires, the task it submits, what becomes of missed ticks
    plan       text    NOT NULL,
    paused     boolean NOT NULL,
    -- the moment from which intervals are counted
    anchor     bigint  NOT NULL,
    -- the next tick; none while it is paused
    next_at    bigint,
    -- when a sweep must look: at the next tick, or later if the row could not be understood then
    due_at     bigint,
    last_at    bigint,
    last_task  uuid,
    last_error text,
    PRIMARY KEY (tenant, name)
);

CREATE INDEX schedules_due ON schedules (due_at) WHERE due_at IS NOT NULL;
