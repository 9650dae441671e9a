//! Reading.

use rusqlite::{Connection, OptionalExtension, Row};
use serde_json::value::RawValue;

use super::rows::{self, Id};
use crate::event::LogRow;
use crate::outbox::ReplyTo;
use crate::record::Record;
use crate::state::AgentState;
use crate::store::list::SEARCHED_PER_PAGE;
use crate::store::{Checkpoint, Filter, Page, QueueInfo, QueueSettings, WorkerInfo};
use crate::task::{DEFAULT_TENANT, Phase, Priority, State, Task, TaskId, timestamp};

pub(super) fn task(sql: &Connection, tenant: &str, id: TaskId) -> rusqlite::Result<Option<Task>> {
    sql.prepare_cached(include_str!("sql/task.sql"))?.query_row((Id::from(id), tenant), one_task).optional()
}

pub(super) fn list(sql: &Connection, tenant: &str, filter: &Filter) -> rusqlite::Result<Page> {
    let pattern = filter.pattern();
    let (page, mut found, mut after) = (filter.page(), Vec::new(), filter.after);
    let at_once = if pattern.is_some() { SEARCHED_PER_PAGE / 10 } else { page };
    let mut looked = 0;
    let mut more = true;
    while more && found.len() < page && looked < SEARCHED_PER_PAGE {
        let ids = list_ids(sql, tenant, &Filter { after, ..filter.clone() }, at_once)?;
        looked += ids.len();
        more = ids.len() == at_once;
        after = ids.last().copied().or(after);
        match &pattern {
            None => found.extend(ids),
            Some(pattern) => {
                let mut search = sql.prepare_cached(include_str!("sql/list_search.sql"))?;
                for id in ids {
                    if found.len() < page && search.exists((Id::from(id), pattern))? {
                        found.push(id);
                    }
                }
            }
        }
        if pattern.is_none() {
            break;
        }
    }
    let tasks = found.into_iter().filter_map(|id| task(sql, tenant, id).transpose()).collect::<Result<_, _>>()?;
    Ok(filter.page_of(tasks, after.filter(|_| more)))
}

/// The ids of up to `limit` tasks that are as the filter says, whatever their input.
fn list_ids(sql: &Connection, tenant: &str, filter: &Filter, limit: usize) -> rusqlite::Result<Vec<TaskId>> {
    let (index, again) = match filter.state {
        _ if filter.parent.is_some() => ("INDEXED BY tasks_parent", "AND t.parent = ?9"),
        Some(State::Waiting | State::Failed | State::Cancelled) => {
            ("INDEXED BY tasks_state", "AND t.state = ?2 AND (t.state = 2 OR t.state >= 4)")
        }
        Some(State::Running) => ("INDEXED BY tasks_running", "AND t.state = 1"),
        _ if tenant != DEFAULT_TENANT => {
            ("INDEXED BY tasks_tenant", "AND t.tenant = ?1 AND t.tenant <> 'default'")
        }
        _ => ("", ""),
    };
    let (beyond, order) = if filter.oldest_first { (">", "ASC") } else { ("<", "DESC") };
    let text = include_str!("sql/list.sql")
        .replace("{index}", index)
        .replace("{again}", again)
        .replace("{beyond}", beyond)
        .replace("{order}", order);
    let (tag, value) = filter.tag.as_ref().map(|(tag, value)| (tag.as_str(), value.as_str())).unzip();
    sql.prepare_cached(&text)?
        .query_map(
            rusqlite::params![
                tenant,
                filter.state.map(State::code),
                filter.handler,
                filter.queue,
                tag,
                value,
                filter.after.map(Id::from),
                limit as i64,
                filter.parent.map(Id::from),
            ],
            |row| rows::task_id(row, 0),
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
        reply: row.get::<_, Option<String>>(28)?.and_then(|text| ReplyTo::from_json(&text)),
    })
}

pub(super) fn log(sql: &Connection, task: TaskId, after: u64, max: usize) -> rusqlite::Result<Vec<LogRow>> {
    let mut select = sql.prepare_cached(include_str!("sql/log.sql"))?;
    // Larger numbers than can be stored are beyond every log.
    let after = i64::try_from(after).unwrap_or(i64::MAX / 2);
    let rows = select.query_map((Id::from(task), after), rows::log_row)?;
    let (mut page, mut bytes) = (Vec::new(), 0);
    for row in rows {
        let row = row?;
        bytes += row.events.len() + row.records.as_ref().map_or(0, String::len);
        page.push(row);
        if bytes > max {
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
                paused: row.get(6)?,
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
