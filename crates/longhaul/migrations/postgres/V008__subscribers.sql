-- Subscribers of events: how far each has come in the log of all tasks, and who reads for it now. Times are
-- microseconds.
CREATE TABLE subscribers (
    name        text   NOT NULL COLLATE "C" PRIMARY KEY,
    -- whose events; of all tenants when missing
    tenant      text   COLLATE "C",
    -- the place of the first log row that was not passed, and the last event of it that was handled
    at_order    bigint NOT NULL,
    at_task     uuid   NOT NULL,
    at_seq      bigint NOT NULL,
    given       bigint NOT NULL,
    -- everything up to this time was passed, as far as was known when it was written
    passed_at   bigint NOT NULL,
    -- how long it may be behind before submits are refused
    max_behind  bigint,
    -- grows with every holder; nothing is written under an older one
    fence       bigint NOT NULL DEFAULT 0,
    held_by     text,
    lease_until bigint,
    created_at  bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

-- The transaction that stands in the task's newest log row. A transaction can have a smaller number than one
-- that wrote to the same task before it (it was given its number before it had to wait for the task); its row
-- then takes the larger one, so that the rows of a task are in their order for readers of all tasks, too.
ALTER TABLE tasks ADD COLUMN xact bigint NOT NULL DEFAULT 0;
ALTER TABLE tasks ALTER COLUMN xact SET DEFAULT (pg_current_xact_id()::text::bigint);
