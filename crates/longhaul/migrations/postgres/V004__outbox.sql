-- What is to be told of tasks to others: to the webhook a task was submitted with, and to the
-- endpoints its tenant had then. Times are microseconds.

-- `webhook` is JSON: the URL and the types of events it wants. What is derived from it at the time of
-- a submit stands beside it: `lane`, the receiver's host, and `finals`, that only ends are wanted.
CREATE TABLE endpoints (
    tenant     text    NOT NULL COLLATE "C",
    name       text    NOT NULL COLLATE "C",
    webhook    text    NOT NULL,
    lane       text    NOT NULL COLLATE "C",
    finals     boolean NOT NULL,
    created_at bigint  NOT NULL,
    PRIMARY KEY (tenant, name)
);

-- A task's line to one destination: `webhook`, or `endpoint:NAME`. Events after `sent` are to be looked
-- at; up to it they were delivered, given up, or not wanted. `due_at` is when to look: not set when there
-- is nothing to do, and as long as someone is at it (`owner`), the time at which another may take over.
-- Rows here are locked after those of `tasks`, in the order of their ids.
CREATE TABLE outbox (
    task        uuid    NOT NULL,
    destination text    NOT NULL COLLATE "C",
    tenant      text    NOT NULL COLLATE "C",
    -- the task's own webhook; an endpoint's is in `endpoints`
    webhook     text,
    -- lines that share a receiver
    lane        text    NOT NULL COLLATE "C",
    finals      boolean NOT NULL,
    last_seq    bigint  NOT NULL,
    sent        bigint  NOT NULL DEFAULT 0,
    due_at      bigint,
    owner       uuid,
    -- of the event at the front: how often it failed, and when first
    attempts    integer NOT NULL DEFAULT 0,
    first_at    bigint,
    -- the receiver wants no more
    ended       boolean NOT NULL DEFAULT false,
    created_at  bigint  NOT NULL,
    PRIMARY KEY (task, destination)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
-- For the first time that comes only. (Not of the plain column: the planner would walk through the due
-- lines of all lanes by it to find those of one.)
CREATE INDEX outbox_due ON outbox ((due_at + 0)) WHERE due_at IS NOT NULL;
CREATE INDEX outbox_lane ON outbox (lane, due_at) WHERE due_at IS NOT NULL;

-- What became of each event that was sent. `status`: 0 pending, 1 delivered, 2 failed (and tried again
-- in its line), 3 dead. One that is to be sent again by request (`again`) leaves at `next_at`,
-- whatever its line does.
CREATE TABLE deliveries (
    id          uuid     NOT NULL PRIMARY KEY,
    task        uuid     NOT NULL,
    destination text     NOT NULL,
    tenant      text     NOT NULL COLLATE "C",
    seq         bigint   NOT NULL,
    event       text     NOT NULL,
    webhook     text     NOT NULL,
    status      smallint NOT NULL,
    attempts    integer  NOT NULL,
    http_status integer,
    error       text,
    next_at     bigint,
    again       boolean  NOT NULL DEFAULT false,
    owner       uuid,
    first_at    bigint,
    created_at  bigint   NOT NULL,
    updated_at  bigint   NOT NULL
);
CREATE INDEX deliveries_task ON deliveries (task, seq);
CREATE INDEX deliveries_again ON deliveries (next_at) WHERE again;
CREATE INDEX deliveries_dead ON deliveries (tenant, updated_at) WHERE status = 3;

-- The task has lines in the outbox.
ALTER TABLE tasks ADD COLUMN hooked boolean NOT NULL DEFAULT false;

-- Whoever tells an event makes its lines due, in the same transaction. A line that wants only ends, and
-- that nothing was left to do for, need not look at what came before this one. The conditions stand at the
-- triggers, so that tasks without lines cost no call.
CREATE FUNCTION lh_task_told() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
    BEGIN
        UPDATE outbox
        SET last_seq = NEW.last_seq,
            sent     = CASE WHEN due_at IS NULL AND finals AND NEW.state >= 3 THEN greatest(sent, OLD.last_seq) ELSE sent END,
            due_at   = CASE WHEN due_at IS NULL AND (NOT finals OR NEW.state >= 3) THEN NEW.updated_at ELSE due_at END
        WHERE task = NEW.id AND NOT ended;
        RETURN NULL;
    END
    $$;
CREATE TRIGGER tasks_told AFTER UPDATE OF last_seq, state ON tasks
    FOR EACH ROW WHEN (NEW.hooked AND (NEW.last_seq <> OLD.last_seq OR NEW.state <> OLD.state))
    EXECUTE FUNCTION lh_task_told();

CREATE FUNCTION lh_task_unhooked() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
    BEGIN
        DELETE FROM outbox WHERE task = OLD.id;
        DELETE FROM deliveries WHERE task = OLD.id;
        RETURN NULL;
    END
    $$;
CREATE TRIGGER tasks_unhooked AFTER DELETE ON tasks
    FOR EACH ROW WHEN (OLD.hooked)
    EXECUTE FUNCTION lh_task_unhooked();
