DELETE FROM lock_waiters WHERE task = ?2 AND +name = ?1 AND address = ?3
