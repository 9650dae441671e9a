//! Reading. Each is one statement on a connection of the pool, or two of which the second only
//! fetches what the first has found.

use std::collections::HashSet;

use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresStore;
use super::connect::{Params, Tx};
use super::rows::{self, get_id, get_json, get_small, get_u64, to_i64};
use crate::event::LogRow;
use crate::state::AgentState;
use crate::store::list::SEARCHED_PER_PAGE;
use crate::store::{Ask, Checkpoint, Filter, Page, QueueInfo, QueueSettings, StoreError, WorkerInfo};
use crate::task::{DEFAULT_TENANT, State, Task, TaskId};

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

pub(super) async fn list(store: &PostgresStore, tenant: &str, filter: &Filter) -> Result<Page, StoreError> {
    let (tag, value) = filter.tag.as_ref().map(|(tag, value)| (tag.as_str(), value.as_str())).unzip();
    let texts =
        [Some(tenant), filter.handler.as_deref(), filter.queue.as_deref(), filter.q.as_deref(), tag, value];
    if texts.into_iter().flatten().any(|text| text.contains('\0')) {
        return Ok(Page::default());
    }
    let pattern = filter.pattern();
    let (page, mut found, mut after) = (filter.page(), Vec::new(), filter.after);
    let at_once = if pattern.is_some() { SEARCHED_PER_PAGE / 10 } else { page };
    let mut looked = 0;
    let mut more = true;
    let tx = store.tx().await?;
    while more && found.len() < page && looked < SEARCHED_PER_PAGE {
        let ids = list_ids(&tx, tenant, &Filter { after, ..filter.clone() }, at_once).await?;
        looked += ids.len();
        more = ids.len() == at_once;
        after = ids.last().copied().map(TaskId).or(after);
        let Some(pattern) = &pattern else {
            found = ids;
            break;
        };
        let matching = tx.rows(include_str!("sql/list_search.sql"), &[&ids, pattern]).await?;
        let matching: HashSet<Uuid> = matching.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        let room = page - found.len();
        found.extend(ids.into_iter().filter(|id| matching.contains(id)).take(room));
    }
    let tasks = tx.rows(include_str!("sql/task.sql"), &[&found, &tenant]).await?;
    tx.end();
    let mut tasks: Vec<Task> = tasks.iter().map(rows::task).collect::<Result<_, _>>()?;
    tasks.sort_unstable_by_key(|task| task.id);
    if !filter.oldest_first {
        tasks.reverse();
    }
    Ok(filter.page_of(tasks, after.filter(|_| more)))
}

/// The ids of up to `limit` tasks that are as the filter says, whatever their input.
async fn list_ids(tx: &Tx, tenant: &str, filter: &Filter, limit: usize) -> Result<Vec<Uuid>, StoreError> {
    let (from, again) = match filter.state {
        // The OFFSET keeps the planner from walking all tasks by id instead.
        _ if filter.parent.is_some() => ("(SELECT * FROM tasks WHERE parent = $9 OFFSET 0)", ""),
        Some(State::Waiting | State::Failed | State::Cancelled) => {
            ("tasks", "AND t.state = $2 AND t.state IN (2, 4, 5)")
        }
        Some(State::Running) => ("(SELECT * FROM tasks WHERE state = 1 OFFSET 0)", ""),
        _ if tenant != DEFAULT_TENANT => ("tasks", "AND t.tenant <> 'default'"),
        _ => ("tasks", ""),
    };
    let (beyond, edge, order) = if filter.oldest_first {
        (">", "00000000-0000-0000-0000-000000000000", "ASC")
    } else {
        ("<", "ffffffff-ffff-ffff-ffff-ffffffffffff", "DESC")
    };
    let sql = include_str!("sql/list.sql")
        .replace("{from}", from)
        .replace("{again}", again)
        .replace("{beyond}", beyond)
        .replace("{edge}", edge)
        .replace("{order}", order);
    let (tag, value) = filter.tag.as_ref().map(|(tag, value)| (tag.as_str(), value.as_str())).unzip();
    let (state, limit) = (filter.state.map(State::code), to_i64(limit));
    let (after, parent) = (filter.after.map(|after| after.0), filter.parent.map(|parent| parent.0));
    let params: Params<'_> =
        &[&tenant, &state, &filter.handler, &filter.queue, &tag, &value, &after, &limit, &parent];
    let rows = tx.rows(&sql, params).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

pub(super) async fn log(
    store: &PostgresStore,
    task: TaskId,
    after: u64,
    bytes: usize,
) -> Result<Vec<LogRow>, StoreError> {
    // One less than the largest number, which the statement adds one to.
    let after = to_i64(after).min(i64::MAX - 1);
    let found = select(store, include_str!("sql/log.sql"), &[&task.0, &after, &to_i64(bytes as u64)]).await?;
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
            paused: row.try_get(6)?,
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
