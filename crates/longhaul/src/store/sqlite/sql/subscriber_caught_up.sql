-- It is not as far behind as was noted, unless it moved meanwhile.
UPDATE subscribers SET passed_at = ?3 WHERE name = ?1 AND passed_at = ?2
