-- A setting for a concurrency key holds for that key of every tenant: key/TENANT/KEY, and no
-- tenant has a slash in its name.
UPDATE limits
SET max = ?2
WHERE name LIKE 'key/%' AND substr(name, 5 + instr(substr(name, 5), '/')) = ?1
