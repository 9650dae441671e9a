-- The input is what follows `[{"input":` in the first row of a task's log. LIKE knows no case of a to z.
SELECT 1 FROM log WHERE task = ?1 AND seq = 1 AND substr(records, 11) LIKE ?2 ESCAPE '\'
