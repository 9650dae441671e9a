//! Subscribers: their places, and who reads for them.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join3;
use tokio_postgres::Row;

use super::PostgresStore;
use super::connect::{Params, Tx};
use super::feed::PLAN;
use super::rows::{get_u64, to_i64};
use crate::faults;
use crate::store::StoreError;
use crate::store::clock::micros;
use crate::store::feed::Place;
use crate::store::subscribers::{
    Held, LATE_AT_ONCE, LOOKED_AT, Late, MAX_COUNTED, MoveSubscriber, NewSubscriber, Position, SubscriberInfo,
    SubscriberStore, Suspect, Take, TakeSubscriber, refuse,
};
use crate::task::{Invalid, timestamp};

#[async_trait]
impl SubscriberStore for PostgresStore {
    async fn begin_subscriber(&self, new: &NewSubscriber) -> Result<Result<(), Invalid>, StoreError> {
        let NewSubscriber { name, tenant, at, max_behind } = new;
        let tx = self.tx().await?;
        tx.begin().await?;
        let others = tx.rows("SELECT count(*) FROM subscribers", &[]).await?;
        let others = others.first().map_or(Ok(0), |row| get_u64(row, 0))?;
        let known = tx.rows("SELECT tenant FROM subscribers WHERE name = $1", &[name]).await?;
        let known = known.first().map(|row| row.try_get::<_, Option<&str>>(0)).transpose()?;
        let mut allowed = refuse(known, new, usize::try_from(others).unwrap_or(usize::MAX));
        if allowed.is_ok() {
            let (offset, most) = (self.clock.offset(), max_behind.map(micros));
            let params: Params<'_> = &[name, tenant, &at.order, &at.task, &at.seq, &most, &offset];
            let saved = tx.rows(include_str!("sql/subscriber_begin.sql"), params).await?;
            let saved = saved.first().map(|row| row.try_get::<_, Option<&str>>(0)).transpose()?;
            // Someone else may have taken the name since it was looked for.
            allowed = refuse(saved, new, 0);
        }
        match allowed {
            Ok(()) => tx.commit().await?,
            Err(_) => tx.rollback().await?,
        }
        self.late.forget();
        Ok(allowed)
    }

    async fn take_subscriber(&self, ask: &TakeSubscriber) -> Result<Take, StoreError> {
        let TakeSubscriber { name, held_by, lease } = ask;
        let offset = self.clock.offset();
        let tx = self.tx().await?;
        let params: Params<'_> = &[name, held_by, &micros(*lease), &offset];
        let taken = tx.rows(include_str!("sql/subscriber_take.sql"), params).await?;
        if let Some(row) = taken.first() {
            tx.end();
            let at = Position { place: place(row, 1)?, given: get_u64(row, 4)? };
            return Ok(Take::Taken(Held { fence: get_u64(row, 0)?, at, passed_at: row.try_get(5)? }));
        }
        let known = tx.rows(include_str!("sql/subscribers.sql"), &[&offset, name]).await?;
        tx.end();
        let Some(row) = known.first() else { return Ok(Take::Gone) };
        let left: i64 = row.try_get::<_, Option<i64>>(8)?.unwrap_or(0).max(0);
        Ok(Take::Busy(Duration::from_micros(left.unsigned_abs())))
    }

    async fn move_subscriber(&self, step: &MoveSubscriber) -> Result<bool, StoreError> {
        faults::around("move", go_on(self, step)).await
    }

    async fn subscribers(&self) -> Result<Vec<SubscriberInfo>, StoreError> {
        let tx = self.tx().await?;
        let found = tx.rows(include_str!("sql/subscribers.sql"), &[&self.clock.offset(), &None::<&str>]).await?;
        let mut all = Vec::with_capacity(found.len());
        for row in &found {
            let (rows_behind, oldest) = lag(&tx, place(row, 3)?, MAX_COUNTED).await?;
            all.push(SubscriberInfo {
                name: row.try_get(0)?,
                tenant: row.try_get(1)?,
                held_by: row.try_get(2)?,
                rows_behind,
                oldest: oldest.map(timestamp),
                max_behind_seconds: row.try_get::<_, Option<i64>>(7)?.map(|most| most.unsigned_abs() / 1_000_000),
            });
        }
        tx.end();
        Ok(all)
    }

