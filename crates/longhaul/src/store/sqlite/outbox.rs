//! The outbox: lines that are due, what came of deliveries, and the endpoints.

use std::collections::HashMap;

use async_trait::async_trait;
use rusqlite::{OptionalExtension, Row};
use uuid::Uuid;

use super::rows::{self, Id};
use super::{SqliteStore, Tx, store_error};
use crate::outbox::reply::{self, ReplyTo};
use crate::outbox::{Endpoint, MAX_ENDPOINTS, Webhook, check_endpoint, too_many_endpoints};
use crate::store::clock::micros;
use crate::store::outbox::{
    Attempt, DEFAULT_MAX_DUE, Delivery, DeliveryStatus, Due, LANES_AT_ONCE, MAX_DUE, MAX_LISTED, OWN, OutboxStats,
    OutboxStore, REPEATS_AT_ONCE, REPLY, RETRY_SUBMIT, Settle, TakeDue, Taken, Then, Which, delivery_id,
    read_max_due,
};
use crate::store::{StoreError, SubmitRefused};
use crate::task::{Invalid, NewTask, TaskId, timestamp};

#[async_trait]
impl OutboxStore for SqliteStore {
    async fn save_endpoint(
        &self,
        tenant: &str,
        name: &str,
        webhook: &Webhook,
    ) -> Result<Result<Endpoint, Invalid>, StoreError> {
        let (tenant, name, webhook) = (tenant.to_owned(), name.to_owned(), webhook.clone());
        self.write(false, move |tx| save_endpoint(tx, &tenant, &name, webhook)).await
    }

    async fn remove_endpoint(&self, tenant: &str, name: &str) -> Result<bool, StoreError> {
        let (tenant, name) = (tenant.to_owned(), name.to_owned());
        self.write(false, move |tx| {
            let removed = tx.sql.execute("DELETE FROM endpoints WHERE tenant = ? AND name = ?", (tenant, name));
            Ok(removed.map_err(store_error)? > 0)
        })
        .await
    }

    async fn endpoints(&self, tenant: &str) -> Result<Vec<Endpoint>, StoreError> {
        let tenant = tenant.to_owned();
        self.read(move |sql| {
            sql.prepare_cached("SELECT name, webhook, created_at FROM endpoints WHERE tenant = ? ORDER BY name")?
                .query_map([tenant], |row| {
                    let webhook = rows::json(row, 1)?.unwrap_or_else(|| Webhook::new(""));
                    Ok(Endpoint { name: row.get(0)?, webhook, created_at: timestamp(row.get(2)?) })
                })?
                .collect()
        })
        .await
    }

    async fn take_due(&self, ask: &TakeDue) -> Result<Taken, StoreError> {
        let ask = ask.clone();
        self.write(false, move |tx| take_due(tx, &ask)).await
    }

    async fn settle(&self, batch: &[Settle]) -> Result<Vec<bool>, StoreError> {
        let batch = batch.to_vec();
        self.write(false, move |tx| batch.iter().map(|settle| settle_one(tx, settle)).collect()).await
    }

    async fn next_due(&self) -> Result<Option<i64>, StoreError> {
        let next: (Option<i64>, Option<i64>) = self
            .read(|sql| {
                sql.prepare_cached(include_str!("sql/outbox_next.sql"))?
                    .query_row((), |row| Ok((row.get(0)?, row.get(1)?)))
            })
            .await?;
        let now = self.clock.now_micros();
        Ok([next.0, next.1].into_iter().flatten().min().map(|at| (at - now).max(0)))
    }

    async fn deliveries(&self, tenant: &str, task: TaskId) -> Result<Vec<Delivery>, StoreError> {
        let tenant = tenant.to_owned();
        self.read(move |sql| {
            sql.prepare_cached(include_str!("sql/deliveries.sql"))?
                .query_map((Id::from(task), tenant, MAX_LISTED as i64), delivery)?
                .collect()
        })
        .await
    }

    async fn dead_deliveries(&self, tenant: &str, limit: usize) -> Result<Vec<Delivery>, StoreError> {
        let tenant = tenant.to_owned();
        self.read(move |sql| {
            sql.prepare_cached(include_str!("sql/deliveries_dead.sql"))?
                .query_map((tenant, limit.min(MAX_LISTED) as i64), delivery)?
                .collect()
        })
        .await
    }

    async fn redeliver(&self, tenant: &str, task: TaskId, delivery: Uuid) -> Result<bool, StoreError> {
        let tenant = tenant.to_owned();
        self.write(false, move |tx| redeliver(tx, &tenant, task, delivery)).await
    }

