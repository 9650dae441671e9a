-- Those of these tasks that ended and have not let go yet.
SELECT t.id FROM tasks t WHERE t.id = ANY ($1::uuid[]) AND t.locked AND t.state >= 3
