//! The outbox: lines that are due, what came of deliveries, and the endpoints.

use std::collections::{BTreeSet, HashMap, HashSet};

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresStore;
use super::connect::{Params, Tx};
use super::rows::{get_id, get_json, get_u32, get_u64, to_i32, to_i64};
use crate::outbox::reply::{self, ReplyTo};
use crate::outbox::{Endpoint, MAX_ENDPOINTS, Webhook, check_endpoint, too_many_endpoints};
use crate::store::StoreError;
use crate::store::clock::micros;
use crate::store::outbox::{
    DEFAULT_MAX_DUE, Delivery, DeliveryStatus, Due, LANES_AT_ONCE, MAX_DUE, MAX_LISTED, OWN, OutboxStats,
    OutboxStore, REPEATS_AT_ONCE, REPLY, Settle, TakeDue, Taken, Then, Which, delivery_id, read_max_due,
};
use crate::task::{Invalid, NewTask, TaskId, timestamp};

#[async_trait]
impl OutboxStore for PostgresStore {
    async fn save_endpoint(
        &self,
        tenant: &str,
        name: &str,
        webhook: &Webhook,
    ) -> Result<Result<Endpoint, Invalid>, StoreError> {
        if let Err(invalid) = check_endpoint(name, webhook) {
            return Ok(Err(invalid));
        }
        let tx = self.tx().await?;
        tx.begin().await?;
        let others =
            tx.rows("SELECT count(*) FROM endpoints WHERE tenant = $1 AND name <> $2", &[&tenant, &name]).await?;
        if others.first().map_or(Ok(0), |row| get_u64(row, 0))? >= MAX_ENDPOINTS as u64 {
            tx.rollback().await?;
            return Ok(Err(too_many_endpoints()));
        }
        let (text, lane, finals) = (webhook.to_json(), webhook.lane(), webhook.finals_only());
        let offset = self.clock.offset();
        let params: Params<'_> = &[&tenant, &name, &text, &lane, &finals, &offset];
        let saved = tx.rows(include_str!("sql/endpoint_save.sql"), params).await?;
        tx.commit().await?;
        let created_at = timestamp(saved.first().map_or(Ok(0), |row| row.try_get(0))?);
        Ok(Ok(Endpoint { name: name.to_owned(), webhook: webhook.clone(), created_at }))
    }

    async fn remove_endpoint(&self, tenant: &str, name: &str) -> Result<bool, StoreError> {
        if tenant.contains('\0') || name.contains('\0') {
            return Ok(false);
        }
        let tx = self.tx().await?;
        let removed =
            tx.execute("DELETE FROM endpoints WHERE tenant = $1 AND name = $2", &[&tenant, &name]).await?;
        tx.end();
        Ok(removed > 0)
    }

    async fn endpoints(&self, tenant: &str) -> Result<Vec<Endpoint>, StoreError> {
        if tenant.contains('\0') {
            return Ok(Vec::new());
        }
        let tx = self.tx().await?;
        let found = tx
            .rows("SELECT name, webhook, created_at FROM endpoints WHERE tenant = $1 ORDER BY name", &[&tenant])
            .await?;
        tx.end();
        let endpoint = |row: &Row| {
            let webhook = get_json(row, 1)?.unwrap_or_else(|| Webhook::new(""));
            Ok(Endpoint { name: row.try_get(0)?, webhook, created_at: timestamp(row.try_get(2)?) })
        };
        found.iter().map(endpoint).collect()
    }

    async fn take_due(&self, ask: &TakeDue) -> Result<Taken, StoreError> {
        take_due(self, ask).await
    }

    async fn settle(&self, batch: &[Settle]) -> Result<Vec<bool>, StoreError> {
        settle(self, batch).await
    }

    async fn next_due(&self) -> Result<Option<i64>, StoreError> {
        let tx = self.tx().await?;
        let next = tx.rows(include_str!("sql/outbox_next.sql"), &[&self.clock.offset()]).await?;
        tx.end();
        let next: Option<i64> = next.first().map_or(Ok(None), |row| row.try_get(0))?;
        Ok(next.map(|until| until.max(0)))
    }

