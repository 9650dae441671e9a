//! How rows become values and back.

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{OptionalExtension, Row};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::{Tx, store_error};
use crate::event::{LogEntry, LogRow};
use crate::record::UndoOn;
use crate::store::rules::{Change, Head};
use crate::store::{Cancel, StoreError};
use crate::task::{Phase, State, TaskId};

/// A UUID as 16 bytes.
pub(super) struct Id(pub(super) Uuid);

impl ToSql for Id {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(ValueRef::Blob(self.0.as_bytes())))
    }
}

impl FromSql for Id {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        Uuid::from_slice(value.as_blob()?).map(Self).map_err(FromSqlError::other)
    }
}

impl From<TaskId> for Id {
    fn from(task: TaskId) -> Self {
        Self(task.0)
    }
}

pub(super) fn task_id(row: &Row<'_>, column: usize) -> rusqlite::Result<TaskId> {
    row.get::<_, Id>(column).map(|id| TaskId(id.0))
}

pub(super) fn state(row: &Row<'_>, column: usize) -> rusqlite::Result<State> {
    let code = row.get(column)?;
    State::from_code(code).ok_or(rusqlite::Error::IntegralValueOutOfRange(column, code.into()))
}

pub(super) fn phase(row: &Row<'_>, column: usize) -> rusqlite::Result<Phase> {
    Ok(if row.get::<_, i16>(column)? == Phase::Compensating as i16 { Phase::Compensating } else { Phase::Forward })
}

/// A JSON column; text that does not parse is as if it was absent, so that damage in a detail
/// does not hide the whole row.
pub(super) fn json<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

/// The stored form of an optional JSON value; every type stored so always serialises.
pub(super) fn to_json<T: Serialize>(value: Option<&T>) -> Option<String> {
    value.and_then(|value| serde_json::to_string(value).ok())
}

/// Reads the columns of `sql/head.sql`, in its order.
pub(super) fn head(row: &Row<'_>) -> rusqlite::Result<Head> {
    Ok(Head {
        id: task_id(row, 0)?,
        tenant: row.get(1)?,
        queue: row.get(2)?,
        deadline: row.get(3)?,
        priority: row.get(4)?,
        rank: row.get(5)?,
        state: state(row, 6)?,
        phase: phase(row, 7)?,
        ready: row.get(8)?,
        due_at: row.get(9)?,
        run_at: row.get(10)?,
        parked: row.get(11)?,
        holds: row.get(12)?,
        fence: row.get(13)?,
        last_seq: row.get(14)?,
        attempts: row.get(15)?,
        crashes: row.get(16)?,
        cancel: json(row, 17)?,
        waiting: json(row, 18)?,
        error: json(row, 19)?,
        finished_at: row.get(20)?,
        undoable: row.get(21)?,
        untold: row.get(22)?,
        undo_of: row.get::<_, Option<Id>>(23)?.map(|id| TaskId(id.0)),
        undone_by: row.get::<_, Option<Id>>(24)?.map(|id| TaskId(id.0)),
        undo_on: UndoOn::from_code(row.get(25)?),
    })
}

pub(super) fn log_row(row: &Row<'_>) -> rusqlite::Result<LogRow> {
    log_row_from(row, 0)
}

/// Reads a log row from column `first` on: seq, count, time, run, events, records.
pub(super) fn log_row_from(row: &Row<'_>, first: usize) -> rusqlite::Result<LogRow> {
    Ok(LogRow {
        seq: row.get(first)?,
        count: row.get(first + 1)?,
        time: row.get(first + 2)?,
        run: row.get(first + 3)?,
        events: row.get(first + 4)?,
        records: row.get(first + 5)?,
    })
}

/// Whose log an entry is added to.
pub(super) struct Teller {
    pub(super) task: TaskId,
    /// The run that tells it; 0 when others do.
    pub(super) run: u64,
    /// The task's state from then on.
    pub(super) state: State,
    /// The task has lines in the outbox, or may have.
    pub(super) hooked: bool,
}

