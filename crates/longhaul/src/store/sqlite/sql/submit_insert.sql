INSERT INTO tasks (id, tenant, handler, queue, concurrency_key, idem_key, digest, tags, max_attempts,
                   created_at, deadline, priority, rank, state, ready, due_at, run_at, parent, fork_of, trace, last_seq,
                   updated_at, undo_of, phase, undoable)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, 1, ?10,
        ?21, ?21 IS NOT NULL, ?21 IS NOT NULL)
ON CONFLICT (id) DO NOTHING
