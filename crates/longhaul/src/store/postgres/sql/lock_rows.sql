-- In order of their names, so that two who take several cannot wait for each other.
SELECT l.name, l.holder, l.address, l.token, l.until
FROM locks l
WHERE l.name = ANY ($1::text[])
ORDER BY l.name
FOR UPDATE
