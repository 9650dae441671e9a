//! Doing what is due.

use rusqlite::OptionalExtension;

use super::rows::{self, Id};
use super::{Tx, schedule, store_error};
use crate::run::child::ChildEnded;
use crate::store::rules::{self, Head};
use crate::store::{StoreError, Swept};
use crate::task::TaskId;

/// A worker not heard of for this long (microseconds) is no longer listed.
const FORGET_WORKER: i64 = 600_000_000;

pub(super) fn sweep(tx: &mut Tx<'_>, limit: usize, ticks: bool) -> Result<Swept, StoreError> {
    let mut swept = Swept::default();
    for head in heads(tx, include_str!("sql/sweep_expired.sql"), (tx.boot, tx.lease_now, limit as i64))? {
        let change = rules::lease_lost(&head, tx.now);
        tx.apply(&head, change)?;
        swept.expired += 1;
    }
    for head in heads(tx, include_str!("sql/sweep_due.sql"), (tx.now, limit as i64))? {
        match rules::due(&head, tx.now) {
            Some(change) => {
                tx.apply(&head, change)?;
                swept.due += 1;
            }
            None => postpone(tx, &head)?,
        }
    }
    swept.told = tell_parents(tx, limit)?;
    let open: Vec<String> = tx
        .sql
        .prepare_cached(include_str!("sql/limit_open.sql"))
        .and_then(|mut select| select.query_map((), |row| row.get(0))?.collect())
        .map_err(store_error)?;
    for name in open {
        tx.unpark(&name)?;
    }
    swept.locks = super::locks::sweep(tx, limit)?;
    swept.removed = retain(tx, limit)?;
    tx.sql
        .prepare_cached("DELETE FROM workers WHERE seen_at < ?")
        .and_then(|mut delete| delete.execute([tx.now - FORGET_WORKER]))
        .map_err(store_error)?;
    if ticks {
        swept.ticks = schedule::fire(tx, limit)?;
    }
    swept.next_due_in = next_due(tx, ticks)?;
    Ok(swept)
}

fn heads(tx: &Tx<'_>, sql: &str, params: impl rusqlite::Params) -> Result<Vec<Head>, StoreError> {
    tx.sql
        .prepare_cached(sql)
        .and_then(|mut select| select.query_map(params, rows::head)?.collect())
        .map_err(store_error)
}

/// Nothing was to be done yet: look again when there may be.
fn postpone(tx: &Tx<'_>, head: &Head) -> Result<(), StoreError> {
    let due_at = rules::next_look(head);
    tx.sql
        .prepare_cached("UPDATE tasks SET due_at = ?2 WHERE id = ?1")
        .and_then(|mut update| update.execute((Id::from(head.id), due_at)))
        .map_err(store_error)?;
    Ok(())
}

/// Tells parents how their children ended; gives how many children that were.
fn tell_parents(tx: &mut Tx<'_>, limit: usize) -> Result<usize, StoreError> {
    let untold: Vec<(TaskId, TaskId, ChildEnded)> = tx
        .sql
        .prepare_cached(include_str!("sql/untold.sql"))
        .and_then(|mut select| {
            let ended = |row: &rusqlite::Row<'_>| {
                let (state, result, error) = (rows::state(row, 2)?, rows::json(row, 3)?, rows::json(row, 4)?);
                Ok((rows::task_id(row, 0)?, rows::task_id(row, 1)?, ChildEnded { state, result, error }))
            };
            select.query_map([limit as i64], ended)?.collect()
        })
        .map_err(store_error)?;
    for children in untold.chunk_by(|(_, one, _), (_, other, _)| one == other) {
        let parent = children[0].1;
        // A parent that ended, or is gone, waits for nothing.
        if let Some(head) = tx.head(parent)?.filter(|head| !head.state.is_final()) {
            let arrived = children.iter().map(|(child, _, ended)| rules::child_ended(*child, ended)).collect();
            tx.apply(&head, rules::arrive_all(&head, arrived, tx.now))?;
            tx.told.controlled.push(parent);
        }
        for (child, ..) in children {
            tx.sql
                .prepare_cached("UPDATE tasks SET untold = 0 WHERE id = ?")
                .and_then(|mut update| update.execute([Id::from(*child)]))
                .map_err(store_error)?;
        }
    }
    Ok(untold.len())
}

/// Removes finished tasks past their retention, whole.
fn retain(tx: &mut Tx<'_>, limit: usize) -> Result<usize, StoreError> {
    let retention: Option<String> = tx
        .sql
        .prepare_cached("SELECT value FROM settings WHERE name = 'retention'")
        .and_then(|mut select| select.query_row((), |row| row.get(0)).optional())
        .map_err(store_error)?;
    let Some(retention) = retention.and_then(|text| text.parse::<i64>().ok()) else { return Ok(0) };
    let old: Vec<TaskId> = tx
        .sql
        .prepare_cached(include_str!("sql/sweep_old.sql"))
        .and_then(|mut select| {
            select.query_map((tx.now - retention, limit as i64), |row| rows::task_id(row, 0))?.collect()
        })
        .map_err(store_error)?;
    for &task in &old {
        remove(tx, task)?;
    }
    Ok(old.len())
}

/// Removes one task and everything that belongs to it.
pub(super) fn remove(tx: &mut Tx<'_>, task: TaskId) -> Result<(), StoreError> {
    for delete in [
        "DELETE FROM log WHERE task = ?",
        "DELETE FROM states WHERE task = ?",
        "DELETE FROM checkpoints WHERE task = ?",
        "DELETE FROM asks WHERE task = ?",
        "DELETE FROM tasks WHERE id = ?",
    ] {
        tx.sql
            .prepare_cached(delete)
            .and_then(|mut delete| delete.execute([Id::from(task)]))
            .map_err(store_error)?;
    }
    tx.told.finished.push(task);
    Ok(())
}

fn next_due(tx: &Tx<'_>, ticks: bool) -> Result<Option<i64>, StoreError> {
    type Next = (Option<i64>, Option<i64>, Option<i64>, Option<i64>, Option<i64>);
    let (due, lease, tick, held, waited): Next = tx
        .sql
        .prepare_cached(
            "SELECT (SELECT min(due_at) FROM tasks WHERE due_at IS NOT NULL),
                    (SELECT min(lease_until) FROM tasks INDEXED BY tasks_running WHERE state = 1),
                    (SELECT min(due_at) FROM schedules WHERE due_at IS NOT NULL),
                    (SELECT min(until) FROM locks WHERE until IS NOT NULL),
                    (SELECT min(until) FROM lock_waiters WHERE until IS NOT NULL)",
        )
        .and_then(|mut select| {
            select.query_row((), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)))
        })
        .map_err(store_error)?;
    let due = [due, tick.filter(|_| ticks), held, waited].into_iter().flatten().min();
    let until_due = due.map(|due| (due - tx.now).max(0));
    let until_lease = lease.map(|lease| (lease - tx.lease_now).max(0));
    Ok(rules::earliest(until_due, until_lease))
}