    async fn outbox_stats(&self) -> Result<OutboxStats, StoreError> {
        let now = self.clock.now_micros();
        self.read(move |sql| {
            sql.prepare_cached(include_str!("sql/outbox_stats.sql"))?.query_row((), |row| {
                let oldest = [row.get::<_, Option<i64>>(1)?, row.get(2)?].into_iter().flatten().min();
                let oldest_due = oldest.filter(|&at| at <= now).map(timestamp);
                Ok(OutboxStats { due: row.get(0)?, oldest_due, dead: row.get(3)? })
            })
        })
        .await
    }

    async fn bound_outbox(&self, max_due: u64) -> Result<(), StoreError> {
        self.write(false, move |tx| {
            tx.gauge.forget();
            tx.sql
                .execute(
                    "INSERT INTO settings (name, value) VALUES (?1, ?2)
                     ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    (MAX_DUE, max_due.to_string()),
                )
                .map_err(store_error)?;
            Ok(())
        })
        .await
    }

    async fn kept_secret(&self, name: &str, fresh: &str) -> Result<String, StoreError> {
        let (name, fresh) = (name.to_owned(), fresh.to_owned());
        self.write(false, move |tx| {
            tx.sql
                .execute(
                    "INSERT INTO settings (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING",
                    (&name, fresh),
                )
                .and_then(|_| {
                    tx.sql.query_row("SELECT value FROM settings WHERE name = ?", [&name], |row| row.get(0))
                })
                .map_err(store_error)
        })
        .await
    }
}

fn save_endpoint(
    tx: &Tx<'_>,
    tenant: &str,
    name: &str,
    webhook: Webhook,
) -> Result<Result<Endpoint, Invalid>, StoreError> {
    if let Err(invalid) = check_endpoint(name, &webhook) {
        return Ok(Err(invalid));
    }
    let others: usize = tx
        .sql
        .query_row("SELECT count(*) FROM endpoints WHERE tenant = ? AND name <> ?", (tenant, name), |row| {
            row.get(0)
        })
        .map_err(store_error)?;
    if others >= MAX_ENDPOINTS {
        return Ok(Err(too_many_endpoints()));
    }
    let created_at = tx
        .sql
        .query_row(
            include_str!("sql/endpoint_save.sql"),
            (tenant, name, webhook.to_json(), webhook.lane(), webhook.finals_only(), tx.now),
            |row| row.get(0),
        )
        .map_err(store_error)?;
    Ok(Ok(Endpoint { name: name.to_owned(), webhook, created_at: timestamp(created_at) }))
}

/// One line that a task gets.
struct Line {
    destination: String,
    webhook: Option<String>,
    lane: String,
    finals: bool,
}

/// The destinations of tasks that are being submitted.
#[derive(Default)]
pub(super) struct Hooks {
    /// The lines to endpoints, by tenant.
    endpoints: HashMap<String, Vec<(String, String, bool)>>,
}

impl Hooks {
    fn lines(&mut self, tx: &Tx<'_>, task: &NewTask) -> Result<Vec<Line>, StoreError> {
        if !self.endpoints.contains_key(&task.tenant) {
            let found = tx
                .sql
                .prepare_cached("SELECT name, lane, finals FROM endpoints WHERE tenant = ?")
                .and_then(|mut select| {
                    let endpoint = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
                    select.query_map([&task.tenant], endpoint)?.collect()
                })
                .map_err(store_error)?;
            self.endpoints.insert(task.tenant.clone(), found);
        }
        let own = task.webhook.as_ref().map(|webhook| Line {
            destination: OWN.to_owned(),
            webhook: Some(webhook.to_json()),
            lane: webhook.lane(),
            finals: webhook.finals_only(),
        });
        let reply = task.reply.as_ref().map(|to| Line {
            destination: REPLY.to_owned(),
            webhook: Some(to.to_json()),
            lane: reply::lane(task.id),
            finals: true,
        });
        let endpoints = self.endpoints.get(&task.tenant).into_iter().flatten();
        let endpoints = endpoints.map(|(name, lane, finals)| Line {
            destination: format!("endpoint:{name}"),
            webhook: None,
            lane: lane.clone(),
            finals: *finals,
        });
        Ok(own.into_iter().chain(reply).chain(endpoints).collect())
    }

    /// Why this task cannot be accepted now, when the outbox is full and it would add to it.
    pub(super) fn refuse(&mut self, tx: &Tx<'_>, task: &NewTask) -> Result<Option<SubmitRefused>, StoreError> {
        // A child is part of a task that was accepted.
        if task.parent.is_some() || self.lines(tx, task)?.is_empty() {
            return Ok(None);
        }
        let full = match tx.gauge.get() {
            Some(full) => full,
            None => {
                let full = full(tx)?;
                tx.gauge.learn(full);
                full
            }
        };
        Ok(full.map(|max| SubmitRefused::OutboxFull { max, retry_after: RETRY_SUBMIT }))
    }