    async fn deliveries(&self, tenant: &str, task: TaskId) -> Result<Vec<Delivery>, StoreError> {
        list(self, tenant, include_str!("sql/deliveries.sql"), &[&task.0, &tenant, &to_i64(MAX_LISTED)]).await
    }

    async fn dead_deliveries(&self, tenant: &str, limit: usize) -> Result<Vec<Delivery>, StoreError> {
        let limit = to_i64(limit.min(MAX_LISTED));
        list(self, tenant, include_str!("sql/deliveries_dead.sql"), &[&tenant, &limit]).await
    }

    async fn redeliver(&self, tenant: &str, task: TaskId, delivery: Uuid) -> Result<bool, StoreError> {
        redeliver(self, tenant, task, delivery).await
    }

    async fn outbox_stats(&self) -> Result<OutboxStats, StoreError> {
        let tx = self.tx().await?;
        let stats = tx.rows(include_str!("sql/outbox_stats.sql"), &[&self.clock.offset()]).await?;
        tx.end();
        let Some(row) = stats.first() else { return Ok(OutboxStats::default()) };
        let oldest = [row.try_get::<_, Option<i64>>(1)?, row.try_get(2)?].into_iter().flatten().min();
        let now: i64 = row.try_get(4)?;
        let oldest_due = oldest.filter(|&at| at <= now).map(timestamp);
        Ok(OutboxStats { due: get_u64(row, 0)?, oldest_due, dead: get_u64(row, 3)? })
    }

    async fn bound_outbox(&self, max_due: u64) -> Result<(), StoreError> {
        let tx = self.tx().await?;
        tx.execute(include_str!("sql/setting_save.sql"), &[&MAX_DUE, &max_due.to_string()]).await?;
        tx.end();
        self.gauge.forget();
        Ok(())
    }

