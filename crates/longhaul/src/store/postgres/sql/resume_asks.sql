-- What was asked, or approved, before a resume is asked again.
UPDATE asks SET status = 4 WHERE task = ANY ($1::uuid[]) AND status IN (0, 2)
