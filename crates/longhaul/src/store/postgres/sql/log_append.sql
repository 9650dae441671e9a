INSERT INTO log (task, seq, count, time, run, events, records)
SELECT d.task, d.seq, d.count, $1, 0, d.events, d.records
FROM unnest($2::uuid[], $3::bigint[], $4::integer[], $5::text[], $6::text[])
     AS d (task, seq, count, events, records)
