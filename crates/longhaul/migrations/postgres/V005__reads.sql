-- What a server needs beside running tasks: traces, lists by tenant.

-- The W3C traceparent a task was submitted with.
ALTER TABLE tasks ADD COLUMN trace text;
-- Lists of one tenant among many. Who has no tenants pays nothing for it.
CREATE INDEX tasks_tenant ON tasks (tenant, id) WHERE tenant <> 'default';

-- What programs and people show to be let in: only the hash of it.
CREATE TABLE tokens (
    id           uuid     NOT NULL PRIMARY KEY,
    hash         bytea    NOT NULL UNIQUE,
    name         text     NOT NULL,
    tenant       text     NOT NULL COLLATE "C",
    role         smallint NOT NULL,
    created_at   bigint   NOT NULL,
    expires_at   bigint,
    revoked_at   bigint,
    -- within some minutes
    last_used_at bigint
);
CREATE INDEX tokens_tenant ON tokens (tenant);

-- Queues whose tasks are not claimed for now. Apart from `queues`, because a queue need not be known to
-- be paused.
CREATE TABLE pauses (
    queue text   NOT NULL COLLATE "C" PRIMARY KEY,
    since bigint NOT NULL,
    by    text   NOT NULL
);

-- Readers of all tasks' events go by the transaction of a log row: those older than every transaction under
-- way are all there. BRIN, because it costs writers next to nothing.
ALTER TABLE log ADD COLUMN xact bigint NOT NULL DEFAULT (pg_current_xact_id()::text::bigint);
CREATE INDEX log_xact ON log USING brin (xact) WITH (pages_per_range = 16, autosummarize = on);
