-- In order, so that two workers that start together cannot wait for each other.
INSERT INTO handlers (name, first_seen)
SELECT h.name, lh_now($1) FROM unnest($2::text[]) AS h (name) ORDER BY h.name
ON CONFLICT (name) DO NOTHING
