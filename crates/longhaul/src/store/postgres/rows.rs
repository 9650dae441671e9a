//! How rows become values and back.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::event::LogRow;
use crate::outbox::ReplyTo;
use crate::record::{Record, UndoOn};
use crate::store::StoreError;
use crate::store::rules::Head;
use crate::task::{Phase, Priority, State, Task, TaskId, timestamp};

/// A number as the database has it. Fences, numbers and sizes never come near the bound.
pub(super) fn to_i64(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

/// A counter for an `integer` column; bounded, because a count that large is "too many" anyway.
pub(super) fn to_i32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

pub(super) fn get_u64(row: &Row, column: usize) -> Result<u64, StoreError> {
    Ok(u64::try_from(row.try_get::<_, i64>(column)?).unwrap_or(0))
}

/// An `integer` column that counts something.
pub(super) fn get_u32(row: &Row, column: usize) -> Result<u32, StoreError> {
    Ok(u32::try_from(row.try_get::<_, i32>(column)?).unwrap_or(0))
}

/// A `bigint` column whose values fit in 32 bits.
pub(super) fn get_small(row: &Row, column: usize) -> Result<u32, StoreError> {
    Ok(u32::try_from(row.try_get::<_, i64>(column)?).unwrap_or(0))
}

pub(super) fn get_id(row: &Row, column: usize) -> Result<TaskId, StoreError> {
    Ok(TaskId(row.try_get(column)?))
}

pub(super) fn get_state(row: &Row, column: usize) -> Result<State, StoreError> {
    let code = row.try_get(column)?;
    State::from_code(code).ok_or_else(|| {
        StoreError::Incompatible(format!("a task has state number {code}, unknown here; use a newer longhaul"))
    })
}

pub(super) fn get_phase(row: &Row, column: usize) -> Result<Phase, StoreError> {
    Ok(if row.try_get::<_, i16>(column)? == Phase::Compensating as i16 {
        Phase::Compensating
    } else {
        Phase::Forward
    })
}

fn get_priority(row: &Row, column: usize) -> Result<Priority, StoreError> {
    let stored = u8::try_from(row.try_get::<_, i16>(column)?).ok();
    Ok(stored.and_then(Priority::new).unwrap_or_default())
}

/// A JSON column; text that does not parse is as if it was absent, so that damage in a detail
/// does not hide the whole row.
pub(super) fn get_json<T: DeserializeOwned>(row: &Row, column: usize) -> Result<Option<T>, StoreError> {
    let text: Option<&str> = row.try_get(column)?;
    Ok(text.and_then(|text| serde_json::from_str(text).ok()))
}

/// The stored form of an optional JSON value; every type stored so always serialises.
pub(super) fn to_json<T: Serialize>(value: Option<&T>) -> Option<String> {
    value.and_then(|value| serde_json::to_string(value).ok())
}

/// Reads the columns of `sql/head.sql`, in its order.
pub(super) fn head(row: &Row) -> Result<Head, StoreError> {
    Ok(Head {
        id: get_id(row, 0)?,
        tenant: row.try_get(1)?,
        queue: row.try_get(2)?,
        deadline: row.try_get(3)?,
        priority: get_priority(row, 4)?.get(),
        rank: row.try_get(5)?,
        state: get_state(row, 6)?,
        phase: get_phase(row, 7)?,
        ready: row.try_get(8)?,
        due_at: row.try_get(9)?,
        run_at: row.try_get(10)?,
        parked: row.try_get(11)?,
        holds: row.try_get(12)?,
        fence: get_u64(row, 13)?,
        last_seq: get_u64(row, 14)?,
        attempts: get_u32(row, 15)?,
        crashes: get_u32(row, 16)?,
        cancel: get_json(row, 17)?,
        waiting: get_json(row, 18)?,
        error: get_json(row, 19)?,
        finished_at: row.try_get(20)?,
        undoable: row.try_get(21)?,
        untold: row.try_get(22)?,
        undo_of: row.try_get::<_, Option<Uuid>>(23)?.map(TaskId),
        undone_by: row.try_get::<_, Option<Uuid>>(24)?.map(TaskId),
        undo_on: UndoOn::from_code(row.try_get(25)?),
    })
}

/// Reads a log row from column `first` on: seq, count, time, run, events, records.
pub(super) fn log_row(row: &Row, first: usize) -> Result<LogRow, StoreError> {
    Ok(LogRow {
        seq: get_u64(row, first)?,
        count: get_u32(row, first + 1)?,
        time: row.try_get(first + 2)?,
        run: get_u64(row, first + 3)?,
        events: row.try_get(first + 4)?,
        records: row.try_get(first + 5)?,
    })
}

/// Reads the columns of `sql/task.sql`, in its order.
pub(super) fn task(row: &Row) -> Result<Task, StoreError> {
    let id = get_id(row, 0)?;
    let input = get_json::<Vec<Record>>(row, 1)?.and_then(|records| {
        records.into_iter().find_map(|record| match record {
            Record::Input(input) => Some(input),
            _ => None,
        })
    });
    let input: Box<RawValue> = input.unwrap_or_else(|| RawValue::NULL.to_owned());
    let other = |column| row.try_get::<_, Option<Uuid>>(column).map(|id| id.map(TaskId));
    let time = |column| row.try_get::<_, Option<i64>>(column).map(|time| time.map(timestamp));
    Ok(Task {
        id,
        task_id: id,
        tenant: row.try_get(2)?,
        handler: row.try_get(3)?,
        queue: row.try_get(4)?,
        state: get_state(row, 5)?,
        phase: get_phase(row, 6)?,
        waiting_for: get_json(row, 7)?,
        priority: get_priority(row, 8)?,
        user_input: serde_json::from_str(input.get()).ok(),
        input,
        result: get_json(row, 9)?,
        error: get_json(row, 10)?,
        attempts: get_u32(row, 11)?,
        crashes: get_u32(row, 12)?,
        progress: get_json(row, 13)?,
        usage: get_json(row, 14)?,
        tags: get_json(row, 15)?.unwrap_or_default(),
        parent_id: other(16)?,
        fork_of: other(17)?,
        undo_of: other(18)?,
        created_at: timestamp(row.try_get(19)?),
        updated_at: timestamp(row.try_get(20)?),
        finished_at: time(21)?,
        deadline: time(22)?,
        last_seq: get_u64(row, 23)?,
        fence: get_u64(row, 24)?,
        concurrency_key: row.try_get(25)?,
        max_attempts: get_u32(row, 26)?,
        undone_by: other(27)?,
        reply: row.try_get::<_, Option<&str>>(28)?.and_then(ReplyTo::from_json),
    })
}