impl Tx<'_> {
    pub(super) fn head(&self, task: TaskId) -> Result<Option<Head>, StoreError> {
        self.sql
            .prepare_cached(include_str!("sql/head.sql"))
            .and_then(|mut select| select.query_row([Id::from(task)], head).optional())
            .map_err(store_error)
    }

    /// Adds an entry to a task's log, from number `seq` on, and makes the task's lines due.
    pub(super) fn append(&mut self, teller: &Teller, seq: u64, entry: &LogEntry) -> Result<(), StoreError> {
        #[cfg(feature = "faults")]
        if teller.run > 0 && crate::faults::is(crate::faults::Mutant::EventApart) {
            let (task, run, entry) = (teller.task, teller.run, entry.clone());
            self.told.apart.push(super::apart::Row { task, seq, time: self.now, run, entry });
            return Ok(());
        }
        let task = Id::from(teller.task);
        let append = match &mut self.append {
            Some(append) => append,
            none => none.insert(self.sql.prepare_cached(include_str!("sql/log_append.sql")).map_err(store_error)?),
        };
        append
            .execute((&task, seq, entry.count, self.now, teller.run, &entry.events, &entry.records))
            .map_err(store_error)?;
        if teller.hooked && entry.count > 0 {
            let (before, last) = (seq - 1, seq - 1 + u64::from(entry.count));
            self.sql
                .prepare_cached(include_str!("sql/outbox_told.sql"))
                .and_then(|mut update| update.execute((&task, last, teller.state.is_final(), before, self.now)))
                .map_err(store_error)?;
        }
        Ok(())
    }

    /// Writes a decision of `rules`: head, log, pending count, freed limits, hints. `before` is
    /// the head the decision was made from.
    pub(super) fn apply(&mut self, before: &Head, change: Change) -> Result<(), StoreError> {
        let Change { mut head, entry } = change;
        let left_running = before.state == State::Running && head.state != State::Running;
        let freed = if left_running { head.holds.take() } else { None };
        // A row is written even without events (a task whose time has come tells nothing).
        if entry.count > 0 || entry.records.is_some() {
            let teller = Teller { task: head.id, run: 0, state: head.state, hooked: true };
            self.append(&teller, head.last_seq + 1, &entry)?;
            head.last_seq += u64::from(entry.count);
        }
        self.save(&head, left_running)?;
        let pending = |state| i64::from(state == State::Pending);
        self.count_pending(&head.queue, pending(head.state) - pending(before.state));
        if let Some(holds) = freed {
            self.free(&holds)?;
        }
        self.told.ready |= head.ready;
        self.told.due |= head.state.is_final();
        self.told.tell(head.id, head.state);
        if let Some(cancel) = head.cancel.as_ref().filter(|_| before.cancel.is_none()) {
            self.cancel_children(head.id, cancel)?;
        }
        Ok(())
    }

    /// Cancels everything below a task.
    fn cancel_children(&mut self, task: TaskId, cancel: &Cancel) -> Result<(), StoreError> {
        let cancelled: Vec<TaskId> = self
            .sql
            .prepare_cached(include_str!("sql/cancel_children.sql"))
            .and_then(|mut update| {
                let cancel = to_json(Some(cancel));
                update.query_map((Id::from(task), cancel, self.now), |row| task_id(row, 0))?.collect()
            })
            .map_err(store_error)?;
        self.told.due |= !cancelled.is_empty();
        self.told.controlled.extend(cancelled);
        Ok(())
    }

    fn save(&self, head: &Head, end_lease: bool) -> Result<(), StoreError> {
        self.sql
            .prepare_cached(include_str!("sql/head_save.sql"))
            .and_then(|mut update| {
                update.execute(rusqlite::params![
                    Id::from(head.id),
                    head.priority,
                    head.rank,
                    head.state.code(),
                    head.phase as i16,
                    head.ready,
                    head.due_at,
                    head.run_at,
                    head.parked,
                    head.holds,
                    head.fence,
                    head.last_seq,
                    head.attempts,
                    head.crashes,
                    to_json(head.cancel.as_ref()),
                    to_json(head.waiting.as_ref()),
                    to_json(head.error.as_ref()),
                    self.now,
                    head.finished_at,
                    end_lease,
                ])
            })
            .map_err(store_error)?;
        Ok(())
    }
}
