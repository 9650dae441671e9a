INSERT INTO pauses (queue, since, by) VALUES ($1, lh_now($2), $3) ON CONFLICT (queue) DO NOTHING
