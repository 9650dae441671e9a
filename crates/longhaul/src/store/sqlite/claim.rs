//! Leasing tasks to workers, and keeping the leases alive.

use std::collections::BTreeSet;

use rusqlite::OptionalExtension;
use serde_json::json;
use uuid::Uuid;

use super::rows::{self, Id};
use super::{Tx, store_error};
use crate::event::{LogEntry, LogRow, NewEvent};
use crate::record::Record;
use crate::store::clock::micros;
use crate::store::rules::{self, Candidate};
use crate::store::{Beat, Beats, Claim, Claimed, Heartbeat, LOG_WITH_CLAIM, Lease, StoreError};
use crate::task::TaskId;

/// How many candidates beyond the wanted ones are looked at, in case some may not be taken.
const SPARE: usize = 8;

/// How often a claim looks again after all it found had to be parked.
const MAX_ROUNDS: usize = 16;

pub(super) fn claim(tx: &mut Tx<'_>, ask: &Claim) -> Result<Claimed, StoreError> {
    let mut claimed = Claimed { leases: claimed_before(tx, ask)?, suspect_waits: false };
    if !claimed.leases.is_empty() {
        return Ok(claimed);
    }
    for _ in 0..MAX_ROUNDS {
        let wanted = ask.max - claimed.leases.len();
        let alone = !claimed.leases.is_empty() || !ask.idle;
        let mut candidates = candidates(tx, ask, wanted, true)?;
        if alone && candidates.iter().any(Candidate::is_suspect) {
            claimed.suspect_waits = true;
            candidates = self::candidates(tx, ask, wanted, false)?;
        }
        if wanted == 0 || candidates.is_empty() {
            break;
        }
        let parked = take_and_park(tx, ask, &candidates, wanted, !alone, &mut claimed)?;
        // What was parked is out of the way now; there may be others behind it.
        if parked == 0 || claimed.leases.len() == ask.max {
            break;
        }
    }
    Ok(claimed)
}

/// Leases what the limits allow and parks the rest; gives how many were parked.
fn take_and_park(
    tx: &mut Tx<'_>,
    ask: &Claim,
    candidates: &[Candidate],
    wanted: usize,
    idle: bool,
    claimed: &mut Claimed,
) -> Result<usize, StoreError> {
    let mut limits = tx.limits_of(candidates)?;
    let admission = rules::admit(candidates, &mut limits, wanted, idle);
    tx.save_limits(&limits)?;
    claimed.suspect_waits |= admission.suspect_waits;
    let started = NewEvent::new("task.started", json!({"worker": ask.worker}));
    let started = LogEntry::new(&[started], &[] as &[Record]);
    for (index, holds) in &admission.take {
        let holds = (!holds.is_empty()).then(|| json!(holds).to_string());
        let lease = take(tx, ask, candidates[*index].id, holds)?;
        tx.append(lease.task, lease.last_seq, lease.fence, &started)?;
        tx.count_pending(&lease.queue, -1);
        tx.told.changed.push(lease.task);
        claimed.leases.push(lease);
    }
    for (index, limit) in &admission.park {
        tx.sql
            .prepare_cached("UPDATE tasks SET ready = 0, parked = ?2 WHERE id = ?1")
            .and_then(|mut update| update.execute((Id::from(candidates[*index].id), limit)))
            .map_err(store_error)?;
    }
    Ok(admission.park.len())
}

/// Ready tasks of the asked queues and handlers, lowest rank first.
fn candidates(tx: &Tx<'_>, ask: &Claim, wanted: usize, suspects: bool) -> Result<Vec<Candidate>, StoreError> {
    let mut found = Vec::new();
    let mut select = tx.sql.prepare_cached(include_str!("sql/claim_candidates.sql")).map_err(store_error)?;
    let wanted = wanted + SPARE;
    let max_crashes = if suspects { u32::MAX } else { rules::SUSPECT_CRASHES };
    for queue in distinct(&ask.queues) {
        for handler in distinct(&ask.handlers) {
            let rows = select
                .query_map((queue, handler, tx.now, max_crashes, wanted as i64), |row| {
                    Ok(Candidate {
                        id: rows::task_id(row, 0)?,
                        rank: row.get(1)?,
                        tenant: row.get(2)?,
                        queue: queue.to_owned(),
                        concurrency_key: row.get(3)?,
                        crashes: row.get(4)?,
                    })
                })
                .map_err(store_error)?;
            for row in rows {
                found.push(row.map_err(store_error)?);
            }
        }
    }
    found.sort_by_key(|candidate| (candidate.rank, candidate.id));
    found.truncate(wanted);
    Ok(found)
}

