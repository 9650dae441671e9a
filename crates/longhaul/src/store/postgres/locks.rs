//! Locks: named mutual exclusion between tasks. Rows of `locks` are locked first, by name, then
//! those of tasks; whoever writes to `lock_waiters` has the lock's row locked.

use std::collections::{BTreeMap, BTreeSet};

use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresStore;
use super::connect::Tx;
use super::heads::{self, Decided};
use super::rows::{get_id, get_u64, to_i64};
use super::sessions;
use crate::store::locks::{Book, Edge, Hold, LOOK, Line, Link, News, SEARCH, Search, Waiter, check, gave, key};
use crate::store::sessions::Note;
use crate::store::{CommitRefused, LockAction, LockChange, Locked, StoreError};
use crate::task::{State, TaskId};

/// Held while looking for a deadlock: two tasks that come into line at the same time must see each
/// other.
const SEARCH_LOCK: i64 = 0x6c68_6c6f_636b;
/// How often a row is opened again that someone else has just removed.
const OPENINGS: usize = 8;
/// How many locks, and tasks that ended, one transaction of a sweep looks after.
const AT_ONCE: usize = 100;

pub(super) async fn change(
    store: &PostgresStore,
    change: &LockChange,
) -> Result<Result<Locked, CommitRefused>, StoreError> {
    let key = key(&change.tenant, &change.name);
    let tx = store.tx().await?;
    tx.begin().await?;
    let open = matches!(change.action, LockAction::Acquire { .. });
    let mut lines = read(store, &tx, &[key.as_str()].into(), open, &[change.task.0]).await?;
    let line = lines.lines.entry(key.clone()).or_insert_with(|| Line::new(&key, None, Vec::new()));
    let mut book = Book::new(lines.now, None);
    book.want(line, Some(change));
    learn(&tx, &mut book).await?;
    let head = book.head(change.task);
    if let Err(refused) = check(head, change, lines.now) {
        tx.rollback().await?;
        return Ok(Err(refused));
    }
    let last_seq = head.map_or(0, |head| head.last_seq);
    if last_seq > change.known_seq && happened_before(&tx, change).await? {
        tx.rollback().await?;
        return Ok(Ok(Locked { last_seq }));
    }
    let (decided, told) = settle(store, &tx, &mut lines, &mut book, Some(change)).await?;
    let last_seq = told.get(&change.task).copied().unwrap_or(last_seq);
    tx.commit().await?;
    store.tell(decided.told);
    Ok(Ok(Locked { last_seq }))
}

