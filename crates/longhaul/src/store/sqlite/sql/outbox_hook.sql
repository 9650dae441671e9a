-- A line of a task that was just accepted; its first event is there already.
INSERT INTO outbox (task, destination, tenant, webhook, lane, finals, last_seq, due_at, created_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, 1, CASE WHEN ?6 THEN NULL ELSE ?7 END, ?7)
