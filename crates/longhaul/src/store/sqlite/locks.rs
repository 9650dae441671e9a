//! Locks: named mutual exclusion between tasks.

use rusqlite::Row;

use super::rows::{self, Id};
use super::{Tx, sessions, store_error};
use crate::store::locks::{Book, Edge, Hold, LOOK, Line, Link, News, SEARCH, Search, Waiter, check, gave, key};
use crate::store::sessions::Note;
use crate::store::{CommitRefused, LockChange, Locked, StoreError};
use crate::task::{State, TaskId};

pub(super) fn change(tx: &mut Tx<'_>, change: &LockChange) -> Result<Result<Locked, CommitRefused>, StoreError> {
    let head = tx.head(change.task)?;
    if let Err(refused) = check(head.as_ref(), change, tx.now) {
        return Ok(Err(refused));
    }
    let last_seq = head.map_or(0, |head| head.last_seq);
    if last_seq > change.known_seq && happened_before(tx, change)? {
        return Ok(Ok(Locked { last_seq }));
    }
    settle(tx, &key(&change.tenant, &change.name), Why::Asked(change))?;
    let last_seq = tx.head(change.task)?.map_or(last_seq, |head| head.last_seq);
    Ok(Ok(Locked { last_seq }))
}

/// Whether the change was made before, and only its answer was lost.
fn happened_before(tx: &Tx<'_>, change: &LockChange) -> Result<bool, StoreError> {
    let since: Vec<String> = tx
        .sql
        .prepare_cached(include_str!("sql/lock_known.sql"))
        .and_then(|mut select| {
            select.query_map((Id::from(change.task), change.known_seq), |row| row.get(0))?.collect()
        })
        .map_err(store_error)?;
    Ok(since.iter().any(|records| gave(records, &change.address)))
}

/// Takes everything from a task that has ended.
pub(super) fn let_go(tx: &mut Tx<'_>, task: TaskId) -> Result<(), StoreError> {
    let ended = tx
        .sql
        .prepare_cached(include_str!("sql/lock_ended.sql"))
        .and_then(|mut select| select.exists([Id::from(task)]))
        .map_err(store_error)?;
    if !ended {
        return Ok(());
    }
    for key in of_task(tx, task)? {
        settle(tx, &key, Why::Ended(task))?;
    }
    mark(tx, task, false)
}

