//! Subscribers: their places, and who reads for them.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row};

use super::rows::Id;
use super::{SqliteStore, Tx, store_error};
use crate::faults;
use crate::store::StoreError;
use crate::store::clock::{boot_micros, micros};
use crate::store::feed::Place;
use crate::store::subscribers::{
    Held, LATE_AT_ONCE, LOOKED_AT, Late, MAX_COUNTED, MoveSubscriber, NewSubscriber, Position, SubscriberInfo,
    SubscriberStore, Suspect, Take, TakeSubscriber, refuse,
};
use crate::task::{Invalid, timestamp};

#[async_trait]
impl SubscriberStore for SqliteStore {
    async fn begin_subscriber(&self, new: &NewSubscriber) -> Result<Result<(), Invalid>, StoreError> {
        let new = new.clone();
        self.write(false, move |tx| begin(tx, &new)).await
    }

    async fn take_subscriber(&self, ask: &TakeSubscriber) -> Result<Take, StoreError> {
        // Looked at first: whoever waits for another to let go writes nothing.
        if let Some(busy) = self.busy(&ask.name).await? {
            return Ok(busy);
        }
        let ask = ask.clone();
        self.write(false, move |tx| take(tx, &ask)).await
    }

    async fn move_subscriber(&self, step: &MoveSubscriber) -> Result<bool, StoreError> {
        let step = step.clone();
        faults::around("move", self.write(false, move |tx| go_on(tx, &step))).await
    }

    async fn subscribers(&self) -> Result<Vec<SubscriberInfo>, StoreError> {
        let (now, boot) = (boot_micros() + self.clock.offset(), self.boot.to_string());
        self.read(move |sql| {
            let mut select = sql.prepare_cached(include_str!("sql/subscribers.sql"))?;
            let found = select.query_map((now, boot, None::<&str>), |row| {
                let info = SubscriberInfo {
                    name: row.get(0)?,
                    tenant: row.get(1)?,
                    held_by: row.get(2)?,
                    rows_behind: 0,
                    oldest: None,
                    max_behind_seconds: row.get::<_, Option<u64>>(7)?.map(|most| most / 1_000_000),
                };
                Ok((info, place(row, 3)?))
            })?;
            let mut all = Vec::new();
            for found in found {
                let (info, at) = found?;
                let (rows_behind, oldest) = lag(sql, at, MAX_COUNTED)?;
                all.push(SubscriberInfo { rows_behind, oldest: oldest.map(timestamp), ..info });
            }
            Ok(all)
        })
        .await
    }

    async fn remove_subscriber(&self, name: &str) -> Result<bool, StoreError> {
        let name = name.to_owned();
        self.write(false, move |tx| {
            tx.late.forget();
            let removed = tx.sql.execute("DELETE FROM subscribers WHERE name = ?", [name]).map_err(store_error)?;
            Ok(removed > 0)
        })
        .await
    }
}

impl SqliteStore {
    /// For how long the subscriber is another's, if it is.
    async fn busy(&self, name: &str) -> Result<Option<Take>, StoreError> {
        let (now, boot) = (boot_micros() + self.clock.offset(), self.boot.to_string());
        let name = name.to_owned();
        let left: Option<Option<i64>> = self
            .read(move |sql| {
                let mut select = sql.prepare_cached(include_str!("sql/subscribers.sql"))?;
                select.query_row((now, boot, name), |row| row.get(8)).optional()
            })
            .await?;
        Ok(match left {
            None => Some(Take::Gone),
            Some(Some(left)) if left > 0 => Some(Take::Busy(Duration::from_micros(left.unsigned_abs()))),
            Some(_) => None,
        })
    }
}

