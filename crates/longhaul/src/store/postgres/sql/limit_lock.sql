-- In order of their names, so that two who lock several cannot wait for each other.
SELECT name, max, running FROM limits WHERE name = ANY ($1::text[]) ORDER BY name FOR UPDATE
