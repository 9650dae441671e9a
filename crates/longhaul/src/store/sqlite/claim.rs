//! Leasing tasks to workers, and keeping the leases alive.

use std::collections::BTreeSet;

use rusqlite::{CachedStatement, OptionalExtension, Row};
use serde_json::json;
use uuid::Uuid;

use super::rows::{self, Id, Teller};
use super::{Tx, is_unreadable, store_error};
use crate::event::{LogEntry, LogRow, NewEvent};
use crate::record::{Record, UndoOn};
use crate::store::clock::micros;
use crate::store::rules::{self, Candidate};
use crate::store::{Beat, Beats, Claim, Claimed, Heartbeat, LOG_WITH_CLAIM, Lease, StoreError};
use crate::task::State;

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
        let idle = ask.idle && claimed.leases.is_empty();
        let mut found = look(tx, ask, wanted, true)?;
        if !idle && found.iter().any(|found| found.candidate.is_suspect()) {
            claimed.suspect_waits = true;
            found = look(tx, ask, wanted, false)?;
        }
        let parked = take_and_park(tx, ask, found, wanted, idle, &mut claimed)?;
        let alone = claimed.leases.iter().any(|lease| lease.crashes >= rules::SUSPECT_CRASHES);
        // What was parked is out of the way now; there may be others behind it.
        if parked == 0 || alone || claimed.leases.len() == ask.max {
            break;
        }
    }
    Ok(claimed)
}

/// A ready task, as it stands before it is leased.
struct Found {
    row: TaskRow,
    candidate: Candidate,
    lease: Lease,
}

/// What of its row is needed to lease it.
struct TaskRow {
    rowid: i64,
    created_at: i64,
    hooked: bool,
    lease: Option<Lease>,
}

/// Reads the columns of `sql/claim_candidates.sql` and `sql/claim_again.sql`, in their order.
fn found(row: &Row<'_>) -> rusqlite::Result<Found> {
    let (task, tenant, queue): (_, String, String) = (rows::task_id(row, 1)?, row.get(4)?, row.get(6)?);
    let crashes = row.get(9)?;
    Ok(Found {
        row: TaskRow { rowid: row.get(0)?, created_at: row.get(14)?, hooked: row.get(19)?, lease: None },
        candidate: Candidate {
            id: task,
            rank: row.get(2)?,
            tenant: tenant.clone(),
            queue: queue.clone(),
            concurrency_key: row.get(3)?,
            crashes,
        },
        lease: Lease {
            task,
            fence: row.get(11)?,
            tenant,
            handler: row.get(5)?,
            queue,
            tags: rows::json(row, 16)?.unwrap_or_default(),
            attempts: row.get(7)?,
            max_attempts: row.get(8)?,
            crashes,
            phase: rows::phase(row, 13)?,
            undo_on: UndoOn::from_code(row.get(18)?),
            deadline: row.get(10)?,
            traceparent: row.get(15)?,
            in_line_since: row.get(17)?,
            last_seq: row.get(12)?,
            log: Vec::new(),
        },
    })
}

/// Ready tasks of the asked queues and handlers, lowest rank first.
fn look(tx: &Tx<'_>, ask: &Claim, wanted: usize, suspects: bool) -> Result<Vec<Found>, StoreError> {
    let mut all = Vec::new();
    let mut select = tx.sql.prepare_cached(include_str!("sql/claim_candidates.sql")).map_err(store_error)?;
    let wanted = wanted + SPARE;
    let max_crashes = if suspects { u32::MAX } else { rules::SUSPECT_CRASHES };
    for queue in distinct(&ask.queues) {
        for handler in distinct(&ask.handlers) {
            let rows = select
                .query_map((queue, handler, tx.now, max_crashes, wanted as i64), found)
                .map_err(store_error)?;
            for row in rows {
                all.push(row.map_err(store_error)?);
            }
        }
    }
    all.sort_by_key(|found| (found.candidate.rank, found.candidate.id));
    all.truncate(wanted);
    Ok(all)
}

fn distinct(names: &[String]) -> BTreeSet<&str> {
    names.iter().map(String::as_str).collect()
}

