-- No indexed column is set here, so that recording a step rewrites one row and no index.
UPDATE tasks
SET commit_no  = ?2,
    last_seq   = ?3,
    crashes    = CASE WHEN ?4 THEN 0 ELSE crashes END,
    progress   = coalesce(?5, progress),
    updated_at = ?6,
    undoable   = undoable OR ?7,
    phase      = coalesce(?8, phase),
    usage      = coalesce(?9, usage),
    undo_on    = coalesce(?10, undo_on)
WHERE rowid = ?1
