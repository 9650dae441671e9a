//! Accepting tasks.

use std::collections::HashMap;
use std::time::Duration;

use rusqlite::OptionalExtension;

use super::outbox::Hooks;
use super::rows::{Id, Teller};
use super::{Tx, rows, store_error, subscribers};
use crate::record::Record;
use crate::store::clock::micros;
use crate::store::{Accepted, QueueSettings, StoreError, SubmitRefused, rules, undo_refused};
use crate::task::{Deadline, Invalid, NewTask, Priority, State, TaskId, UndoOf};

type Answer = Result<Accepted, SubmitRefused>;

/// What a queue allows, and how many more tasks it takes in this transaction.
struct Room {
    max_pending: u64,
    free: i64,
    ageing: Duration,
}

pub(super) fn submit(tx: &mut Tx<'_>, batch: &[NewTask]) -> Result<Vec<Answer>, StoreError> {
    let (mut rooms, mut hooks) = (HashMap::new(), Hooks::default());
    batch.iter().map(|task| accept(tx, task, &mut rooms, &mut hooks)).collect()
}

fn accept(
    tx: &mut Tx<'_>,
    task: &NewTask,
    rooms: &mut HashMap<String, Room>,
    hooks: &mut Hooks,
) -> Result<Answer, StoreError> {
    if let Err(invalid) = task.validate() {
        return Ok(Err(invalid.into()));
    }
    let digest = (task.key.is_some() || task.dedupe_window.is_some()).then(|| task.digest());
    if let Some(known) = known(tx, task, digest.as_ref())? {
        return Ok(known);
    }
    if let Some(parent) = task.parent
        && accepted_before(tx, task)?.is_none()
        && tx.head(parent)?.is_none_or(|head| head.ended_or_cancelled())
    {
        return Ok(Err(SubmitRefused::ParentEnded { parent }));
    }
    let registered = tx
        .sql
        .prepare_cached("SELECT 1 FROM handlers WHERE name = ?")
        .and_then(|mut select| select.exists([&task.handler]))
        .map_err(store_error)?;
    if !registered {
        return Ok(Err(SubmitRefused::UnknownHandler { handler: task.handler.clone() }));
    }
    if !rooms.contains_key(&task.queue) {
        rooms.insert(task.queue.clone(), room(tx, &task.queue)?);
    }
    let room = rooms.get_mut(&task.queue);
    // A child, and an undo, is part of a task that was accepted.
    let bounded = task.parent.is_none() && task.undo.is_none();
    let Some(room) = room.filter(|room| room.free > 0 || !bounded) else {
        if let Some(accepted) = accepted_before(tx, task)? {
            return Ok(Ok(accepted));
        }
        let max = rooms.get(&task.queue).map_or(0, |room| room.max_pending);
        let retry_after = Duration::from_secs(1);
        return Ok(Err(SubmitRefused::QueueFull { queue: task.queue.clone(), max, retry_after }));
    };
    if let Some(refused) = hooks.refuse(tx, task)? {
        return Ok(accepted_before(tx, task)?.ok_or(refused));
    }
    if bounded && let Some(late) = subscribers::late(tx)? {
        return Ok(accepted_before(tx, task)?.ok_or_else(|| late.refused()));
    }
    let ageing = room.ageing;
    if let Some(undo) = &task.undo
        && !note_undo(tx, task, undo)?
    {
        return Ok(Err(undo_refused().into()));
    }
    if !insert(tx, task, digest, ageing)? {
        let taken = || Invalid::new("id", "belongs to another task").into();
        return Ok(accepted_before(tx, task)?.ok_or_else(taken));
    }
    hooks.hook(tx, task)?;
    room.free -= 1;
    Ok(Ok(Accepted { id: task.id, new: true, created_at: tx.now }))
}

/// Notes at a task who undoes it; `false` when it cannot be undone any more.
fn note_undo(tx: &Tx<'_>, task: &NewTask, undo: &UndoOf) -> Result<bool, StoreError> {
    let noted = tx
        .sql
        .prepare_cached(include_str!("sql/submit_undo.sql"))
        .and_then(|mut update| {
            let before = undo.before.map(Id::from);
            update.execute((Id::from(task.id), Id::from(undo.task), &task.tenant, undo.finished_at, before))
        })
        .map_err(store_error)?;
    Ok(noted > 0)
}