    /// Gives a task that was just accepted its lines.
    pub(super) fn hook(&mut self, tx: &Tx<'_>, task: &NewTask) -> Result<(), StoreError> {
        let lines = self.lines(tx, task)?;
        if lines.is_empty() {
            return Ok(());
        }
        let mut insert = tx.sql.prepare_cached(include_str!("sql/outbox_hook.sql")).map_err(store_error)?;
        for Line { destination, webhook, lane, finals } in lines {
            insert
                .execute((Id::from(task.id), destination, &task.tenant, webhook, lane, finals, tx.now))
                .map_err(store_error)?;
        }
        tx.sql
            .prepare_cached("UPDATE tasks SET hooked = 1 WHERE id = ?")
            .and_then(|mut update| update.execute([Id::from(task.id)]))
            .map_err(store_error)?;
        Ok(())
    }
}

/// The bound on due lines, when it is reached.
fn full(tx: &Tx<'_>) -> Result<Option<u64>, StoreError> {
    let (max, due): (Option<String>, u64) = tx
        .sql
        .prepare_cached(include_str!("sql/outbox_full.sql"))
        .and_then(|mut select| select.query_row((MAX_DUE, DEFAULT_MAX_DUE), |row| Ok((row.get(0)?, row.get(1)?))))
        .map_err(store_error)?;
    let max = read_max_due(max.as_deref());
    Ok((due >= max).then_some(max))
}

fn take_due(tx: &mut Tx<'_>, ask: &TakeDue) -> Result<Taken, StoreError> {
    let mut taken = Taken { due: take_again(tx, ask)?, next_lane: String::new() };
    let lanes: Vec<String> = tx
        .sql
        .prepare_cached(include_str!("sql/outbox_lanes.sql"))
        .and_then(|mut select| {
            select.query_map((&ask.after_lane, LANES_AT_ONCE as i64), |row| row.get(0))?.collect()
        })
        .map_err(store_error)?;
    let more = lanes.len() >= LANES_AT_ONCE;
    let last = lanes.last().cloned().filter(|_| more).unwrap_or_default();
    for lane in lanes {
        let room = ask.room(&lane).min(ask.max.saturating_sub(taken.due.len()));
        take_lane(tx, ask, &lane, room, &mut taken.due)?;
        if taken.due.len() >= ask.max {
            taken.next_lane = lane;
            return Ok(taken);
        }
    }
    taken.next_lane = last;
    Ok(taken)
}

fn take_lane(tx: &Tx<'_>, ask: &TakeDue, lane: &str, room: usize, taken: &mut Vec<Due>) -> Result<(), StoreError> {
    let found: Vec<(TaskId, String, Option<Due>)> = tx
        .sql
        .prepare_cached(include_str!("sql/outbox_due.sql"))
        .and_then(|mut select| {
            let line = |row: &Row<'_>| Ok((rows::task_id(row, 0)?, row.get(1)?, due(row, Which::After, lane)?));
            select.query_map((lane, tx.now, room as i64), line)?.collect()
        })
        .map_err(store_error)?;
    for (task, destination, due) in found {
        let Some(due) = due else {
            // Its endpoint is gone.
            tx.sql
                .prepare_cached("DELETE FROM outbox WHERE task = ? AND destination = ?")
                .and_then(|mut delete| delete.execute((Id::from(task), destination)))
                .map_err(store_error)?;
            continue;
        };
        tx.sql
            .prepare_cached("UPDATE outbox SET owner = ?3, due_at = ?4 WHERE task = ?1 AND destination = ?2")
            .and_then(|mut update| {
                update.execute((Id::from(task), destination, Id(ask.owner), tx.now + micros(ask.lease)))
            })
            .map_err(store_error)?;
        taken.push(due);
    }
    Ok(())
}

fn take_again(tx: &Tx<'_>, ask: &TakeDue) -> Result<Vec<Due>, StoreError> {
    let found: Vec<(Id, Option<Due>)> = tx
        .sql
        .prepare_cached(include_str!("sql/outbox_again.sql"))
        .and_then(|mut select| {
            let again = |row: &Row<'_>| Ok((row.get(7)?, due(row, Which::Again, "")?));
            select.query_map((tx.now, ask.max.min(REPEATS_AT_ONCE) as i64, ask.replies), again)?.collect()
        })
        .map_err(store_error)?;
    let mut taken = Vec::new();
    for (id, due) in found {
        tx.sql
            .prepare_cached("UPDATE deliveries SET owner = ?2, next_at = ?3 WHERE id = ?1")
            .and_then(|mut update| update.execute((id, Id(ask.owner), tx.now + micros(ask.lease))))
            .map_err(store_error)?;
        taken.extend(due);
    }
    Ok(taken)
}

