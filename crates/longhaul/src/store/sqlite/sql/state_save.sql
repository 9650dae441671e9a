INSERT INTO states (task, version, state) VALUES (?1, ?2, ?3)
ON CONFLICT (task) DO UPDATE SET version = excluded.version, state = excluded.state
