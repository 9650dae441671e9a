//! What is asked of people.

use rusqlite::{Connection, Row};

use super::rows::{self, Id};
use super::{Tx, store_error};
use crate::store::ask::{self, AskDecided};
use crate::store::rules::{Change, Head};
use crate::store::{Ask, AskChange, AskKind, AskStatus, Commit, Control, ControlRefused, StoreError};
use crate::task::TaskId;

/// Opens and closes what a commit says.
pub(super) fn write(tx: &Tx<'_>, commit: &Commit) -> Result<(), StoreError> {
    let task = || Id::from(commit.task);
    for change in &commit.asks {
        let written = match change {
            AskChange::Open(ask) => {
                tx.sql.prepare_cached(include_str!("sql/ask_open.sql")).and_then(|mut insert| {
                    insert.execute((
                        task(),
                        &ask.id,
                        ask.kind as i16,
                        &ask.step,
                        &ask.text,
                        &ask.subject,
                        &ask.digest,
                        tx.now,
                        ask.expires_at,
                    ))
                })
            }
            AskChange::Use { id, .. } => close(tx, commit.task, id, AskStatus::Used),
            AskChange::Expire { id } => close(tx, commit.task, id, AskStatus::Expired),
        };
        written.map_err(store_error)?;
    }
    Ok(())
}

fn close(tx: &Tx<'_>, task: TaskId, id: &str, status: AskStatus) -> rusqlite::Result<usize> {
    tx.sql.prepare_cached(include_str!("sql/ask_close.sql"))?.execute((Id::from(task), id, status as i16, tx.now))
}

/// An approval that the commit uses and that has expired.
pub(super) fn expired(tx: &Tx<'_>, commit: &Commit) -> Result<Option<String>, StoreError> {
    for id in commit.asks.iter().filter_map(AskChange::used) {
        let expired = tx
            .sql
            .prepare_cached(include_str!("sql/ask_expired.sql"))
            .and_then(|mut select| select.exists((Id::from(commit.task), id, tx.now)))
            .map_err(store_error)?;
        if expired {
            return Ok(Some(id.to_owned()));
        }
    }
    Ok(None)
}

/// Decides on an answer or an approval, and notes it.
pub(super) fn decide(
    tx: &Tx<'_>,
    head: &Head,
    control: &Control,
) -> Result<Result<Change, ControlRefused>, StoreError> {
    let asks = of_task(tx.sql, head.id).map_err(store_error)?;
    let (change, decided) = match ask::answer(head, control, &asks, tx.now) {
        Ok(decided) => decided,
        Err(refused) => return Ok(Err(refused)),
    };
    let AskDecided { id, status, reason } = decided;
    tx.sql
        .prepare_cached(include_str!("sql/ask_decide.sql"))
        .and_then(|mut update| update.execute((Id::from(head.id), id, status as i16, tx.now, &control.by, reason)))
        .map_err(store_error)?;
    Ok(Ok(change))
}

pub(super) fn of_task(sql: &Connection, task: TaskId) -> rusqlite::Result<Vec<Ask>> {
    let mut select = sql.prepare_cached(include_str!("sql/asks.sql"))?;
    select.query_map([Id::from(task)], read)?.collect()
}

pub(super) fn open(sql: &Connection, tenant: &str, now: i64) -> rusqlite::Result<Vec<Ask>> {
    let mut select = sql.prepare_cached(include_str!("sql/asks_open.sql"))?;
    select.query_map((tenant, now), read)?.collect()
}

fn read(row: &Row<'_>) -> rusqlite::Result<Ask> {
    let kind =
        if row.get::<_, i16>(2)? == AskKind::Approval as i16 { AskKind::Approval } else { AskKind::Question };
    let status: i16 = row.get(3)?;
    Ok(Ask {
        id: row.get(0)?,
        task_id: rows::task_id(row, 1)?,
        kind,
        status: AskStatus::from_code(status).ok_or(rusqlite::Error::IntegralValueOutOfRange(3, status.into()))?,
        step: row.get(4)?,
        text: row.get(5)?,
        subject: rows::json(row, 6)?.unwrap_or_default(),
        digest: row.get(7)?,
        requested_at: row.get(8)?,
        expires_at: row.get(9)?,
        decided_by: row.get(10)?,
        decided_at: row.get(11)?,
        reason: row.get(12)?,
    })
}
