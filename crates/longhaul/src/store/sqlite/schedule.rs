//! Schedules: keeping them, and submitting the tasks of those whose tick has come.

use rusqlite::{Connection, OptionalExtension, Row};

use super::rows::Id;
use super::{Tx, store_error, submit};
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

fn found(row: &Row<'_>) -> rusqlite::Result<Found> {
    let columns = Columns {
        tenant: row.get(0)?,
        name: row.get(1)?,
        paused: row.get(3)?,
        anchor: row.get(4)?,
        next_at: row.get(5)?,
        last_at: row.get(6)?,
        last_task: row.get::<_, Option<Id>>(7)?.map(|id| TaskId(id.0)),
        last_error: row.get(8)?,
    };
    let (tenant, name) = (columns.tenant.clone(), columns.name.clone());
    Ok(Found { tenant, name, schedule: Stored::read(columns, row.get_ref(2)?.as_str().unwrap_or_default()) })
}

pub(super) fn save(tx: &Tx<'_>, asked: &Schedule) -> Result<Result<Schedule, Invalid>, StoreError> {
    if let Err(invalid) = asked.validate() {
        return Ok(Err(invalid));
    }
    let known = find(tx, &asked.tenant, &asked.name)?;
    if known.is_none() && count(tx, &asked.tenant)? >= MAX_SCHEDULES {
        return Ok(Err(too_many_schedules()));
    }
    let saved = match known {
        // One that cannot be read any more is made anew.
        Some(Found { schedule: Ok(known), .. }) => known.replace(asked, tx.now),
        _ => Stored::create(asked, tx.now),
    };
    let saved = match saved {
        Ok(saved) => saved,
        Err(invalid) => return Ok(Err(invalid)),
    };
    write(tx, &saved)?;
    Ok(Ok(saved.schedule))
}

fn count(tx: &Tx<'_>, tenant: &str) -> Result<usize, StoreError> {
    tx.sql
        .query_row("SELECT count(*) FROM schedules WHERE tenant = ?", [tenant], |row| row.get(0))
        .map_err(store_error)
}

fn find(tx: &Tx<'_>, tenant: &str, name: &str) -> Result<Option<Found>, StoreError> {
    tx.sql.query_row(include_str!("sql/schedule.sql"), (tenant, name), found).optional().map_err(store_error)
}

fn write(tx: &Tx<'_>, saved: &Stored) -> Result<(), StoreError> {
    let Schedule { tenant, name, paused, last_task, last_error, .. } = &saved.schedule;
    tx.sql
        .prepare_cached(include_str!("sql/schedule_save.sql"))
        .and_then(|mut save| {
            save.execute(rusqlite::params![
                tenant,
                name,
                saved.plan(),
                paused,
                saved.anchor,
                saved.next_at(),
                saved.last_at(),
                last_task.map(Id::from),
                last_error,
            ])
        })
        .map_err(store_error)?;
    Ok(())
}

pub(super) fn pause(tx: &Tx<'_>, tenant: &str, name: &str, pause: bool) -> Result<Option<Schedule>, StoreError> {
    let Some(found) = find(tx, tenant, name)? else { return Ok(None) };
    let known = found.schedule.map_err(StoreError::Incompatible)?;
    let changed = if pause { Ok(known.pause()) } else { known.resume(tx.now) };
    let changed = changed.map_err(|invalid| StoreError::Failed(invalid.to_string()))?;
    write(tx, &changed)?;
    Ok(Some(changed.schedule))
}

pub(super) fn remove(tx: &Tx<'_>, tenant: &str, name: &str) -> Result<bool, StoreError> {
    let removed = tx.sql.execute("DELETE FROM schedules WHERE tenant = ? AND name = ?", (tenant, name));
    Ok(removed.map_err(store_error)? > 0)
}

pub(super) fn list(sql: &Connection, tenant: &str) -> rusqlite::Result<Vec<Schedule>> {
    let mut select = sql.prepare_cached(include_str!("sql/schedules.sql"))?;
    let rows = select.query_map([tenant], found)?;
    let readable = rows.filter_map(|row| match row {
        Ok(Found { schedule: Ok(stored), .. }) => Some(Ok(stored.schedule)),
        Ok(Found { name, schedule: Err(error), .. }) => {
            tracing::warn!(schedule = name, error, "a schedule is left out of the list");
            None
        }
        Err(error) => Some(Err(error)),
    });
    readable.collect()
}

/// Submits the tasks of schedules whose tick has come, and moves the schedules on; gives how many.
pub(super) fn fire(tx: &mut Tx<'_>, limit: usize) -> Result<usize, StoreError> {
    let now = tx.now;
    let rows: Vec<Found> = tx
        .sql
        .prepare_cached(include_str!("sql/schedule_due.sql"))
        .and_then(|mut select| select.query_map((now, limit.min(AT_ONCE) as i64), found)?.collect())
        .map_err(store_error)?;
    let mut dues = Vec::new();
    let looked_at = rows.len();
    for Found { tenant, name, schedule } in rows {
        match schedule.and_then(|schedule| schedule.due(now)) {
            Ok(due) => dues.push(due),
            Err(error) => postpone(tx, &tenant, &name, &error)?,
        }
    }
    // What else this sweep put back in line counts too.
    tx.save_depths()?;
    let tasks: Vec<NewTask> = dues.iter().filter_map(|due| due.task.clone()).collect();
    let mut answers = submit::submit(tx, &tasks)?.into_iter();
    for due in dues {
        let answer = if due.task.is_some() { answers.next() } else { None };
        write(tx, &due.settled(answer))?;
    }
    Ok(looked_at)
}

fn postpone(tx: &Tx<'_>, tenant: &str, name: &str, error: &str) -> Result<(), StoreError> {
    tracing::warn!(schedule = name, error, "a schedule cannot fire here");
    tx.sql
        .execute(include_str!("sql/schedule_postpone.sql"), (tenant, name, tx.now + LOOK_AGAIN, error))
        .map_err(store_error)?;
    Ok(())
}
