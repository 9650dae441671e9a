UPDATE tasks
SET lease_until = ?3, lease_boot = ?4
WHERE id = ?1 AND fence = ?2 AND state = 1
RETURNING cancel, last_seq
