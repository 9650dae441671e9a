SELECT l.task, l.seq, l.count, l.time, l.run, l.events, l.records
FROM unnest($1::uuid[], $2::bigint[]) AS d (id, until)
JOIN log l ON l.task = ANY (ARRAY[d.id]) AND l.seq <= d.until
