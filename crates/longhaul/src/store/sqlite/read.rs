//! Reading.

use rusqlite::{Connection, OptionalExtension, Row};
use serde_json::value::RawValue;

use super::rows::{self, Id};
use crate::event::LogRow;
use crate::record::Record;
use crate::state::AgentState;
use crate::store::{Checkpoint, Filter, QueueInfo, QueueSettings, WorkerInfo};
use crate::task::{Phase, Priority, State, Task, TaskId, timestamp};

/// About how many bytes of log one read gives.
const LOG_PAGE_BYTES: usize = 1024 * 1024;

pub(super) fn task(sql: &Connection, tenant: &str, id: TaskId) -> rusqlite::Result<Option<Task>> {
    sql.prepare_cached(include_str!("sql/task.sql"))?.query_row((Id::from(id), tenant), one_task).optional()
}

pub(super) fn list(sql: &Connection, tenant: &str, filter: &Filter) -> rusqlite::Result<Vec<Task>> {
    let indexed = matches!(filter.state, Some(State::Waiting | State::Failed | State::Cancelled));
    let text = match (indexed, filter.oldest_first) {
        (false, false) => include_str!("sql/list_newest.sql"),
        (false, true) => include_str!("sql/list_oldest.sql"),
        (true, false) => include_str!("sql/list_state_newest.sql"),
        (true, true) => include_str!("sql/list_state_oldest.sql"),
    };
    let (tag, value) = filter.tag.as_ref().map(|(tag, value)| (tag.as_str(), value.as_str())).unzip();
    sql.prepare_cached(text)?
        .query_map(
            rusqlite::params![
                tenant,
                filter.state.map(State::code),
                filter.handler,
                filter.queue,
                tag,
                value,
                filter.after.map(Id::from),
                filter.page() as i64,
            ],
            one_task,
        )?
        .collect()
}

fn one_task(row: &Row<'_>) -> rusqlite::Result<Task> {
    let id = rows::task_id(row, 0)?;
    let input = rows::json::<Vec<Record>>(row, 1)?.and_then(|records| {
        records.into_iter().find_map(|record| match record {
            Record::Input(input) => Some(input),
            _ => None,
        })
    });
    let input: Box<RawValue> = input.unwrap_or_else(|| RawValue::NULL.to_owned());
    let other = |column| row.get::<_, Option<Id>>(column).map(|id| id.map(|id| TaskId(id.0)));
    Ok(Task {
        id,
        task_id: id,
        tenant: row.get(2)?,
        handler: row.get(3)?,
        queue: row.get(4)?,
        state: rows::state(row, 5)?,
        phase: if row.get::<_, i16>(6)? == 1 { Phase::Compensating } else { Phase::Forward },
        waiting_for: rows::json(row, 7)?,
        priority: Priority::new(row.get(8)?).unwrap_or_default(),
        user_input: serde_json::from_str(input.get()).ok(),
        input,
        result: rows::json(row, 9)?,
        error: rows::json(row, 10)?,
        attempts: row.get(11)?,
        crashes: row.get(12)?,
        progress: rows::json(row, 13)?,
        usage: rows::json(row, 14)?,
        tags: rows::json(row, 15)?.unwrap_or_default(),
        parent_id: other(16)?,
        fork_of: other(17)?,
        undo_of: other(18)?,
        created_at: timestamp(row.get(19)?),
        updated_at: timestamp(row.get(20)?),
        finished_at: row.get::<_, Option<i64>>(21)?.map(timestamp),
        deadline: row.get::<_, Option<i64>>(22)?.map(timestamp),
        last_seq: row.get(23)?,
        fence: row.get(24)?,
        concurrency_key: row.get(25)?,
        max_attempts: row.get(26)?,
        undone_by: other(27)?,
    })
}

pub(super) fn log(sql: &Connection, task: TaskId, after: u64) -> rusqlite::Result<Vec<LogRow>> {
    let mut select = sql.prepare_cached(include_str!("sql/log.sql"))?;
    // Larger numbers than can be stored are beyond every log.
    let after = i64::try_from(after).unwrap_or(i64::MAX / 2);
    let rows = select.query_map((Id::from(task), after), rows::log_row)?;
    let (mut page, mut bytes) = (Vec::new(), 0);
    for row in rows {
        let row = row?;
        bytes += row.events.len() + row.records.as_ref().map_or(0, String::len);
        page.push(row);
        if bytes > LOG_PAGE_BYTES {
            break;
        }
    }
    Ok(page)
}

pub(super) fn advanced(sql: &Connection, known: &[(TaskId, u64)]) -> rusqlite::Result<Vec<(TaskId, u64)>> {
    let mut select = sql.prepare_cached("SELECT last_seq FROM tasks WHERE id = ?")?;
    let mut advanced = Vec::new();
    for &(task, seen) in known {
        let last_seq: u64 = select.query_row([Id::from(task)], |row| row.get(0)).optional()?.unwrap_or(0);
        if last_seq > seen || last_seq == 0 {
            advanced.push((task, last_seq));
        }
    }
    Ok(advanced)
}

pub(super) fn state(sql: &Connection, task: TaskId) -> rusqlite::Result<Option<(u64, AgentState)>> {
    sql.prepare_cached("SELECT version, state FROM states WHERE task = ?")?
        .query_row([Id::from(task)], |row| Ok((row.get(0)?, rows::json(row, 1)?.unwrap_or_default())))
        .optional()
}

pub(super) fn checkpoints(sql: &Connection, task: TaskId) -> rusqlite::Result<Vec<Checkpoint>> {
    sql.prepare_cached(
        "SELECT seq, version, iteration, checksum, data, created_at FROM checkpoints WHERE task = ? ORDER BY seq DESC",
    )?
    .query_map([Id::from(task)], |row| {
        Ok(Checkpoint {
            seq: row.get(0)?,
            version: row.get(1)?,
            iteration: row.get(2)?,
            checksum: row.get(3)?,
            data: row.get(4)?,
            created_at: row.get(5)?,
        })
    })?
    .collect()
}

pub(super) fn queues(sql: &Connection) -> rusqlite::Result<Vec<QueueInfo>> {
    sql.prepare_cached(include_str!("sql/queues.sql"))?
        .query_map((), |row| {
            let pending: i64 = row.get(1)?;
            Ok(QueueInfo {
                name: row.get(0)?,
                pending: pending.max(0).unsigned_abs(),
                running: row.get(2)?,
                max_pending: row.get::<_, Option<u64>>(3)?.unwrap_or(QueueSettings::default().max_pending),
                max_running: row.get(4)?,
                oldest: row.get(5)?,
            })
        })?
        .collect()
}

pub(super) fn workers(sql: &Connection) -> rusqlite::Result<Vec<WorkerInfo>> {
    sql.prepare_cached(include_str!("sql/workers.sql"))?
        .query_map((), |row| {
            Ok(WorkerInfo {
                id: row.get::<_, Id>(0)?.0,
                name: row.get(1)?,
                handlers: rows::json(row, 2)?.unwrap_or_default(),
                queues: rows::json(row, 3)?.unwrap_or_default(),
                slots: row.get(4)?,
                started_at: row.get(5)?,
                seen_at: row.get(6)?,
                running: row.get(7)?,
            })
        })?
        .collect()
}