/// This very submit, when it was accepted and its answer was lost.
fn accepted_before(tx: &Tx<'_>, task: &NewTask) -> Result<Option<Accepted>, StoreError> {
    let id = task.id;
    tx.sql
        .prepare_cached("SELECT created_at FROM tasks WHERE id = ? AND tenant = ?")
        .and_then(|mut select| {
            select
                .query_row((Id::from(id), &task.tenant), |row| {
                    Ok(Accepted { id, new: false, created_at: row.get(0)? })
                })
                .optional()
        })
        .map_err(store_error)
}

/// The task that this submit means, when it was accepted before under its key or as its equal.
fn known(tx: &Tx<'_>, task: &NewTask, digest: Option<&[u8; 32]>) -> Result<Option<Answer>, StoreError> {
    let Some(digest) = digest else { return Ok(None) };
    if let Some(key) = &task.key {
        let existing: Option<(TaskId, Vec<u8>, i64)> = tx
            .sql
            .prepare_cached(include_str!("sql/submit_by_key.sql"))
            .and_then(|mut select| {
                select
                    .query_row((&task.tenant, key), |row| Ok((rows::task_id(row, 0)?, row.get(1)?, row.get(2)?)))
                    .optional()
            })
            .map_err(store_error)?;
        return Ok(existing.map(|(id, known_digest, created_at)| {
            if known_digest == digest {
                Ok(Accepted { id, new: false, created_at })
            } else {
                Err(SubmitRefused::KeyConflict { key: key.clone(), existing: id })
            }
        }));
    }
    let window = micros(task.dedupe_window.unwrap_or_default());
    let equal: Option<(TaskId, i64)> = tx
        .sql
        .prepare_cached(include_str!("sql/submit_by_digest.sql"))
        .and_then(|mut select| {
            select
                .query_row((&task.tenant, digest, tx.now - window), |row| {
                    Ok((rows::task_id(row, 0)?, row.get(1)?))
                })
                .optional()
        })
        .map_err(store_error)?;
    Ok(equal.map(|(id, created_at)| Ok(Accepted { id, new: false, created_at })))
}

fn room(tx: &Tx<'_>, queue: &str) -> Result<Room, StoreError> {
    let defaults = QueueSettings::default();
    let (max_pending, ageing, pending): (Option<u64>, Option<i64>, i64) = tx
        .sql
        .prepare_cached(include_str!("sql/submit_room.sql"))
        .and_then(|mut select| select.query_row([queue], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))))
        .map_err(store_error)?;
    let max_pending = max_pending.unwrap_or(defaults.max_pending);
    let ageing = ageing.map_or(defaults.ageing, |ageing| Duration::from_micros(ageing.unsigned_abs()));
    Ok(Room { max_pending, free: i64::try_from(max_pending).unwrap_or(i64::MAX).saturating_sub(pending), ageing })
}

/// Writes the task and its first log row; `false` when its id is known.
fn insert(
    tx: &mut Tx<'_>,
    task: &NewTask,
    digest: Option<[u8; 32]>,
    ageing: Duration,
) -> Result<bool, StoreError> {
    let now = tx.now;
    let run_at = task.run_at.map(|at| at.as_microsecond()).filter(|&at| at > now);
    let deadline = task.deadline.map(|deadline| match deadline {
        Deadline::At(at) => at.as_microsecond(),
        Deadline::After(time) => now + micros(time),
    });
    let priority = Priority::new(task.priority).unwrap_or_default();
    let tags = rows::to_json((!task.tags.is_empty()).then_some(&task.tags));
    let written = tx
        .sql
        .prepare_cached(include_str!("sql/submit_insert.sql"))
        .and_then(|mut insert| {
            insert.execute(rusqlite::params![
                Id::from(task.id),
                task.tenant,
                task.handler,
                task.queue,
                task.concurrency_key,
                task.key,
                digest,
                tags,
                task.max_attempts,
                now,
                deadline,
                priority.get(),
                priority.rank(now, ageing),
                State::Pending.code(),
                run_at.is_none(),
                rules::pending_due(run_at, deadline),
                run_at,
                task.parent.map(Id::from),
                task.fork.as_ref().map(|(of, _)| Id::from(*of)),
                task.traceparent,
                task.undo.as_ref().map(|undo| Id::from(undo.task)),
            ])
        })
        .map_err(store_error)?;
    if written == 0 {
        return Ok(false);
    }
    // Its lines come after it, and know of this entry.
    let teller = Teller { task: task.id, run: 0, state: State::Pending, hooked: false };
    tx.append(&teller, 1, &task.first_entry())?;
    for change in task.inherited().filter_map(Record::state_change) {
        tx.change_state(task.id, &change)?;
    }
    tx.count_pending(&task.queue, 1);
    tx.told.ready |= run_at.is_none();
    Ok(true)
}