fn distinct(names: &[String]) -> BTreeSet<&str> {
    names.iter().map(String::as_str).collect()
}

fn take(tx: &Tx<'_>, ask: &Claim, task: TaskId, holds: Option<String>) -> Result<Lease, StoreError> {
    let mut lease = tx
        .sql
        .prepare_cached(include_str!("sql/claim_take.sql"))
        .and_then(|mut update| {
            update.query_row(
                rusqlite::params![
                    Id::from(task),
                    Id(ask.worker),
                    ask.number,
                    tx.lease_now + micros(ask.lease),
                    tx.boot,
                    holds,
                    rules::DEADLINE_GRACE,
                    tx.now,
                ],
                lease,
            )
        })
        .map_err(store_error)?;
    lease.log = log_for(tx, task, lease.last_seq - 1)?;
    Ok(lease)
}

fn lease(row: &rusqlite::Row<'_>) -> rusqlite::Result<Lease> {
    Ok(Lease {
        task: rows::task_id(row, 0)?,
        fence: row.get(1)?,
        tenant: row.get(2)?,
        handler: row.get(3)?,
        queue: row.get(4)?,
        attempts: row.get(5)?,
        max_attempts: row.get(6)?,
        crashes: row.get(7)?,
        deadline: row.get(8)?,
        last_seq: row.get(9)?,
        log: Vec::new(),
    })
}

/// The task's log up to `last_seq`, as far as a lease carries it.
fn log_for(tx: &Tx<'_>, task: TaskId, last_seq: u64) -> Result<Vec<LogRow>, StoreError> {
    let until = if last_seq <= LOG_WITH_CLAIM { last_seq } else { 1 };
    let mut select = tx.sql.prepare_cached(include_str!("sql/claim_log.sql")).map_err(store_error)?;
    select.query_map((Id::from(task), until), rows::log_row).and_then(Iterator::collect).map_err(store_error)
}

/// The leases this very claim got before, when its answer was lost.
fn claimed_before(tx: &Tx<'_>, ask: &Claim) -> Result<Vec<Lease>, StoreError> {
    let mut select = tx.sql.prepare_cached(include_str!("sql/claim_again.sql")).map_err(store_error)?;
    let mut leases: Vec<Lease> =
        select.query_map((Id(ask.worker), ask.number), lease).and_then(Iterator::collect).map_err(store_error)?;
    for lease in &mut leases {
        lease.log = log_for(tx, lease.task, lease.last_seq - 1)?;
    }
    Ok(leases)
}

pub(super) fn heartbeat(tx: &mut Tx<'_>, beat: &Heartbeat) -> Result<Beats, StoreError> {
    let until = tx.lease_now + micros(beat.lease);
    let mut extend = tx.sql.prepare_cached(include_str!("sql/heartbeat.sql")).map_err(store_error)?;
    let beats = beat
        .leases
        .iter()
        .map(|&(task, fence)| {
            let held = extend
                .query_row((Id::from(task), fence, until, tx.boot), |row| {
                    Ok(Beat::Held { cancel: rows::json(row, 0)?, last_seq: row.get(1)? })
                })
                .optional()
                .map_err(store_error)?;
            Ok(held.unwrap_or(Beat::Lost))
        })
        .collect::<Result<_, StoreError>>()?;
    seen(tx, beat.worker)?;
    Ok(Beats { beats })
}

fn seen(tx: &Tx<'_>, worker: Uuid) -> Result<(), StoreError> {
    tx.sql
        .prepare_cached("UPDATE workers SET seen_at = ?2 WHERE id = ?1")
        .and_then(|mut update| update.execute((Id(worker), tx.now)))
        .map_err(store_error)?;
    Ok(())
}
