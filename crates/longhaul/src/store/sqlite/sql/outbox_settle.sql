-- ?6 says what is next: 0 its taker goes on, 1 it is let go, 2 it is tried again, 3 it ends; ?7 is the
-- time at which it is due in cases 0 and 2.
UPDATE outbox
SET sent     = max(sent, ?3),
    attempts = ?4,
    first_at = ?5,
    due_at   = CASE WHEN ?6 = 3 THEN NULL WHEN ?6 <> 1 THEN ?7 WHEN last_seq > ?3 THEN ?8 END,
    owner    = CASE WHEN ?6 = 0 THEN owner END,
    ended    = ?6 = 3
WHERE task = ?1 AND destination = ?2 AND owner = ?9