/// Reads task, destination, tenant, webhook, number, attempts and first failure; `None` when there is
/// no webhook.
fn due(row: &Row<'_>, which: fn(u64) -> Which, lane: &str) -> rusqlite::Result<Option<Due>> {
    let Some(webhook) = rows::json::<Webhook>(row, 3)? else { return Ok(None) };
    let destination: String = row.get(1)?;
    let reply = match destination == REPLY {
        true => row.get::<_, Option<String>>(3)?.and_then(|text| ReplyTo::from_json(&text)),
        false => None,
    };
    Ok(Some(Due {
        task: rows::task_id(row, 0)?,
        destination,
        reply,
        tenant: row.get(2)?,
        lane: if lane.is_empty() { webhook.lane() } else { lane.to_owned() },
        webhook,
        which: which(row.get(4)?),
        attempts: row.get(5)?,
        first_at: row.get(6)?,
    }))
}

fn settle_one(tx: &Tx<'_>, settle: &Settle) -> Result<bool, StoreError> {
    let (way, wait) = settle.then.parts();
    let until = wait.map(|wait| tx.now + wait);
    let retried = matches!(settle.then, Then::Retry(_)).then_some(until).flatten();
    let id = |attempt: &Attempt| Id(delivery_id(settle.task, &settle.destination, attempt.seq));
    if settle.again {
        let Some(attempt) = &settle.attempt else { return Ok(false) };
        let written = tx
            .sql
            .prepare_cached(include_str!("sql/delivery_again.sql"))
            .and_then(|mut update| {
                update.execute(rusqlite::params![
                    id(attempt),
                    Id(settle.owner),
                    attempt.status.code(),
                    attempt.number,
                    attempt.http_status,
                    attempt.error,
                    retried,
                    retried.and(settle.first_at),
                    attempt.webhook.to_json(),
                    tx.now,
                ])
            })
            .map_err(store_error)?;
        return Ok(written > 0);
    }
    let written = tx
        .sql
        .prepare_cached(include_str!("sql/outbox_settle.sql"))
        .and_then(|mut update| {
            update.execute(rusqlite::params![
                Id::from(settle.task),
                settle.destination,
                settle.sent,
                settle.attempts,
                settle.first_at,
                way,
                until,
                tx.now,
                Id(settle.owner),
            ])
        })
        .map_err(store_error)?;
    if written == 0 {
        return Ok(false);
    }
    if let Some(attempt) = &settle.attempt {
        tx.sql
            .prepare_cached(include_str!("sql/delivery_save.sql"))
            .and_then(|mut save| {
                save.execute(rusqlite::params![
                    id(attempt),
                    Id::from(settle.task),
                    settle.destination,
                    attempt.tenant,
                    attempt.seq,
                    attempt.event,
                    attempt.webhook.to_json(),
                    attempt.status.code(),
                    attempt.number,
                    attempt.http_status,
                    attempt.error,
                    retried,
                    tx.now,
                ])
            })
            .map_err(store_error)?;
    }
    Ok(true)
}

fn delivery(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    Ok(Delivery {
        id: row.get::<_, Id>(0)?.0,
        task_id: rows::task_id(row, 1)?,
        destination: row.get(2)?,
        seq: row.get(3)?,
        event: row.get(4)?,
        url: rows::json::<Webhook>(row, 5)?.map(|webhook| webhook.url).unwrap_or_default(),
        status: DeliveryStatus::from_code(row.get(6)?),
        attempts: row.get(7)?,
        http_status: row.get(8)?,
        error: row.get(9)?,
        next_at: row.get::<_, Option<i64>>(10)?.map(timestamp),
        created_at: timestamp(row.get(11)?),
        updated_at: timestamp(row.get(12)?),
    })
}

fn redeliver(tx: &Tx<'_>, tenant: &str, task: TaskId, delivery: Uuid) -> Result<bool, StoreError> {
    let found: Option<(String, bool)> = tx
        .sql
        .query_row(
            "SELECT destination, status = 2 AND again = 0 FROM deliveries WHERE id = ? AND task = ? AND tenant = ?",
            (Id(delivery), Id::from(task), tenant),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()
        .map_err(store_error)?;
    let Some((destination, in_line)) = found else { return Ok(false) };
    let made_due = if in_line {
        tx.sql.execute(
            "UPDATE outbox SET due_at = ?3
             WHERE task = ?1 AND destination = ?2 AND owner IS NULL AND due_at IS NOT NULL",
            (Id::from(task), destination, tx.now),
        )
    } else {
        tx.sql.execute(include_str!("sql/redeliver.sql"), (Id(delivery), tx.now))
    };
    made_due.map_err(store_error)?;
    Ok(true)
}