    async fn kept_secret(&self, name: &str, fresh: &str) -> Result<String, StoreError> {
        let tx = self.tx().await?;
        tx.execute("INSERT INTO settings (name, value) VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&name, &fresh])
            .await?;
        // A statement of its own, so that it sees what another process committed at this moment.
        let kept = tx.rows("SELECT value FROM settings WHERE name = $1", &[&name]).await?;
        tx.end();
        let kept = kept.first().ok_or_else(|| StoreError::Unavailable("the secret was removed".to_owned()))?;
        Ok(kept.try_get(0)?)
    }
}

/// The endpoints of the tenants of a batch: name, lane, and whether only ends are wanted.
#[derive(Default)]
pub(super) struct Hooks(HashMap<String, Vec<(String, String, bool)>>);

impl Hooks {
    pub(super) async fn read(tx: &Tx, tasks: &[NewTask]) -> Result<Self, StoreError> {
        // A name with a NUL was refused already and cannot be asked for.
        let tenants: BTreeSet<&str> =
            tasks.iter().map(|task| task.tenant.as_str()).filter(|tenant| !tenant.contains('\0')).collect();
        let tenants: Vec<&str> = tenants.into_iter().collect();
        let mut hooks = Self::default();
        let text = "SELECT tenant, name, lane, finals FROM endpoints WHERE tenant = ANY ($1::text[])";
        for row in tx.rows(text, &[&tenants]).await? {
            let endpoint = (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
            hooks.0.entry(row.try_get(0)?).or_default().push(endpoint);
        }
        Ok(hooks)
    }

    /// Whether this task has a destination.
    pub(super) fn any(&self, task: &NewTask) -> bool {
        task.webhook.is_some() || task.reply.is_some() || self.0.contains_key(&task.tenant)
    }

    /// Gives tasks that were just accepted their lines.
    pub(super) async fn hook<'a>(
        &self,
        tx: &Tx,
        tasks: impl Iterator<Item = &'a NewTask>,
        now: i64,
    ) -> Result<(), StoreError> {
        let (mut ids, mut destinations, mut tenants) = (Vec::new(), Vec::new(), Vec::new());
        let (mut webhooks, mut lanes, mut finals) = (Vec::new(), Vec::new(), Vec::new());
        for task in tasks {
            let own = task
                .webhook
                .iter()
                .map(|webhook| (OWN.to_owned(), Some(webhook.to_json()), webhook.lane(), webhook.finals_only()));
            let reply =
                task.reply.iter().map(|to| (REPLY.to_owned(), Some(to.to_json()), reply::lane(task.id), true));
            let endpoints = self.0.get(&task.tenant).into_iter().flatten();
            let endpoints =
                endpoints.map(|(name, lane, finals)| (format!("endpoint:{name}"), None, lane.clone(), *finals));
            for (destination, webhook, lane, only_finals) in own.chain(reply).chain(endpoints) {
                ids.push(task.id.0);
                destinations.push(destination);
                tenants.push(task.tenant.as_str());
                webhooks.push(webhook);
                lanes.push(lane);
                finals.push(only_finals);
            }
        }
        if !ids.is_empty() {
            let params: Params<'_> = &[&now, &ids, &destinations, &tenants, &webhooks, &lanes, &finals];
            tx.execute(include_str!("sql/outbox_hook.sql"), params).await?;
        }
        Ok(())
    }
}

/// The bound on due lines, when it is reached.
pub(super) async fn full(store: &PostgresStore, tx: &Tx) -> Result<Option<u64>, StoreError> {
    if let Some(full) = store.gauge.get() {
        return Ok(full);
    }
    let counted = tx.rows(include_str!("sql/outbox_full.sql"), &[&MAX_DUE, &to_i64(DEFAULT_MAX_DUE)]).await?;
    let Some(row) = counted.first() else { return Ok(None) };
    let max = read_max_due(row.try_get(0)?);
    let full = (get_u64(row, 1)? >= max).then_some(max);
    store.gauge.learn(full);
    Ok(full)
}

async fn take_due(store: &PostgresStore, ask: &TakeDue) -> Result<Taken, StoreError> {
    let (offset, lease) = (store.clock.offset(), micros(ask.lease));
    let tx = store.tx().await?;
    tx.begin().await?;
    let repeats = to_i64(ask.max.min(REPEATS_AT_ONCE));
    let params: Params<'_> = &[&offset, &repeats, &ask.owner, &lease, &ask.replies];
    let again = tx.rows(include_str!("sql/outbox_again.sql"), params).await?;
    let mut taken = Taken::default();
    for row in &again {
        taken.due.extend(due(row, Which::Again, None)?);
    }
    let lanes = tx.rows(include_str!("sql/outbox_lanes.sql"), &[&ask.after_lane, &to_i64(LANES_AT_ONCE)]).await?;
    let lanes: Vec<String> = lanes.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    let room = ask.max.saturating_sub(taken.due.len());
    if lanes.is_empty() || room == 0 {
        tx.commit().await?;
        return Ok(taken);
    }
    let rooms: Vec<i64> = lanes.iter().map(|lane| to_i64(ask.room(lane))).collect();
    let params: Params<'_> = &[&offset, &lanes, &rooms, &to_i64(room), &ask.owner, &lease];
    let found = tx.rows(include_str!("sql/outbox_due.sql"), params).await?;
    let mut gone: (Vec<Uuid>, Vec<String>) = Default::default();
    let mut furthest = String::new();
    for row in &found {
        let lane: String = row.try_get(7)?;
        match due(row, Which::After, Some(&lane))? {
            Some(due) => taken.due.push(due),
            None => {
                // Its endpoint is gone.
                gone.0.push(row.try_get(0)?);
                gone.1.push(row.try_get(1)?);
            }
        }
        furthest = furthest.max(lane);
    }
    if !gone.0.is_empty() {
        let text = "DELETE FROM outbox o USING unnest($1::uuid[], $2::text[]) AS d (task, destination)
                    WHERE o.task = ANY (ARRAY[d.task]) AND o.destination = d.destination";
        tx.execute(text, &[&gone.0, &gone.1]).await?;
    }
    tx.commit().await?;
    taken.next_lane = if found.len() >= room {
        furthest
    } else if lanes.len() >= LANES_AT_ONCE {
        lanes.last().cloned().unwrap_or_default()
    } else {
        String::new()
    };
    Ok(taken)
}

/// Reads task, destination, tenant, webhook, number, attempts and first failure; `None` when there is
/// no webhook.
fn due(row: &Row, which: fn(u64) -> Which, lane: Option<&str>) -> Result<Option<Due>, StoreError> {
    let Some(webhook) = get_json::<Webhook>(row, 3)? else { return Ok(None) };
    let destination: String = row.try_get(1)?;
    let reply =
        if destination == REPLY { row.try_get::<_, Option<&str>>(3)?.and_then(ReplyTo::from_json) } else { None };
    Ok(Some(Due {
        task: get_id(row, 0)?,
        destination,
        reply,
        tenant: row.try_get(2)?,
        lane: lane.map_or_else(|| webhook.lane(), str::to_owned),
        webhook,
        which: which(get_u64(row, 4)?),
        attempts: get_u32(row, 5)?,
        first_at: row.try_get(6)?,
    }))
}

/// Settles as columns.
#[derive(Default)]
struct Lines<'a> {
    ns: Vec<i64>,
    tasks: Vec<Uuid>,
    destinations: Vec<&'a str>,
    owners: Vec<Uuid>,
    sents: Vec<i64>,
    attempts: Vec<i32>,
    firsts: Vec<Option<i64>>,
    ways: Vec<i16>,
    waits: Vec<Option<i64>>,
}

