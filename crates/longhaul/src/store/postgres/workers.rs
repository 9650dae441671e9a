//! What workers say of themselves: that they exist, that they live, that they stop.

use std::collections::HashMap;

use futures_util::future::join4;
use serde_json::json;
use uuid::Uuid;

use super::connect::Tx;
use super::rows::{get_json, get_u64, to_i64};
use super::{PostgresStore, lock};
use crate::store::clock::micros;
use crate::store::{Beat, Beats, Heartbeat, StoreError, WorkerInfo};

/// Extends leases, on the connection reserved for it, in one round trip.
pub(super) async fn heartbeat(store: &PostgresStore, beat: &Heartbeat) -> Result<Beats, StoreError> {
    let mut leases = beat.leases.clone();
    leases.sort_unstable();
    leases.dedup();
    let (ids, fences): (Vec<Uuid>, Vec<i64>) = leases.iter().map(|&(task, fence)| (task.0, to_i64(fence))).unzip();
    let tx = Tx::on(&store.reserved).await?;
    let extend = tx.prepare(include_str!("sql/heartbeat.sql")).await?;
    let seen = tx.prepare(include_str!("sql/worker_seen.sql")).await?;
    let (asked, lease) = (store.clock.ask(), micros(beat.lease));
    let (begun, extended, seen, committed) = join4(
        tx.begin(),
        tx.query(&extend, &[&asked.offset, &lease, &ids, &fences]),
        tx.query(&seen, &[&asked.offset, &beat.worker]),
        tx.send_commit(),
    )
    .await;
    begun?;
    let mut held = HashMap::new();
    for row in extended? {
        let cancel = get_json(&row, 2)?;
        held.insert((row.try_get(0)?, get_u64(&row, 1)?), Beat::Held { cancel, last_seq: get_u64(&row, 3)? });
    }
    let mut listed = false;
    if let Some(row) = seen?.first() {
        asked.answered(row.try_get(0)?);
        listed = row.try_get(1)?;
    }
    committed?;
    tx.end();
    let beats = beat
        .leases
        .iter()
        .map(|&(task, fence)| held.get(&(task.0, fence)).cloned().unwrap_or(Beat::Lost))
        .collect();
    Ok(Beats { beats, listed })
}

pub(super) async fn register(store: &PostgresStore, worker: &WorkerInfo) -> Result<(), StoreError> {
    let (handlers, queues) = (json!(worker.handlers).to_string(), json!(worker.queues).to_string());
    let (offset, slots) = (store.clock.offset(), i64::from(worker.slots));
    let tx = store.tx().await?;
    tx.begin().await?;
    tx.execute(
        include_str!("sql/worker_save.sql"),
        &[&offset, &worker.id, &worker.name, &handlers, &queues, &slots],
    )
    .await?;
    tx.execute(include_str!("sql/handler_save.sql"), &[&offset, &worker.handlers]).await?;
    tx.commit().await?;
    lock(&store.handlers).extend(worker.handlers.iter().cloned());
    Ok(())
}

pub(super) async fn retire(store: &PostgresStore, worker: Uuid) -> Result<(), StoreError> {
    let tx = store.tx().await?;
    tx.execute("DELETE FROM workers WHERE id = $1", &[&worker]).await?;
    tx.end();
    lock(&store.claims).remove(&worker);
    Ok(())
}