/// Whether the change was made before, and only its answer was lost.
async fn happened_before(tx: &Tx, change: &LockChange) -> Result<bool, StoreError> {
    let known = to_i64(change.known_seq);
    for row in tx.rows(include_str!("sql/lock_known.sql"), &[&change.task.0, &known]).await? {
        if gave(row.try_get(0)?, &change.address) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Takes everything from those of these tasks that have ended.
pub(super) async fn let_go(store: &PostgresStore, tasks: &[TaskId]) -> Result<(), StoreError> {
    let ids: Vec<Uuid> = tasks.iter().map(|task| task.0).collect();
    let tx = store.tx().await?;
    let ended = tx.rows(include_str!("sql/lock_ended.sql"), &[&ids]).await?;
    tx.end();
    let ended: Vec<TaskId> = ended.iter().map(|row| get_id(row, 0)).collect::<Result<_, _>>()?;
    look_after(store, &ended, &BTreeSet::new(), &[]).await
}

/// Looks after what is due; gives how much that was.
pub(super) async fn sweep(store: &PostgresStore, limit: i64) -> Result<usize, StoreError> {
    let tx = store.tx().await?;
    let due = tx.rows(include_str!("sql/lock_due.sql"), &[&store.clock.offset(), &limit]).await?;
    tx.end();
    let (mut ended, mut keys) = (Vec::new(), BTreeSet::new());
    for row in &due {
        ended.extend(row.try_get::<_, Option<Uuid>>(0)?.map(TaskId));
        keys.extend(row.try_get::<_, Option<&str>>(1)?);
    }
    for ended in ended.chunks(AT_ONCE) {
        look_after(store, ended, &BTreeSet::new(), &[]).await?;
    }
    let keys: Vec<&str> = keys.into_iter().collect();
    for keys in keys.chunks(AT_ONCE) {
        look_after(store, &[], &keys.iter().copied().collect(), &[]).await?;
    }
    Ok(due.len())
}

/// Does what is due of these locks and of those of tasks that ended, and what comes of what the lock
/// service said.
pub(super) async fn look_after(
    store: &PostgresStore,
    ended: &[TaskId],
    keys: &BTreeSet<&str>,
    notes: &[Note],
) -> Result<(), StoreError> {
    if ended.is_empty() && keys.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = ended.iter().map(|task| task.0).collect();
    let tx = store.tx().await?;
    tx.begin().await?;
    // A task that ended gets nothing more, so these are all there will ever be.
    let theirs = of_tasks(&tx, &ids).await?;
    let keys: BTreeSet<&str> = keys.iter().copied().chain(theirs.iter().map(String::as_str)).collect();
    // A session can be there without its lock, which needs a row then, to be decided about.
    let mut lines = read(store, &tx, &keys, ended.is_empty(), &ids).await?;
    for note in notes {
        if let Some(line) = lines.lines.get_mut(&note.look.key) {
            line.note = Some(note.clone());
        }
    }
    let mut book = Book::new(lines.now, ended.iter().copied());
    // Also without any lock: it must be known whether they did end.
    book.want(&Line::default(), None);
    for line in lines.lines.values() {
        book.want(line, None);
    }
    learn(&tx, &mut book).await?;
    let (decided, _) = settle(store, &tx, &mut lines, &mut book, None).await?;
    let over: Vec<Uuid> = book.over().iter().map(|task| task.0).collect();
    if !over.is_empty() {
        tx.execute(include_str!("sql/lock_mark.sql"), &[&over, &false]).await?;
    }
    tx.commit().await?;
    store.tell(decided.told);
    Ok(())
}

/// Locks, by name, as they are at a time.
struct Lines {
    now: i64,
    lines: BTreeMap<String, Line>,
}

/// Locks the rows of these locks, which are made if `open` says so, and reads who waits for them: the first
/// ones, those whose time is up, and these tasks.
async fn read(
    store: &PostgresStore,
    tx: &Tx,
    keys: &BTreeSet<&str>,
    open: bool,
    tasks: &[Uuid],
) -> Result<Lines, StoreError> {
    let keys: Vec<&str> = keys.iter().copied().collect();
    let mut rows = Vec::new();
    for _ in 0..OPENINGS {
        if open {
            tx.execute(include_str!("sql/lock_open.sql"), &[&keys]).await?;
        }
        rows = tx.rows(include_str!("sql/lock_rows.sql"), &[&keys]).await?;
        if !open || rows.len() == keys.len() {
            break;
        }
    }
    if open && rows.len() < keys.len() {
        return Err(StoreError::Unavailable("a lock is changing hands at this moment".to_owned()));
    }
    // Only now: whoever had the rows before may have taken their time.
    let now = heads::now(store, tx).await?;
    let mut lines = BTreeMap::new();
    for row in &rows {
        let key: String = row.try_get(0)?;
        let line = Line::new(&key, hold(row)?, Vec::new());
        lines.insert(key, line);
    }
    for row in tx.rows(include_str!("sql/session_rows.sql"), &[&keys]).await? {
        if let Some(line) = lines.get_mut(row.try_get::<_, &str>(0)?) {
            line.session = Some(sessions::session(&row)?);
        }
    }
    for row in tx.rows(include_str!("sql/lock_line.sql"), &[&keys, &now, &tasks, &to_i64(LOOK)]).await? {
        if let Some(line) = lines.get_mut(row.try_get::<_, &str>(0)?) {
            line.waiters.push(waiter(&row)?);
        }
    }
    Ok(Lines { now, lines })
}

fn hold(row: &Row) -> Result<Option<Hold>, StoreError> {
    let Some(holder) = row.try_get::<_, Option<Uuid>>(1)? else { return Ok(None) };
    let (address, token, until) = (row.try_get(2)?, get_u64(row, 3)?, row.try_get(4)?);
    Ok(Some(Hold { task: TaskId(holder), address, token, until }))
}

fn waiter(row: &Row) -> Result<Waiter, StoreError> {
    Ok(Waiter {
        task: get_id(row, 2)?,
        address: row.try_get(3)?,
        max_hold: row.try_get(4)?,
        until: row.try_get(5)?,
    })
}

/// Locks and reads the heads that are wanted.
async fn learn(tx: &Tx, book: &mut Book) -> Result<(), StoreError> {
    let tasks: Vec<Uuid> = book.wanted().iter().map(|task| task.0).collect();
    for head in heads::read(tx, &tasks).await? {
        book.know(head);
    }
    Ok(())
}

/// Decides about each of the locks, and writes what comes of it; gives the newest event of each task
/// that was told something.
async fn settle(
    store: &PostgresStore,
    tx: &Tx,
    lines: &mut Lines,
    book: &mut Book,
    change: Option<&LockChange>,
) -> Result<(Decided, BTreeMap<TaskId, u64>), StoreError> {
    for line in lines.lines.values_mut() {
        if line.may_be_freed(change, book) {
            let next = tx.rows(include_str!("sql/lock_token.sql"), &[&sessions::TOKEN_LOCK]).await?;
            let row =
                next.first().ok_or_else(|| StoreError::Failed("there is no counter of tokens".to_owned()))?;
            (line.next_token, book.service) = (get_u64(row, 0)?, row.try_get(1)?);
        }
        line.settle(change, book);
    }
    write(tx, lines).await?;
    sessions::write(tx, lines.lines.values()).await?;
    for line in lines.lines.values() {
        let Some(waiter) = &line.joined else { continue };
        if let Some(cycle) = join(tx, line, waiter, lines.now).await? {
            book.give(waiter.task, &waiter.address, &line.key, &News::Deadlock { cycle });
        }
    }
    let locked: Vec<Uuid> = book.locked.iter().map(|task| task.0).collect();
    if !locked.is_empty() {
        tx.execute(include_str!("sql/lock_mark.sql"), &[&locked, &true]).await?;
    }
    let (mut decided, mut told) = (Decided::default(), BTreeMap::new());
    decided.told.sessions = lines.lines.values().any(|line| line.calls_for_a_look(lines.now));
    for (before, change) in book.changes() {
        if change.head.state == State::Running {
            decided.told.controlled.push(before.id);
        }
        told.insert(before.id, decided.add(&before, change).last_seq);
    }
    decided.write(store, tx, lines.now).await?;
    Ok((decided, told))
}

async fn write(tx: &Tx, lines: &Lines) -> Result<(), StoreError> {
    let all = lines.lines.values();
    let left: Vec<(&str, &Waiter)> =
        all.clone().flat_map(|line| line.left.iter().map(|waiter| (line.key.as_str(), waiter))).collect();
    if !left.is_empty() {
        leave(tx, &left).await?;
    }
    let changed: Vec<&Line> = all.clone().filter(|line| line.changed).collect();
    if !changed.is_empty() {
        let keys: Vec<&str> = changed.iter().map(|line| line.key.as_str()).collect();
        let holds = || changed.iter().map(|line| line.hold.as_ref());
        let holders: Vec<Option<Uuid>> = holds().map(|hold| hold.map(|hold| hold.task.0)).collect();
        let addresses: Vec<Option<&str>> = holds().map(|hold| hold.map(|hold| hold.address.as_str())).collect();
        let tokens: Vec<Option<i64>> = holds().map(|hold| hold.map(|hold| to_i64(hold.token))).collect();
        let until: Vec<Option<i64>> = holds().map(|hold| hold.map(|hold| hold.until)).collect();
        let params: super::connect::Params<'_> = &[&lines.now, &keys, &holders, &addresses, &tokens, &until];
        tx.execute(include_str!("sql/lock_save.sql"), params).await?;
    }
    let idle: Vec<&str> =
        all.filter(|line| line.is_idle() && line.joined.is_none()).map(|line| line.key.as_str()).collect();
    if !idle.is_empty() {
        tx.execute(include_str!("sql/lock_drop.sql"), &[&idle]).await?;
    }
    Ok(())
}

async fn leave(tx: &Tx, left: &[(&str, &Waiter)]) -> Result<(), StoreError> {
    let keys: Vec<&str> = left.iter().map(|(key, _)| *key).collect();
    let tasks: Vec<Uuid> = left.iter().map(|(_, waiter)| waiter.task.0).collect();
    let addresses: Vec<&str> = left.iter().map(|(_, waiter)| waiter.address.as_str()).collect();
    tx.execute(include_str!("sql/lock_leave.sql"), &[&keys, &tasks, &addresses]).await?;
    Ok(())
}

/// Puts a task at the end of the line, unless that closes a circle of tasks that wait for each
/// other: the circle is given then. One that stops waiting by itself closes none, nor does one that
/// nobody can be waiting for.
async fn join(tx: &Tx, line: &Line, waiter: &Waiter, now: i64) -> Result<Option<Vec<Link>>, StoreError> {
    let alone = waiter.until.is_some() || of_tasks(tx, &[waiter.task.0]).await?.is_empty();
    if !alone {
        tx.rows("SELECT pg_advisory_xact_lock($1)", &[&SEARCH_LOCK]).await?;
    }
    tx.execute(
        include_str!("sql/lock_join.sql"),
        &[&line.key, &waiter.task.0, &waiter.address, &waiter.max_hold, &waiter.until],
    )
    .await?;
    if alone {
        return Ok(None);
    }
    let mut search = Search::from(waiter.task);
    while !search.frontier().is_empty() {
        let frontier: Vec<Uuid> = search.frontier().iter().map(|task| task.0).collect();
        let rows = tx.rows(include_str!("sql/lock_edges.sql"), &[&frontier, &now, &to_i64(SEARCH)]).await?;
        let edge = |row: &Row| Ok(Edge { from: get_id(row, 0)?, key: row.try_get(1)?, to: get_id(row, 2)? });
        let edges = rows.iter().map(edge).collect::<Result<_, StoreError>>()?;
        if let Some(cycle) = search.take(edges) {
            leave(tx, &[(line.key.as_str(), waiter)]).await?;
            return Ok(Some(cycle));
        }
    }
    Ok(None)
}

/// The locks that these tasks hold or wait for.
async fn of_tasks(tx: &Tx, tasks: &[Uuid]) -> Result<Vec<String>, StoreError> {
    let rows = tx.rows(include_str!("sql/lock_of.sql"), &[&tasks]).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}