async fn settle(store: &PostgresStore, batch: &[Settle]) -> Result<Vec<bool>, StoreError> {
    let mut order: Vec<usize> = (0..batch.len()).collect();
    order.sort_by_key(|&n| (batch[n].task, &batch[n].destination));
    let mut lines = Lines::default();
    for &n in order.iter().filter(|&&n| !batch[n].again) {
        let settle = &batch[n];
        let (way, wait) = settle.then.parts();
        lines.ns.push(to_i64(n));
        lines.tasks.push(settle.task.0);
        lines.destinations.push(&settle.destination);
        lines.owners.push(settle.owner);
        lines.sents.push(to_i64(settle.sent));
        lines.attempts.push(to_i32(settle.attempts));
        lines.firsts.push(settle.first_at);
        lines.ways.push(way);
        lines.waits.push(wait);
    }
    let offset = store.clock.offset();
    let tx = store.tx().await?;
    tx.begin().await?;
    let mut kept: HashSet<usize> = HashSet::new();
    if !lines.ns.is_empty() {
        let Lines { ns, tasks, destinations, owners, sents, attempts, firsts, ways, waits } = &lines;
        let params: Params<'_> = &[&offset, ns, tasks, destinations, owners, sents, attempts, firsts, ways, waits];
        for row in tx.rows(include_str!("sql/outbox_settle.sql"), params).await? {
            kept.insert(usize::try_from(row.try_get::<_, i64>(0)?).unwrap_or(usize::MAX));
        }
    }
    save_deliveries(&tx, offset, order.iter().filter(|n| kept.contains(n)).map(|&n| &batch[n])).await?;
    for &n in order.iter().filter(|&&n| batch[n].again) {
        if settle_again(&tx, offset, &batch[n]).await? {
            kept.insert(n);
        }
    }
    tx.commit().await?;
    Ok((0..batch.len()).map(|n| kept.contains(&n)).collect())
}

/// How long until it is tried again, if it is.
fn pause(settle: &Settle) -> Option<i64> {
    settle.then.parts().1.filter(|_| matches!(settle.then, Then::Retry(_)))
}

