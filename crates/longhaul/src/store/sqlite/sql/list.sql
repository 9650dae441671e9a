-- Pages by id, which grows with time. read.rs puts in which index is walked and what that index needs
-- to be said again. The unary plus keeps the planner off all others, whose order would need a sort of
-- everything.
SELECT t.id
FROM tasks t {index}
WHERE +t.tenant = ?1
  AND (?2 IS NULL OR +t.state = ?2)
  AND (?3 IS NULL OR +t.handler = ?3)
  AND (?4 IS NULL OR +t.queue = ?4)
  AND (?5 IS NULL OR EXISTS (SELECT 1 FROM json_each(t.tags) tag WHERE tag.key = ?5 AND tag.value = ?6))
  AND (?7 IS NULL OR t.id {beyond} ?7)
  AND (?9 IS NULL OR +t.parent = ?9)
  {again}
ORDER BY t.id {order}
LIMIT ?8
