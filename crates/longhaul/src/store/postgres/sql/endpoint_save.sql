INSERT INTO endpoints (tenant, name, webhook, lane, finals, created_at) VALUES ($1, $2, $3, $4, $5, lh_now($6))
ON CONFLICT (tenant, name) DO UPDATE SET webhook = excluded.webhook, lane = excluded.lane, finals = excluded.finals
RETURNING created_at