async fn save_deliveries<'a>(
    tx: &Tx,
    offset: i64,
    settles: impl Iterator<Item = &'a Settle>,
) -> Result<(), StoreError> {
    let (mut ids, mut tasks, mut destinations, mut tenants) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut seqs, mut events, mut webhooks, mut statuses) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut attempts, mut answers, mut errors, mut waits) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for settle in settles {
        let Some(attempt) = &settle.attempt else { continue };
        ids.push(delivery_id(settle.task, &settle.destination, attempt.seq));
        tasks.push(settle.task.0);
        destinations.push(settle.destination.as_str());
        tenants.push(attempt.tenant.as_str());
        seqs.push(to_i64(attempt.seq));
        events.push(attempt.event.as_str());
        webhooks.push(attempt.webhook.to_json());
        statuses.push(attempt.status.code());
        attempts.push(to_i32(attempt.number));
        answers.push(attempt.http_status.map(i32::from));
        errors.push(attempt.error.as_deref());
        waits.push(pause(settle));
    }
    if !ids.is_empty() {
        let params: Params<'_> = &[
            &offset,
            &ids,
            &tasks,
            &destinations,
            &tenants,
            &seqs,
            &events,
            &webhooks,
            &statuses,
            &attempts,
            &answers,
            &errors,
            &waits,
        ];
        tx.execute(include_str!("sql/delivery_save.sql"), params).await?;
    }
    Ok(())
}

async fn settle_again(tx: &Tx, offset: i64, settle: &Settle) -> Result<bool, StoreError> {
    let Some(attempt) = &settle.attempt else { return Ok(false) };
    let id = delivery_id(settle.task, &settle.destination, attempt.seq);
    let wait = pause(settle);
    let params: Params<'_> = &[
        &offset,
        &id,
        &settle.owner,
        &attempt.status.code(),
        &to_i32(attempt.number),
        &attempt.http_status.map(i32::from),
        &attempt.error,
        &wait,
        &wait.and(settle.first_at),
        &attempt.webhook.to_json(),
    ];
    Ok(tx.execute(include_str!("sql/delivery_again.sql"), params).await? > 0)
}

async fn list(
    store: &PostgresStore,
    tenant: &str,
    text: &str,
    params: Params<'_>,
) -> Result<Vec<Delivery>, StoreError> {
    if tenant.contains('\0') {
        return Ok(Vec::new());
    }
    let tx = store.tx().await?;
    let found = tx.rows(text, params).await?;
    tx.end();
    found.iter().map(delivery).collect()
}

fn delivery(row: &Row) -> Result<Delivery, StoreError> {
    Ok(Delivery {
        id: row.try_get(0)?,
        task_id: get_id(row, 1)?,
        destination: row.try_get(2)?,
        seq: get_u64(row, 3)?,
        event: row.try_get(4)?,
        url: get_json::<Webhook>(row, 5)?.map(|webhook| webhook.url).unwrap_or_default(),
        status: DeliveryStatus::from_code(row.try_get(6)?),
        attempts: get_u32(row, 7)?,
        http_status: row.try_get::<_, Option<i32>>(8)?.and_then(|status| u16::try_from(status).ok()),
        error: row.try_get(9)?,
        next_at: row.try_get::<_, Option<i64>>(10)?.map(timestamp),
        created_at: timestamp(row.try_get(11)?),
        updated_at: timestamp(row.try_get(12)?),
    })
}

async fn redeliver(store: &PostgresStore, tenant: &str, task: TaskId, delivery: Uuid) -> Result<bool, StoreError> {
    if tenant.contains('\0') {
        return Ok(false);
    }
    let offset = store.clock.offset();
    let tx = store.tx().await?;
    let text = "SELECT destination, status = 2 AND NOT again FROM deliveries
                WHERE id = $1 AND task = $2 AND tenant = $3";
    let found = tx.rows(text, &[&delivery, &task.0, &tenant]).await?;
    let Some(row) = found.first() else {
        tx.end();
        return Ok(false);
    };
    let (destination, in_line): (String, bool) = (row.try_get(0)?, row.try_get(1)?);
    if in_line {
        let text = "UPDATE outbox SET due_at = lh_now($3)
                    WHERE task = $1 AND destination = $2 AND owner IS NULL AND due_at IS NOT NULL";
        tx.execute(text, &[&task.0, &destination, &offset]).await?;
    } else {
        tx.execute(include_str!("sql/redeliver.sql"), &[&delivery, &offset]).await?;
    }
    tx.end();
    Ok(true)
}
