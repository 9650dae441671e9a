-- What was asked, or approved, before a resume is asked again.
UPDATE asks SET status = 4 WHERE task = ?1 AND status IN (0, 2)
