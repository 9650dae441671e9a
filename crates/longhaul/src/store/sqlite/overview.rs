//! What stands where; and pausing queues.

use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::OptionalExtension;
use uuid::Uuid;

use super::rows::{self, Id};
use super::{SqliteStore, store_error};
use crate::store::StoreError;
use crate::store::clock::boot_micros;
use crate::store::overview::{AHEAD, COUNTED, Facts, OverviewStore, StateCounts};
use crate::task::{DEFAULT_TENANT, TaskId};

#[async_trait]
impl OverviewStore for SqliteStore {
    async fn pause_queue(&self, queue: &str, pause: bool, by: &str) -> Result<bool, StoreError> {
        let (queue, by) = (queue.to_owned(), by.to_owned());
        self.write(false, move |tx| {
            let changed = if pause {
                tx.sql.execute(include_str!("sql/pause_save.sql"), (queue, tx.now, by))
            } else {
                tx.sql.execute(include_str!("sql/pause_end.sql"), [queue])
            };
            let changed = changed.map_err(store_error)? > 0;
            tx.told.ready |= changed && !pause;
            Ok(changed)
        })
        .await
    }

    async fn handlers(&self) -> Result<Vec<(String, i64)>, StoreError> {
        self.read(|sql| {
            sql.prepare_cached("SELECT name, first_seen FROM handlers ORDER BY name")?
                .query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect()
        })
        .await
    }

    async fn facts(&self, task: TaskId, lock: Option<&str>) -> Result<Option<Facts>, StoreError> {
        let (now, lease_now) = (self.clock.now_micros(), boot_micros() + self.clock.offset());
        let (boot, lock) = (Arc::clone(&self.boot), lock.map(str::to_owned));
        self.read(move |sql| {
            let mut select = sql.prepare_cached(include_str!("sql/facts.sql"))?;
            let facts = |row: &rusqlite::Row<'_>| facts(row, now, lease_now, &boot);
            select.query_row((Id::from(task), AHEAD, lock), facts).optional()
        })
        .await
    }

    async fn count_states(&self, tenant: &str) -> Result<StateCounts, StoreError> {
        let tenant = tenant.to_owned();
        self.read(move |sql| {
            let (index, again) = match tenant.as_str() {
                DEFAULT_TENANT => ("", "true"),
                _ => ("INDEXED BY tasks_tenant", "t.tenant = ?1 AND t.tenant <> 'default'"),
            };
            let text = include_str!("sql/count_newest.sql").replace("{index}", index).replace("{again}", again);
            let number =
                |row: &rusqlite::Row<'_>, column| row.get::<_, Option<u64>>(column).map(Option::unwrap_or_default);
            let (newest, of) = sql.prepare_cached(&text)?.query_row((&tenant, COUNTED), |row| {
                let mut newest = [0; 6];
                for (column, count) in newest.iter_mut().enumerate() {
                    *count = number(row, column)?;
                }
                Ok((newest, number(row, 6)?))
            })?;
            if of < COUNTED {
                return Ok(StateCounts::from_counts(newest, of, None));
            }
            let mut select = sql.prepare_cached(include_str!("sql/count_indexed.sql"))?;
            let indexed = select.query_row((&tenant, COUNTED), |row| {
                let mut indexed = [0; 5];
                for (column, count) in indexed.iter_mut().enumerate() {
                    *count = number(row, column)?;
                }
                Ok(indexed)
            })?;
            Ok(StateCounts::from_counts(newest, of, Some(indexed)))
        })
        .await
    }
}

/// Reads the columns of `sql/facts.sql`, in its order.
fn facts(row: &rusqlite::Row<'_>, now: i64, lease_now: i64, boot: &str) -> rusqlite::Result<Facts> {
    let id = |column| row.get::<_, Option<Id>>(column).map(|id| id.map(|id| id.0));
    let lease_until: Option<i64> = row.get(3)?;
    let same_boot = row.get::<_, Option<String>>(4)?.as_deref() == Some(boot);
    let pause: (Option<i64>, Option<String>) = (row.get(6)?, row.get(7)?);
    let limit: (Option<u64>, Option<u64>) = (row.get(8)?, row.get(9)?);
    let holders: Vec<Uuid> = rows::json(row, 10)?.unwrap_or_default();
    let locked: bool = row.get(11)?;
    Ok(Facts {
        now,
        run_at: row.get(0)?,
        parked: row.get(1)?,
        limit: limit.0.zip(limit.1),
        holders: holders.into_iter().map(TaskId).collect(),
        ahead: row.get(5)?,
        paused: pause.0.zip(pause.1),
        owner: id(2)?,
        // A lease of another boot of this host has ended with it.
        lease_left: lease_until.map(|until| if same_boot { until - lease_now } else { 0 }),
        started_at: None,
        lock: if locked { Some((id(12)?.map(TaskId), row.get(13)?)) } else { None },
        lock_ahead: row.get(14)?,
        lock_service: row.get(15)?,
        lock_trouble: row.get(16)?,
        cancel: rows::json(row, 17)?,
    })
}
