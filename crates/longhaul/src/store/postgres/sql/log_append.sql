-- The tasks' rows are locked and saved (`head_save.sql`).
INSERT INTO log (task, seq, count, time, run, events, records, xact)
SELECT d.task, d.seq, d.count, $1, 0, d.events, d.records,
       greatest((SELECT t.xact FROM tasks t WHERE t.id = d.task), pg_current_xact_id()::text::bigint)
FROM unnest($2::uuid[], $3::bigint[], $4::integer[], $5::text[], $6::text[])
     AS d (task, seq, count, events, records)