fn begin(tx: &Tx<'_>, new: &NewSubscriber) -> Result<Result<(), Invalid>, StoreError> {
    let NewSubscriber { name, tenant, at, max_behind } = new;
    let others: usize =
        tx.sql.query_row("SELECT count(*) FROM subscribers", (), |row| row.get(0)).map_err(store_error)?;
    let known: Option<Option<String>> = tx
        .sql
        .query_row("SELECT tenant FROM subscribers WHERE name = ?", [name], |row| row.get(0))
        .optional()
        .map_err(store_error)?;
    if let Err(invalid) = refuse(known.as_ref().map(Option::as_deref), new, others) {
        return Ok(Err(invalid));
    }
    let most = max_behind.map(micros);
    tx.sql
        .query_row(
            include_str!("sql/subscriber_begin.sql"),
            (name, tenant, at.order, Id(at.task), at.seq, most, tx.now),
            |_| Ok(()),
        )
        .map_err(store_error)?;
    tx.late.forget();
    Ok(Ok(()))
}

fn take(tx: &Tx<'_>, ask: &TakeSubscriber) -> Result<Take, StoreError> {
    let TakeSubscriber { name, held_by, lease } = ask;
    let taken = tx
        .sql
        .prepare_cached(include_str!("sql/subscriber_take.sql"))
        .and_then(|mut update| {
            let until = tx.lease_now + micros(*lease);
            let held = |row: &Row<'_>| {
                let at = Position { place: place(row, 1)?, given: row.get(4)? };
                Ok(Held { fence: row.get(0)?, at, passed_at: row.get(5)? })
            };
            update.query_row((name, held_by, until, tx.boot, tx.lease_now), held).optional()
        })
        .map_err(store_error)?;
    // Someone was faster.
    Ok(taken.map_or(Take::Busy(Duration::ZERO), Take::Taken))
}

fn go_on(tx: &Tx<'_>, step: &MoveSubscriber) -> Result<bool, StoreError> {
    let MoveSubscriber { name, fence, to, passed_at, lease } = step;
    let moved = tx
        .sql
        .prepare_cached(include_str!("sql/subscriber_move.sql"))
        .and_then(|mut update| {
            update.execute(rusqlite::params![
                name,
                fence,
                to.map(|to| to.place.order),
                to.map(|to| Id(to.place.task)),
                to.map(|to| to.place.seq),
                to.map(|to| to.given),
                passed_at,
                lease.map(|lease| tx.lease_now + micros(lease)),
            ])
        })
        .map_err(store_error)?;
    Ok(moved > 0)
}

fn place(row: &Row<'_>, first: usize) -> rusqlite::Result<Place> {
    Ok(Place { order: row.get(first)?, task: row.get::<_, Id>(first + 1)?.0, seq: row.get(first + 2)? })
}

/// How many rows from a place on there are, up to `most`, and the time of the oldest of them.
fn lag(sql: &Connection, at: Place, most: usize) -> rusqlite::Result<(u64, Option<i64>)> {
    let mut select = sql.prepare_cached(include_str!("sql/subscriber_lag.sql"))?;
    select.query_row((at.first_row(), most as i64), |row| Ok((row.get(0)?, row.get(1)?)))
}

/// A subscriber that is behind for longer than it may be; asked for once in a while only.
pub(super) fn late(tx: &Tx<'_>) -> Result<Option<Late>, StoreError> {
    if let Some(known) = tx.late.get() {
        return Ok(known);
    }
    let late = find_late(tx).map_err(store_error)?;
    tx.late.learn(late.clone());
    Ok(late)
}

fn find_late(tx: &Tx<'_>) -> rusqlite::Result<Option<Late>> {
    let suspects: Vec<Suspect> = tx
        .sql
        .prepare_cached(include_str!("sql/subscriber_late.sql"))?
        .query_map((tx.now, LATE_AT_ONCE as i64), |row| {
            Ok(Suspect {
                name: row.get(0)?,
                place: place(row, 1)?,
                passed_at: row.get(4)?,
                max_behind: row.get(5)?,
                created_at: row.get(6)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    for suspect in suspects {
        let (_, oldest) = lag(tx.sql, suspect.place, LOOKED_AT)?;
        match suspect.judge(oldest, tx.now) {
            Ok(late) => return Ok(Some(late)),
            Err(passed_at) => {
                tx.sql.execute(
                    include_str!("sql/subscriber_caught_up.sql"),
                    (&suspect.name, suspect.passed_at, passed_at),
                )?;
            }
        }
    }
    Ok(None)
}
