//! Schedules: keeping them, and submitting the tasks of those whose tick has come.
//!
//! Whoever fires takes the rows of schedules first, and only those nobody else has, so that it never
//! waits for one while it holds others; then it goes on as every submit does.

use futures_util::future::join;
use tokio_postgres::Row;

use super::connect::Tx;
use super::rows::to_i64;
use super::{PostgresStore, heads, submit};
use crate::schedule::{Columns, LOOK_AGAIN, MAX_SCHEDULES, Schedule, Stored};
use crate::store::{StoreError, too_many_schedules};
use crate::task::{Invalid, NewTask, TaskId};

/// How many schedules fire in one transaction.
const AT_ONCE: usize = 100;

/// A row, and why it cannot be understood if it cannot.
struct Found {
    tenant: String,
    name: String,
    schedule: Result<Stored, String>,
}

fn found(row: &Row) -> Result<Found, StoreError> {
    let columns = Columns {
        tenant: row.try_get(0)?,
        name: row.try_get(1)?,
        paused: row.try_get(3)?,
        anchor: row.try_get(4)?,
        next_at: row.try_get(5)?,
        last_at: row.try_get(6)?,
        last_task: row.try_get::<_, Option<_>>(7)?.map(TaskId),
        last_error: row.try_get(8)?,
    };
    let (tenant, name) = (columns.tenant.clone(), columns.name.clone());
    Ok(Found { tenant, name, schedule: Stored::read(columns, row.try_get(2)?) })
}

pub(super) async fn save(
    store: &PostgresStore,
    asked: &Schedule,
) -> Result<Result<Schedule, Invalid>, StoreError> {
    if let Err(invalid) = asked.validate() {
        return Ok(Err(invalid));
    }
    let tx = store.tx().await?;
    tx.begin().await?;
    let saved = match save_in(store, &tx, asked).await? {
        Ok(saved) => saved,
        Err(invalid) => {
            tx.rollback().await?;
            return Ok(Err(invalid));
        }
    };
    tx.commit().await?;
    Ok(Ok(saved.schedule))
}

async fn save_in(store: &PostgresStore, tx: &Tx, asked: &Schedule) -> Result<Result<Stored, Invalid>, StoreError> {
    let new = match Stored::create(asked, heads::now(store, tx).await?) {
        Ok(new) => new,
        Err(invalid) => return Ok(Err(invalid)),
    };
    if write(tx, &new, false).await? > 0 {
        // Two who create at the same moment may both be let in; the bound is not that strict.
        let rows = tx.rows("SELECT count(*) FROM schedules WHERE tenant = $1", &[&asked.tenant]).await?;
        let count: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        return Ok(if count > to_i64(MAX_SCHEDULES) { Err(too_many_schedules()) } else { Ok(new) });
    }
    // Known, and locked from now on: nobody can fire or remove it before this is done.
    let known = find(tx, &asked.tenant, &asked.name).await?;
    let now = heads::now(store, tx).await?;
    let replaced = match known {
        Some(Found { schedule: Ok(known), .. }) => known.replace(asked, now),
        // One that cannot be read any more is made anew.
        _ => Stored::create(asked, now),
    };
    if let Ok(replaced) = &replaced {
        write(tx, replaced, true).await?;
    }
    Ok(replaced)
}

/// The schedule of this name, locked.
async fn find(tx: &Tx, tenant: &str, name: &str) -> Result<Option<Found>, StoreError> {
    let rows = tx.rows(include_str!("sql/schedule.sql"), &[&tenant, &name]).await?;
    rows.first().map(found).transpose()
}

/// Gives the number of rows that were written: none when there is one already and it is not to be
/// replaced.
async fn write(tx: &Tx, saved: &Stored, replace: bool) -> Result<u64, StoreError> {
    let Schedule { tenant, name, paused, last_task, last_error, .. } = &saved.schedule;
    let (next_at, last_at, last_task) = (saved.next_at(), saved.last_at(), last_task.map(|task| task.0));
    tx.execute(
        include_str!("sql/schedule_save.sql"),
        &[
            tenant,
            name,
            &saved.plan(),
            paused,
            &saved.anchor,
            &next_at,
            &last_at,
            &last_task,
            last_error,
            &replace,
        ],
    )
    .await
}

/// No stored text has a NUL, and the server refuses to hear of one.
fn is_askable(texts: &[&str]) -> bool {
    !texts.iter().any(|text| text.contains('\0'))
}

