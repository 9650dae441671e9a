INSERT INTO log (task, seq, count, time, run, events, records)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