/// Leases what the limits allow and parks the rest; gives how many were parked.
fn take_and_park(
    tx: &mut Tx<'_>,
    ask: &Claim,
    found: Vec<Found>,
    wanted: usize,
    idle: bool,
    claimed: &mut Claimed,
) -> Result<usize, StoreError> {
    if found.is_empty() {
        return Ok(0);
    }
    let (candidates, mut rows): (Vec<Candidate>, Vec<TaskRow>) = found
        .into_iter()
        .map(|Found { row, candidate, lease }| (candidate, TaskRow { lease: Some(lease), ..row }))
        .unzip();
    let mut limits = tx.limits_of(&candidates)?;
    let admission = rules::admit(&candidates, &mut limits, wanted, idle);
    tx.save_limits(&limits)?;
    claimed.suspect_waits |= admission.suspect_waits;
    let started = NewEvent::new("task.started", json!({"worker": ask.worker}));
    let started = LogEntry::new(&[started], &[] as &[Record]);
    let mut sql = Statements::prepare(tx).map_err(store_error)?;
    for (index, holds) in &admission.take {
        let row = &mut rows[*index];
        // No index is taken twice.
        let Some(lease) = row.lease.take() else { continue };
        let holds = (!holds.is_empty()).then(|| json!(holds).to_string());
        let lease = take(tx, &mut sql, ask, row, lease, holds)?;
        let teller = Teller { task: lease.task, run: lease.fence, state: State::Running, hooked: row.hooked };
        tx.append(&teller, lease.last_seq, &started)?;
        tx.count_pending(&lease.queue, -1);
        tx.told.changed.push(lease.task);
        claimed.leases.push(lease);
    }
    for (index, limit) in &admission.park {
        tx.sql
            .prepare_cached("UPDATE tasks SET ready = 0, parked = ?2 WHERE rowid = ?1")
            .and_then(|mut update| update.execute((rows[*index].rowid, limit)))
            .map_err(store_error)?;
    }
    Ok(admission.park.len())
}

/// What is executed for every task of a claim, looked up once.
struct Statements<'a> {
    take: CachedStatement<'a>,
    log: CachedStatement<'a>,
    log_first: CachedStatement<'a>,
}

impl<'a> Statements<'a> {
    fn prepare(tx: &Tx<'a>) -> rusqlite::Result<Self> {
        Ok(Self {
            take: tx.sql.prepare_cached(include_str!("sql/claim_take.sql"))?,
            log: tx.sql.prepare_cached(include_str!("sql/claim_log.sql"))?,
            log_first: tx.sql.prepare_cached(include_str!("sql/claim_log_first.sql"))?,
        })
    }
}

/// Writes a lease and gives it with its fence and its log.
fn take(
    tx: &Tx<'_>,
    sql: &mut Statements<'_>,
    ask: &Claim,
    row: &TaskRow,
    mut lease: Lease,
    holds: Option<String>,
) -> Result<Lease, StoreError> {
    lease.log = log_for(sql, &lease)?;
    lease.fence += 1;
    lease.last_seq += 1;
    let timeout = ask.timeouts.get(&lease.handler);
    lease.deadline = lease.deadline.or(timeout.map(|&timeout| row.created_at + micros(timeout)));
    sql.take
        .execute(rusqlite::params![
            row.rowid,
            Id(ask.worker),
            ask.number,
            tx.lease_now + micros(ask.lease),
            tx.boot,
            holds,
            rules::running_due(lease.deadline, lease.phase),
            tx.now,
            lease.fence,
            lease.last_seq,
            lease.deadline,
        ])
        .map_err(store_error)?;
    Ok(lease)
}

/// The log of a task with `lease.last_seq` events, as far as a lease carries it. Nothing of one that
/// cannot be read: its run finds that out and ends the task. An error here would keep everyone waiting
/// who comes after it.
fn log_for(sql: &mut Statements<'_>, lease: &Lease) -> Result<Vec<LogRow>, StoreError> {
    let select = if lease.last_seq <= LOG_WITH_CLAIM { &mut sql.log } else { &mut sql.log_first };
    match select.query_map([Id::from(lease.task)], rows::log_row).and_then(Iterator::collect) {
        Err(error) if is_unreadable(&error) => Ok(Vec::new()),
        log => log.map_err(store_error),
    }
}

/// The leases this very claim got before, when its answer was lost.
fn claimed_before(tx: &Tx<'_>, ask: &Claim) -> Result<Vec<Lease>, StoreError> {
    let mut select = tx.sql.prepare_cached(include_str!("sql/claim_again.sql")).map_err(store_error)?;
    let found: Vec<Found> =
        select.query_map((Id(ask.worker), ask.number), found).and_then(Iterator::collect).map_err(store_error)?;
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let mut sql = Statements::prepare(tx).map_err(store_error)?;
    let mut leases = Vec::with_capacity(found.len());
    for Found { mut lease, .. } in found {
        lease.log = log_for(&mut sql, &lease)?;
        // As the first time: without the row of this claim's own event.
        lease.log.retain(|row| row.run != lease.fence);
        leases.push(lease);
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
    let listed = seen(tx, beat.worker)?;
    Ok(Beats { beats, listed })
}

/// Notes that a worker lives; says whether it is on the list.
fn seen(tx: &Tx<'_>, worker: Uuid) -> Result<bool, StoreError> {
    let listed = tx
        .sql
        .prepare_cached("UPDATE workers SET seen_at = ?2 WHERE id = ?1")
        .and_then(|mut update| update.execute((Id(worker), tx.now)))
        .map_err(store_error)?;
    Ok(listed > 0)
}