pub(super) async fn pause(
    store: &PostgresStore,
    tenant: &str,
    name: &str,
    pause: bool,
) -> Result<Option<Schedule>, StoreError> {
    if !is_askable(&[tenant, name]) {
        return Ok(None);
    }
    let tx = store.tx().await?;
    tx.begin().await?;
    let Some(found) = find(&tx, tenant, name).await? else {
        tx.rollback().await?;
        return Ok(None);
    };
    let known = found.schedule.map_err(StoreError::Incompatible)?;
    let changed = if pause { Ok(known.pause()) } else { known.resume(heads::now(store, &tx).await?) };
    let changed = changed.map_err(|invalid| StoreError::Failed(invalid.to_string()))?;
    write(&tx, &changed, true).await?;
    tx.commit().await?;
    Ok(Some(changed.schedule))
}

pub(super) async fn remove(store: &PostgresStore, tenant: &str, name: &str) -> Result<bool, StoreError> {
    if !is_askable(&[tenant, name]) {
        return Ok(false);
    }
    let tx = store.tx().await?;
    let removed = tx.execute("DELETE FROM schedules WHERE tenant = $1 AND name = $2", &[&tenant, &name]).await?;
    tx.end();
    Ok(removed > 0)
}

pub(super) async fn list(store: &PostgresStore, tenant: &str) -> Result<Vec<Schedule>, StoreError> {
    if !is_askable(&[tenant]) {
        return Ok(Vec::new());
    }
    let tx = store.tx().await?;
    let rows = tx.rows(include_str!("sql/schedules.sql"), &[&tenant]).await?;
    tx.end();
    let mut schedules = Vec::new();
    for row in &rows {
        match found(row)? {
            Found { schedule: Ok(stored), .. } => schedules.push(stored.schedule),
            Found { name, schedule: Err(error), .. } => {
                tracing::warn!(schedule = name, error, "a schedule is left out of the list");
            }
        }
    }
    Ok(schedules)
}

/// Submits the tasks of schedules whose tick has come, and moves the schedules on; gives how many.
pub(super) async fn fire(store: &PostgresStore, limit: usize) -> Result<usize, StoreError> {
    let tx = store.tx().await?;
    let due = tx.prepare(include_str!("sql/schedule_due.sql")).await?;
    let (offset, limit) = (store.clock.offset(), to_i64(limit.min(AT_ONCE)));
    let (begun, rows) = join(tx.begin(), tx.query(&due, &[&offset, &limit])).await;
    begun?;
    let rows: Vec<Found> = rows?.iter().map(found).collect::<Result<_, _>>()?;
    if rows.is_empty() {
        tx.rollback().await?;
        return Ok(0);
    }
    let now = heads::now(store, &tx).await?;
    let (looked_at, mut dues) = (rows.len(), Vec::new());
    for Found { tenant, name, schedule } in rows {
        match schedule.and_then(|schedule| schedule.due(now)) {
            Ok(due) => dues.push(due),
            Err(error) => {
                tracing::warn!(schedule = name, error, "a schedule cannot fire here");
                let later = now + LOOK_AGAIN;
                tx.execute(include_str!("sql/schedule_postpone.sql"), &[&tenant, &name, &later, &error]).await?;
            }
        }
    }
    let tasks: Vec<NewTask> = dues.iter().filter_map(|due| due.task.clone()).collect();
    let (answers, told) = submit::submit_within(store, &tx, &tasks).await?;
    let mut answers = answers.into_iter();
    let settled: Vec<Stored> = dues
        .into_iter()
        .map(|due| {
            let answer = if due.task.is_some() { answers.next() } else { None };
            due.settled(answer)
        })
        .collect();
    advance(&tx, &settled).await?;
    tx.commit().await?;
    store.tell(told);
    Ok(looked_at)
}

async fn advance(tx: &Tx, settled: &[Stored]) -> Result<(), StoreError> {
    fn column<'a, T>(settled: &'a [Stored], value: impl Fn(&'a Stored) -> T) -> Vec<T> {
        settled.iter().map(value).collect()
    }
    tx.execute(
        include_str!("sql/schedule_advance.sql"),
        &[
            &column(settled, |stored| stored.schedule.tenant.as_str()),
            &column(settled, |stored| stored.schedule.name.as_str()),
            &column(settled, Stored::next_at),
            &column(settled, Stored::last_at),
            &column(settled, |stored| stored.schedule.last_task.map(|task| task.0)),
            &column(settled, |stored| stored.schedule.last_error.as_deref()),
        ],
    )
    .await?;
    Ok(())
}
