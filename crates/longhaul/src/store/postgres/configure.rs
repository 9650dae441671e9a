//! Setting queues, limits and retention.

use std::time::Duration;

use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::Tx;
use super::rows::to_i64;
use super::{PostgresStore, Told, limits};
use crate::store::clock::micros;
use crate::store::{Settings, StoreError, rules};

/// How many of the parked tasks a new setting readies at once; the sweep readies the rest.
const READY_AT_ONCE: i64 = 1_000;
/// How often, and how long apart, running tasks that someone else has locked are looked at again.
const LOOKS: u32 = 20;
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

pub(super) async fn configure(store: &PostgresStore, settings: &Settings) -> Result<(), StoreError> {
    let tx = store.tx().await?;
    tx.begin().await?;
    for (name, queue) in &settings.queues {
        let (pending, running) = (to_i64(queue.max_pending), queue.max_running.map(i64::from));
        tx.execute(include_str!("sql/queue_save.sql"), &[name, &pending, &running, &micros(queue.ageing)]).await?;
    }
    if let Some(retention) = settings.retention {
        tx.execute(include_str!("sql/setting_save.sql"), &[&"retention", &micros(retention).to_string()]).await?;
    }
    tx.commit().await?;

    let mut readied = false;
    if names_limits(settings) {
        let tx = store.tx().await?;
        tx.begin().await?;
        set_limits(&tx, settings).await?;
        readied = limits::unpark_open(&tx, READY_AT_ONCE).await?;
        tx.commit().await?;
    }
    store.tell(Told { ready: readied, ..Told::default() });
    Ok(())
}

fn names_limits(settings: &Settings) -> bool {
    !settings.queues.is_empty() || !settings.tenant_max_running.is_empty() || !settings.key_max_running.is_empty()
}

async fn set_limits(tx: &Tx, settings: &Settings) -> Result<(), StoreError> {
    // Every claim reads this table. Locked, no claim is under way that does not know the new limit,
    // and every running task is counted.
    tx.batch("LOCK TABLE limits IN ACCESS EXCLUSIVE MODE").await?;
    for (name, queue) in &settings.queues {
        set(tx, &rules::queue_limit(name), queue.max_running, Running::OfQueue(name)).await?;
    }
    for (name, max) in &settings.tenant_max_running {
        set(tx, &rules::tenant_limit(name), Some(*max), Running::OfTenant(name)).await?;
    }
    for (key, max) in &settings.key_max_running {
        let max = i64::from(*max);
        tx.execute(include_str!("sql/limit_set.sql"), &[&format!("keymax/{key}"), &max, &0_i64]).await?;
        tx.execute(include_str!("sql/limit_key_max.sql"), &[key, &max]).await?;
    }
    Ok(())
}

/// Whose running tasks a limit counts.
#[derive(Clone, Copy)]
enum Running<'a> {
    OfQueue(&'a str),
    OfTenant(&'a str),
}

/// Sets or removes a limit. Tasks that run already count from now on.
async fn set(tx: &Tx, limit: &str, max: Option<u32>, running: Running<'_>) -> Result<(), StoreError> {
    let known = tx.rows("SELECT max, lasting FROM limits WHERE name = $1", &[&limit]).await?;
    match (max, known.first()) {
        // A limit that stays is counted already.
        (Some(max), Some(_)) => {
            tx.execute("UPDATE limits SET max = $2, lasting = true WHERE name = $1", &[&limit, &i64::from(max)])
                .await?;
        }
        (Some(max), None) => {
            let counted = count_running(tx, limit, running).await?;
            tx.execute(include_str!("sql/limit_set.sql"), &[&limit, &i64::from(max), &counted]).await?;
        }
        (None, Some(_)) => {
            tx.execute("DELETE FROM limits WHERE name = $1", &[&limit]).await?;
        }
        (None, None) => {}
    }
    Ok(())
}

/// Puts the limit into the `holds` of the tasks that run; gives their number. A task that someone
/// else has locked is looked at again: it is recording a step, or it waits for this very table
/// because it ends, and then it need not be counted.
async fn count_running(tx: &Tx, limit: &str, running: Running<'_>) -> Result<i64, StoreError> {
    let (queue, tenant) = match running {
        Running::OfQueue(queue) => (Some(queue), None),
        Running::OfTenant(tenant) => (None, Some(tenant)),
    };
    for _ in 0..LOOKS {
        let free = tx.rows(include_str!("sql/limit_uncounted.sql"), &[&queue, &tenant, &limit]).await?;
        add_hold(tx, limit, &free).await?;
        let counted = tx.rows(include_str!("sql/limit_counted.sql"), &[&queue, &tenant, &limit]).await?;
        let Some(row) = counted.first() else { break };
        let (counted, left): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        if left == 0 {
            return Ok(counted);
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
    let counted = tx.rows(include_str!("sql/limit_counted.sql"), &[&queue, &tenant, &limit]).await?;
    Ok(counted.first().map_or(Ok(0), |row| row.try_get(0))?)
}

async fn add_hold(tx: &Tx, limit: &str, rows: &[Row]) -> Result<(), StoreError> {
    let (mut ids, mut holds) = (Vec::<Uuid>::new(), Vec::new());
    for row in rows {
        let known: Option<&str> = row.try_get(1)?;
        let mut names: Vec<String> = known.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        names.push(limit.to_owned());
        ids.push(row.try_get(0)?);
        holds.push(limits::holds(&names));
    }
    if ids.is_empty() {
        return Ok(());
    }
    tx.execute(include_str!("sql/limit_hold.sql"), &[&ids, &holds]).await?;
    Ok(())
}
