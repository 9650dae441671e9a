-- Free locks that nobody waits for; the rows are locked.
DELETE FROM locks l
WHERE l.name = ANY ($1::text[])
  AND l.holder IS NULL
  AND NOT EXISTS (SELECT 1 FROM lock_waiters w WHERE w.name = l.name)