    async fn remove_subscriber(&self, name: &str) -> Result<bool, StoreError> {
        if name.contains('\0') {
            return Ok(false);
        }
        let tx = self.tx().await?;
        let removed = tx.execute("DELETE FROM subscribers WHERE name = $1", &[&name]).await?;
        tx.end();
        self.late.forget();
        Ok(removed > 0)
    }
}

fn place(row: &Row, first: usize) -> Result<Place, StoreError> {
    Ok(Place { order: row.try_get(first)?, task: row.try_get(first + 1)?, seq: row.try_get(first + 2)? })
}

/// How many rows from a place on there are, up to `most`, and the time of the oldest of them.
async fn lag(tx: &Tx, place: Place, most: usize) -> Result<(u64, Option<i64>), StoreError> {
    let select = tx.prepare(include_str!("sql/subscriber_lag.sql")).await?;
    let (begun, found, committed) = join3(
        tx.batch(PLAN),
        tx.query(&select, &[&place.order, &place.task, &place.seq, &to_i64(most)]),
        tx.send_commit(),
    )
    .await;
    begun?;
    let found = found?;
    committed?;
    let Some(row) = found.first() else { return Ok((0, None)) };
    Ok((get_u64(row, 0)?, row.try_get(1)?))
}

impl PostgresStore {
    /// Whether some subscriber may be behind for longer than it may be; asked for once in a while only.
    pub(super) async fn has_suspects(&self, tx: &Tx) -> Result<bool, StoreError> {
        if self.late.get().is_some() {
            return Ok(false);
        }
        let found = tx.rows(include_str!("sql/subscriber_late.sql"), &[&self.clock.offset(), &1_i64]).await?;
        if found.is_empty() {
            self.late.learn(None);
        }
        Ok(!found.is_empty())
    }

    /// A subscriber that is behind for longer than it may be; asked for once in a while only.
    pub(super) async fn late_subscriber(&self) -> Result<Option<Late>, StoreError> {
        if let Some(known) = self.late.get() {
            return Ok(known);
        }
        let tx = self.tx().await?;
        let late = find_late(&tx, self.clock.offset()).await?;
        tx.end();
        self.late.learn(late.clone());
        Ok(late)
    }
}

async fn find_late(tx: &Tx, offset: i64) -> Result<Option<Late>, StoreError> {
    let found = tx.rows(include_str!("sql/subscriber_late.sql"), &[&offset, &to_i64(LATE_AT_ONCE)]).await?;
    for row in &found {
        let suspect = Suspect {
            name: row.try_get(0)?,
            place: place(row, 1)?,
            passed_at: row.try_get(4)?,
            max_behind: row.try_get(5)?,
            created_at: row.try_get(6)?,
        };
        let (_, oldest) = lag(tx, suspect.place, LOOKED_AT).await?;
        match suspect.judge(oldest, row.try_get(7)?) {
            Ok(late) => return Ok(Some(late)),
            Err(passed_at) => {
                let note = include_str!("sql/subscriber_caught_up.sql");
                tx.execute(note, &[&suspect.name, &suspect.passed_at, &passed_at]).await?;
            }
        }
    }
    Ok(None)
}

/// Notes a place, and keeps or gives up what is held.
async fn go_on(store: &PostgresStore, step: &MoveSubscriber) -> Result<bool, StoreError> {
    let MoveSubscriber { name, fence, to, passed_at, lease } = step;
    let (order, task) = (to.map(|to| to.place.order), to.map(|to| to.place.task));
    let (seq, given) = (to.map(|to| to.place.seq), to.map(|to| to_i64(to.given)));
    let (lease, offset) = (lease.map(micros), store.clock.offset());
    let tx = store.tx().await?;
    let params: Params<'_> = &[name, &to_i64(*fence), &order, &task, &seq, &given, passed_at, &lease, &offset];
    faults::committing().await?;
    let moved = tx.execute(include_str!("sql/subscriber_move.sql"), params).await?;
    tx.end();
    Ok(moved > 0)
}
