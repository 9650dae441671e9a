//! What stands where; and pausing queues.

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;

use super::rows::{get_json, get_u64, to_i64};
use super::{PostgresStore, Told};
use crate::store::StoreError;
use crate::store::overview::{AHEAD, COUNTED, Facts, OverviewStore, StateCounts};
use crate::task::{DEFAULT_TENANT, TaskId};

#[async_trait]
impl OverviewStore for PostgresStore {
    async fn pause_queue(&self, queue: &str, pause: bool, by: &str) -> Result<bool, StoreError> {
        let tx = self.tx().await?;
        let changed = if pause {
            tx.execute(include_str!("sql/pause_save.sql"), &[&queue, &self.clock.offset(), &by]).await?
        } else {
            tx.execute(include_str!("sql/pause_end.sql"), &[&queue]).await?
        };
        tx.end();
        self.tell(Told { ready: changed > 0 && !pause, ..Told::default() });
        Ok(changed > 0)
    }

    async fn handlers(&self) -> Result<Vec<(String, i64)>, StoreError> {
        let tx = self.tx().await?;
        let found = tx.rows("SELECT name, first_seen FROM handlers ORDER BY name", &[]).await?;
        tx.end();
        found.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
    }

    async fn facts(&self, task: TaskId, lock: Option<&str>) -> Result<Option<Facts>, StoreError> {
        let tx = self.tx().await?;
        let params: super::connect::Params<'_> = &[&task.0, &self.clock.offset(), &to_i64(AHEAD), &lock];
        let found = tx.rows(include_str!("sql/facts.sql"), params).await?;
        tx.end();
        found.first().map(facts).transpose()
    }

    async fn count_states(&self, tenant: &str) -> Result<StateCounts, StoreError> {
        if tenant.contains('\0') {
            return Ok(StateCounts::default());
        }
        let again = if tenant == DEFAULT_TENANT { "true" } else { "t.tenant = $1 AND t.tenant <> 'default'" };
        let newest = include_str!("sql/count_newest.sql").replace("{again}", again);
        let most = to_i64(COUNTED);
        let tx = self.tx().await?;
        let nothing = || StoreError::Failed("the store counted nothing".to_owned());
        let found = tx.rows(&newest, &[&tenant, &most]).await?;
        let row = found.first().ok_or_else(nothing)?;
        let mut newest = [0; 6];
        for (column, count) in newest.iter_mut().enumerate() {
            *count = get_u64(row, column)?;
        }
        let of = get_u64(row, 6)?;
        if of < COUNTED {
            tx.end();
            return Ok(StateCounts::from_counts(newest, of, None));
        }
        let found = tx.rows(include_str!("sql/count_indexed.sql"), &[&tenant, &most]).await?;
        tx.end();
        let row = found.first().ok_or_else(nothing)?;
        let mut indexed = [0; 5];
        for (column, count) in indexed.iter_mut().enumerate() {
            *count = get_u64(row, column)?;
        }
        Ok(StateCounts::from_counts(newest, of, Some(indexed)))
    }
}

/// Reads the columns of `sql/facts.sql`, in its order.
fn facts(row: &Row) -> Result<Facts, StoreError> {
    let pause: (Option<i64>, Option<String>) = (row.try_get(6)?, row.try_get(7)?);
    let limit: (Option<i64>, Option<i64>) = (row.try_get(8)?, row.try_get(9)?);
    let holders: Option<Vec<Uuid>> = row.try_get(10)?;
    let holder: Option<Uuid> = row.try_get(12)?;
    let locked: bool = row.try_get(11)?;
    Ok(Facts {
        now: row.try_get(0)?,
        run_at: row.try_get(1)?,
        parked: row.try_get(2)?,
        limit: limit.0.zip(limit.1).map(|(max, running)| (max.unsigned_abs(), running.max(0).unsigned_abs())),
        holders: holders.unwrap_or_default().into_iter().map(TaskId).collect(),
        ahead: get_u64(row, 5)?,
        paused: pause.0.zip(pause.1),
        owner: row.try_get(3)?,
        lease_left: row.try_get(4)?,
        started_at: None,
        lock: if locked { Some((holder.map(TaskId), row.try_get(13)?)) } else { None },
        lock_ahead: get_u64(row, 14)?,
        lock_service: row.try_get(15)?,
        lock_trouble: row.try_get(16)?,
        cancel: get_json(row, 17)?,
    })
}
