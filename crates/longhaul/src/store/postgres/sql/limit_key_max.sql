-- A setting for a concurrency key holds for that key of every tenant: key/TENANT/KEY, and no
-- tenant has a slash in its name.
UPDATE limits
SET max = $2
WHERE name >= 'key/' AND name < 'key0' AND substr(name, 6 + length(split_part(name, '/', 2))) = $1
