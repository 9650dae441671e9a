-- Subscribers of events: how far each has come in the log of all tasks, and who reads for it now. Times are
-- microseconds; leases are measured by the host's boot clock.
CREATE TABLE subscribers (
    name        TEXT    NOT NULL PRIMARY KEY,
    -- whose events; of all tenants when missing
    tenant      TEXT,
    -- the place of the first log row that was not passed, and the last event of it that was handled
    at_order    INTEGER NOT NULL,
    at_task     BLOB    NOT NULL,
    at_seq      INTEGER NOT NULL,
    given       INTEGER NOT NULL,
    -- everything up to this time was passed, as far as was known when it was written
    passed_at   INTEGER NOT NULL,
    -- how long it may be behind before submits are refused
    max_behind  INTEGER,
    -- grows with every holder; nothing is written under an older one
    fence       INTEGER NOT NULL DEFAULT 0,
    held_by     TEXT,
    lease_until INTEGER,
    lease_boot  TEXT,
    created_at  INTEGER NOT NULL
) WITHOUT ROWID;