/// Looks after what is due; gives how much that was.
pub(super) fn sweep(tx: &mut Tx<'_>, limit: usize) -> Result<usize, StoreError> {
    type Due = (Option<Id>, Option<String>);
    let due: Vec<Due> = tx
        .sql
        .prepare_cached(include_str!("sql/lock_due.sql"))
        .and_then(|mut select| {
            select.query_map((tx.now, limit as i64), |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })
        .map_err(store_error)?;
    let count = due.len();
    for (task, key) in due {
        if let Some(task) = task {
            let_go(tx, TaskId(task.0))?;
        }
        if let Some(key) = key {
            settle(tx, &key, Why::Due)?;
        }
    }
    Ok(count)
}

/// Why a lock is looked at.
pub(super) enum Why<'a> {
    /// Something may be due.
    Due,
    /// A run does something with it.
    Asked(&'a LockChange),
    /// A task has ended.
    Ended(TaskId),
    /// The lock service has said something.
    Noted(&'a Note),
}

/// Does what is due of one lock, and what is asked.
pub(super) fn settle(tx: &mut Tx<'_>, key: &str, why: Why<'_>) -> Result<(), StoreError> {
    let (change, ended, note) = match why {
        Why::Due => (None, None, None),
        Why::Asked(change) => (Some(change), None, None),
        Why::Ended(task) => (None, Some(task), None),
        Why::Noted(note) => (None, None, Some(note.clone())),
    };
    let mut line = read(tx, key, change.map(|change| change.task).or(ended))?;
    line.session = sessions::read(tx, key)?;
    line.note = note;
    let mut book = Book::new(tx.now, ended);
    book.want(&line, change);
    for task in book.wanted() {
        if let Some(head) = tx.head(task)? {
            book.know(head);
        }
    }
    if line.may_be_freed(change, &book) {
        line.next_token = tx
            .sql
            .prepare_cached(include_str!("sql/lock_token.sql"))
            .and_then(|mut next| next.query_row((), |row| row.get(0)))
            .map_err(store_error)?;
        book.service = sessions::service(tx.sql).map_err(store_error)?;
    }
    line.settle(change, &mut book);
    write(tx, &line)?;
    sessions::write(tx, &line)?;
    if let Some(waiter) = &line.joined
        && let Some(cycle) = deadlock(tx, waiter)?
    {
        leave(tx, key, waiter)?;
        book.give(waiter.task, &waiter.address, key, &News::Deadlock { cycle });
    }
    for task in std::mem::take(&mut book.locked) {
        mark(tx, task, true)?;
    }
    for (before, change) in book.changes() {
        if change.head.state == State::Running {
            tx.told.controlled.push(before.id);
        }
        tx.apply(&before, change)?;
    }
    Ok(())
}

/// The lock, and those who wait for it as far as they matter.
fn read(tx: &Tx<'_>, key: &str, task: Option<TaskId>) -> Result<Line, StoreError> {
    let hold = tx
        .sql
        .prepare_cached(include_str!("sql/lock_rows.sql"))
        .and_then(|mut select| select.query_map([key], hold)?.next().transpose())
        .map_err(store_error)?;
    let waiters = tx
        .sql
        .prepare_cached(include_str!("sql/lock_line.sql"))
        .and_then(|mut select| {
            let task = task.map(Id::from);
            select.query_map((key, tx.now, task, LOOK as i64), waiter)?.collect()
        })
        .map_err(store_error)?;
    Ok(Line::new(key, hold.flatten(), waiters))
}

fn hold(row: &Row<'_>) -> rusqlite::Result<Option<Hold>> {
    let Some(holder) = row.get::<_, Option<Id>>(1)? else { return Ok(None) };
    Ok(Some(Hold { task: TaskId(holder.0), address: row.get(2)?, token: row.get(3)?, until: row.get(4)? }))
}

fn waiter(row: &Row<'_>) -> rusqlite::Result<Waiter> {
    Ok(Waiter { task: rows::task_id(row, 2)?, address: row.get(3)?, max_hold: row.get(4)?, until: row.get(5)? })
}

fn write(tx: &Tx<'_>, line: &Line) -> Result<(), StoreError> {
    for waiter in &line.left {
        leave(tx, &line.key, waiter)?;
    }
    if line.changed || line.joined.is_some() {
        let run = |sql: &str, params: &[&dyn rusqlite::ToSql]| {
            tx.sql.prepare_cached(sql).and_then(|mut statement| statement.execute(params)).map_err(store_error)
        };
        run(include_str!("sql/lock_open.sql"), &[&line.key])?;
        let hold = line.hold.as_ref();
        run(
            include_str!("sql/lock_save.sql"),
            &[
                &tx.now,
                &line.key,
                &hold.map(|hold| Id::from(hold.task)),
                &hold.map(|hold| &hold.address),
                &hold.map(|hold| hold.token),
                &hold.map(|hold| hold.until),
            ],
        )?;
        if let Some(waiter) = &line.joined {
            let task = Id::from(waiter.task);
            run(
                include_str!("sql/lock_join.sql"),
                &[&line.key, &task, &waiter.address, &waiter.max_hold, &waiter.until],
            )?;
        }
    }
    if line.is_idle() {
        tx.sql
            .prepare_cached(include_str!("sql/lock_drop.sql"))
            .and_then(|mut delete| delete.execute([&line.key]))
            .map_err(store_error)?;
    }
    Ok(())
}

fn leave(tx: &Tx<'_>, key: &str, waiter: &Waiter) -> Result<(), StoreError> {
    tx.sql
        .prepare_cached(include_str!("sql/lock_leave.sql"))
        .and_then(|mut delete| delete.execute((key, Id::from(waiter.task), &waiter.address)))
        .map_err(store_error)?;
    Ok(())
}

fn mark(tx: &Tx<'_>, task: TaskId, locked: bool) -> Result<(), StoreError> {
    tx.sql
        .prepare_cached(include_str!("sql/lock_mark.sql"))
        .and_then(|mut update| update.execute((Id::from(task), locked)))
        .map_err(store_error)?;
    Ok(())
}

fn of_task(tx: &Tx<'_>, task: TaskId) -> Result<Vec<String>, StoreError> {
    tx.sql
        .prepare_cached(include_str!("sql/lock_of.sql"))
        .and_then(|mut select| select.query_map([Id::from(task)], |row| row.get(0))?.collect())
        .map_err(store_error)
}

/// The circle that a task which has just come into line closes. One that stops waiting by itself
/// closes none, nor does one that nobody can be waiting for.
fn deadlock(tx: &Tx<'_>, waiter: &Waiter) -> Result<Option<Vec<Link>>, StoreError> {
    if waiter.until.is_some() || of_task(tx, waiter.task)?.len() < 2 {
        return Ok(None);
    }
    let mut select = tx.sql.prepare_cached(include_str!("sql/lock_edges.sql")).map_err(store_error)?;
    let mut search = Search::from(waiter.task);
    while !search.frontier().is_empty() {
        let mut edges = Vec::new();
        for &task in search.frontier() {
            let found = select
                .query_map((Id::from(task), tx.now, SEARCH as i64), |row| {
                    Ok(Edge { from: rows::task_id(row, 0)?, key: row.get(1)?, to: rows::task_id(row, 2)? })
                })
                .and_then(Iterator::collect::<rusqlite::Result<Vec<Edge>>>)
                .map_err(store_error)?;
            edges.extend(found);
        }
        if let Some(cycle) = search.take(edges) {
            return Ok(Some(cycle));
        }
    }
    Ok(None)
}
