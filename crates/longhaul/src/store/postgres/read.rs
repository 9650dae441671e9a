//! Reading. Each is one statement on a connection of the pool, or two of which the second only
//! fetches what the first has found.

use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresStore;
use super::connect::Params;
use super::rows::{self, get_id, get_json, get_small, get_u64, to_i64};
use crate::event::LogRow;
use crate::state::AgentState;
use crate::store::{Ask, Checkpoint, Filter, QueueInfo, QueueSettings, StoreError, WorkerInfo};
use crate::task::{State, Task, TaskId};

/// About how many bytes of log one read gives.
const LOG_PAGE_BYTES: i64 = 1024 * 1024;

async fn select(store: &PostgresStore, sql: &str, params: Params<'_>) -> Result<Vec<Row>, StoreError> {
    let tx = store.tx().await?;
    let rows = tx.rows(sql, params).await?;
    tx.end();
    Ok(rows)
}

pub(super) async fn task(store: &PostgresStore, tenant: &str, id: TaskId) -> Result<Option<Task>, StoreError> {
    if tenant.contains('\0') {
        // No stored text has a NUL, and the server refuses to hear of one.
        return Ok(None);
    }
    let found = select(store, include_str!("sql/task.sql"), &[&[id.0].as_slice(), &tenant]).await?;
    found.first().map(rows::task).transpose()
}

pub(super) async fn list(store: &PostgresStore, tenant: &str, filter: &Filter) -> Result<Vec<Task>, StoreError> {
    let indexed = matches!(filter.state, Some(State::Waiting | State::Failed | State::Cancelled));
    let sql = match (indexed, filter.oldest_first) {
        (false, false) => include_str!("sql/list_newest.sql"),
        (false, true) => include_str!("sql/list_oldest.sql"),
        (true, false) => include_str!("sql/list_state_newest.sql"),
        (true, true) => include_str!("sql/list_state_oldest.sql"),
    };
    let (tag, value) = filter.tag.as_ref().map(|(tag, value)| (tag.as_str(), value.as_str())).unzip();
    let state = filter.state.map(State::code);
    let (after, page) = (filter.after.map(|after| after.0), to_i64(filter.page()));
    let texts = [Some(tenant), filter.handler.as_deref(), filter.queue.as_deref(), tag, value];
    if texts.into_iter().flatten().any(|text| text.contains('\0')) {
        return Ok(Vec::new());
    }
    let params: Params<'_> = &[&tenant, &state, &filter.handler, &filter.queue, &tag, &value, &after, &page];
    let tx = store.tx().await?;
    let ids: Vec<Uuid> = tx.rows(sql, params).await?.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    let found = tx.rows(include_str!("sql/task.sql"), &[&ids, &tenant]).await?;
    tx.end();
    let mut tasks: Vec<Task> = found.iter().map(rows::task).collect::<Result<_, _>>()?;
    tasks.sort_unstable_by_key(|task| task.id);
    if !filter.oldest_first {
        tasks.reverse();
    }
    Ok(tasks)
}

pub(super) async fn log(store: &PostgresStore, task: TaskId, after: u64) -> Result<Vec<LogRow>, StoreError> {
    // One less than the largest number, which the statement adds one to.
    let after = to_i64(after).min(i64::MAX - 1);
    let found = select(store, include_str!("sql/log.sql"), &[&task.0, &after, &LOG_PAGE_BYTES]).await?;
    found.iter().map(|row| rows::log_row(row, 0)).collect()
}

pub(super) async fn advanced(
    store: &PostgresStore,
    known: &[(TaskId, u64)],
) -> Result<Vec<(TaskId, u64)>, StoreError> {
    let (ids, seen): (Vec<Uuid>, Vec<i64>) = known.iter().map(|&(task, seq)| (task.0, to_i64(seq))).unzip();
    let found = select(store, include_str!("sql/advanced.sql"), &[&ids, &seen]).await?;
    found.iter().map(|row| Ok((get_id(row, 0)?, get_u64(row, 1)?))).collect()
}

pub(super) async fn state(store: &PostgresStore, task: TaskId) -> Result<Option<(u64, AgentState)>, StoreError> {
    let found = select(store, include_str!("sql/state_read.sql"), &[&[task.0].as_slice()]).await?;
    found.first().map(|row| Ok((get_u64(row, 1)?, get_json(row, 2)?.unwrap_or_default()))).transpose()
}

pub(super) async fn checkpoints(store: &PostgresStore, task: TaskId) -> Result<Vec<Checkpoint>, StoreError> {
    let found = select(store, include_str!("sql/checkpoints.sql"), &[&task.0]).await?;
    let checkpoint = |row: &Row| {
        Ok(Checkpoint {
            seq: get_u64(row, 0)?,
            version: get_small(row, 1)?,
            iteration: get_small(row, 2)?,
            checksum: get_small(row, 3)?,
            data: row.try_get(4)?,
            created_at: row.try_get(5)?,
        })
    };
    found.iter().map(checkpoint).collect()
}

pub(super) async fn asks(store: &PostgresStore, tenant: &str, of: Option<TaskId>) -> Result<Vec<Ask>, StoreError> {
    let found = match of {
        Some(id) => task(store, tenant, id).await?.map(|_| vec![id.0]),
        None => None,
    };
    let tx = store.tx().await?;
    let asks = match (of, found) {
        (Some(_), Some(tasks)) => super::asks::of_tasks(&tx, &tasks).await?,
        (Some(_), None) => Vec::new(),
        (None, _) => {
            let rows = tx.rows(include_str!("sql/asks_open.sql"), &[&tenant, &store.clock.offset()]).await?;
            rows.iter().map(super::asks::ask).collect::<Result<_, _>>()?
        }
    };
    tx.end();
    Ok(asks)
}

pub(super) async fn queues(store: &PostgresStore) -> Result<Vec<QueueInfo>, StoreError> {
    let found = select(store, include_str!("sql/queues.sql"), &[]).await?;
    let queue = |row: &Row| {
        let max_pending: Option<i64> = row.try_get(3)?;
        let max_running: Option<i64> = row.try_get(4)?;
        Ok(QueueInfo {
            name: row.try_get(0)?,
            pending: get_u64(row, 1)?,
            running: get_u64(row, 2)?,
            max_pending: max_pending.map_or(QueueSettings::default().max_pending, i64::unsigned_abs),
            max_running: max_running.map(|max| u32::try_from(max).unwrap_or(u32::MAX)),
            oldest: row.try_get(5)?,
        })
    };
    found.iter().map(queue).collect()
}

pub(super) async fn workers(store: &PostgresStore) -> Result<Vec<WorkerInfo>, StoreError> {
    let found = select(store, include_str!("sql/workers.sql"), &[]).await?;
    let worker = |row: &Row| {
        Ok(WorkerInfo {
            id: row.try_get(0)?,
            name: row.try_get(1)?,
            handlers: get_json(row, 2)?.unwrap_or_default(),
            queues: get_json(row, 3)?.unwrap_or_default(),
            slots: get_small(row, 4)?,
            started_at: row.try_get(5)?,
            seen_at: row.try_get(6)?,
            running: get_small(row, 7)?,
        })
    };
    found.iter().map(worker).collect()
}
