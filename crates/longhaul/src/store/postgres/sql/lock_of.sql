-- The locks that these tasks hold or wait for.
SELECT l.name FROM locks l WHERE l.holder = ANY ($1::uuid[])
UNION
SELECT w.name FROM lock_waiters w WHERE w.task = ANY ($1::uuid[])
