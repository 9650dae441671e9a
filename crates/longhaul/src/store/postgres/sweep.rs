//! Doing what is due. Rows that someone else has locked are passed by: they are being looked after.

use std::collections::BTreeSet;

use futures_util::future::{join, join3};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::Tx;
use super::heads::{self, Decided};
use super::rows::{get_id, get_json, get_state, to_i64};
use super::{PostgresStore, Told, limits, schedule, state};
use crate::run::child::ChildEnded;
use crate::store::rules;
use crate::store::{StoreError, Swept};
use crate::task::TaskId;

/// A worker not heard of for this long (microseconds) is no longer listed.
const FORGET_WORKER: i64 = 600_000_000;
/// For so long after the server started (microseconds) no lease is taken back: one lease time, in
/// which every worker that is alive has extended its own.
const START_GRACE: i64 = 15_000_000;

pub(super) async fn sweep(store: &PostgresStore, limit: usize, ticks: bool) -> Result<Swept, StoreError> {
    let (at_once, limit) = (limit, to_i64(limit));
    let mut swept = Swept::default();
    decide(store, limit, &mut swept).await?;
    swept.told = tell_parents(store, limit).await?;
    swept.locks = super::locks::sweep(store, limit).await?;
    swept.removed = retain(store, limit).await?;

    let tx = store.tx().await?;
    let readied = limits::unpark_open(&tx, limit).await?;
    let offset = store.clock.offset();
    let forget = tx.prepare("DELETE FROM workers WHERE seen_at < lh_now($1) - $2").await?;
    let next = tx.prepare(include_str!("sql/sweep_next.sql")).await?;
    let tick = tx.prepare(include_str!("sql/schedule_next.sql")).await?;
    let (forgotten, next, tick) = join3(
        tx.query(&forget, &[&offset, &FORGET_WORKER]),
        tx.query(&next, &[&offset, &START_GRACE]),
        tx.query(&tick, &[&offset]),
    )
    .await;
    forgotten?;
    let next: Option<i64> = next?.first().map_or(Ok(None), |row| row.try_get(0))?;
    let tick: Option<i64> = tick?.first().map_or(Ok(None), |row| row.try_get(0))?;
    let tick = tick.filter(|_| ticks);
    tx.end();
    store.tell(Told { ready: readied, ..Told::default() });
    // When a tick has come, the next sweep says what comes after it: at once.
    if tick.is_some_and(|until| until <= 0) {
        swept.ticks = schedule::fire(store, at_once).await?;
    }
    swept.next_due_in = rules::earliest(next, tick).map(|until| until.max(0));
    Ok(swept)
}

/// Expired leases, and times that have come.
async fn decide(store: &PostgresStore, limit: i64, swept: &mut Swept) -> Result<(), StoreError> {
    let tx = store.tx().await?;
    let offset = store.clock.offset();
    let expired = tx.prepare(include_str!("sql/sweep_expired.sql")).await?;
    let due = tx.prepare(include_str!("sql/sweep_due.sql")).await?;
    let (begun, expired, due) = join3(
        tx.begin(),
        tx.query(&expired, &[&offset, &limit, &START_GRACE]),
        tx.query(&due, &[&offset, &limit]),
    )
    .await;
    begun?;
    let expired = ids(&expired?)?;
    // A lost lease comes first; what else is due of that task is due again afterwards.
    let due: BTreeSet<Uuid> = ids(&due?)?.difference(&expired).copied().collect();
    if expired.is_empty() && due.is_empty() {
        return tx.commit().await;
    }
    let now = heads::now(store, &tx).await?;
    let locked: Vec<Uuid> = expired.union(&due).copied().collect();
    let mut decided = Decided::default();
    for head in heads::read(&tx, &locked).await? {
        if expired.contains(&head.id.0) {
            decided.add(&head, rules::lease_lost(&head, now));
            swept.expired += 1;
        } else {
            match rules::due(&head, now) {
                Some(change) => {
                    decided.add(&head, change);
                    swept.due += 1;
                }
                None => {
                    let due_at = rules::next_look(&head);
                    decided.postpone(head, due_at);
                }
            }
        }
    }
    decided.write(store, &tx, now).await?;
    tx.commit().await?;
    store.tell(decided.told);
    Ok(())
}

/// Tells parents how their children ended; gives how many children that were. Parents are locked
/// before children, as everywhere.
async fn tell_parents(store: &PostgresStore, limit: i64) -> Result<usize, StoreError> {
    let tx = store.tx().await?;
    let untold = tx.rows(include_str!("sql/untold.sql"), &[&limit]).await?;
    if untold.is_empty() {
        tx.end();
        return Ok(0);
    }
    let parents: BTreeSet<Uuid> = untold.iter().map(|row| row.try_get(1)).collect::<Result<_, _>>()?;
    let parents: Vec<Uuid> = parents.into_iter().collect();
    tx.begin().await?;
    let heads = heads::read(&tx, &parents).await?;
    // What another sweep told meanwhile is not told again: whoever comes second waits for the
    // parents' rows and then sees it.
    let children = ids(&untold)?;
    let children: Vec<Uuid> = children.into_iter().collect();
    let told = tx
        .rows(
            "UPDATE tasks SET untold = false WHERE id = ANY ($1::uuid[]) AND untold AND state >= 3 \
             RETURNING id, parent, state, result, error",
            &[&children],
        )
        .await?;
    let now = heads::now(store, &tx).await?;
    let mut decided = Decided::default();
    for head in heads.iter().filter(|head| !head.state.is_final()) {
        let mut arrived = Vec::new();
        for row in told.iter().filter(|row| row.try_get::<_, Uuid>(1).is_ok_and(|parent| parent == head.id.0)) {
            let (state, result, error) = (get_state(row, 2)?, get_json(row, 3)?, get_json(row, 4)?);
            arrived.push(rules::child_ended(get_id(row, 0)?, &ChildEnded { state, result, error }));
        }
        if !arrived.is_empty() {
            decided.add(head, rules::arrive_all(head, arrived, now));
            decided.told.controlled.push(head.id);
        }
    }
    decided.write(store, &tx, now).await?;
    tx.commit().await?;
    store.tell(decided.told);
    Ok(untold.len())
}

fn ids(rows: &[Row]) -> Result<BTreeSet<Uuid>, StoreError> {
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Removes finished tasks past their retention, whole.
async fn retain(store: &PostgresStore, limit: i64) -> Result<usize, StoreError> {
    let tx: Tx = store.tx().await?;
    let old = tx.prepare(include_str!("sql/sweep_old.sql")).await?;
    let offset = store.clock.offset();
    let (begun, old) = join(tx.begin(), tx.query(&old, &[&offset, &limit])).await;
    begun?;
    let old: Vec<Uuid> = ids(&old?)?.into_iter().collect();
    if !old.is_empty() {
        state::remove(&tx, &old).await?;
    }
    tx.commit().await?;
    let removed = old.len();
    store.tell(Told { finished: old.into_iter().map(TaskId).collect(), ..Told::default() });
    Ok(removed)
}
