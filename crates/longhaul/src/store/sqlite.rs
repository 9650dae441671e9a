//! The SQLite store: WAL, `synchronous=FULL`, one writer thread, a few readers. Several
//! processes on one host may share the file.
//!
//! [`writer`] owns the writing connection; the other modules hold one method of the trait each,
//! as functions over an open transaction ([`Tx`]), so that they read top to bottom.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "faults")]
use std::sync::Mutex;

use async_trait::async_trait;
use rusqlite::config::DbConfig;
use rusqlite::{CachedStatement, Connection, ErrorCode, OpenFlags, Transaction};
use uuid::Uuid;

use super::clock::{Clock, boot_id, boot_micros, wall_micros};
use super::known::Known;
use super::subscribers::Late;
use super::*;
use crate::faults;

mod access;
#[cfg(feature = "faults")]
mod apart;
mod asks;
mod backup;
mod claim;
mod commit;
mod control;
mod feed;
mod floor;
mod limits;
mod locks;
mod outbox;
mod overview;
mod read;
mod readers;
mod rows;
mod schedule;
mod sessions;
mod submit;
mod subscribers;
mod sweep;
mod turn;
mod wal;
mod writer;

use readers::Readers;
use wal::Log;
use writer::Writer;

/// See the module.
pub(crate) struct SqliteStore {
    /// Dropped before the writer, so that the writer is the last to close the file.
    readers: Option<Arc<Readers>>,
    writer: Writer,
    hints: Arc<Hints>,
    clock: Arc<Clock>,
    boot: Arc<str>,
    /// The bound of the outbox, when it is reached.
    gauge: Arc<Known<Option<u64>>>,
    /// A subscriber that is too far behind.
    late: Arc<Known<Option<Late>>>,
}

impl SqliteStore {
    /// Opens or creates the database file at `path`.
    pub(crate) async fn open(path: &str, hints: Arc<Hints>) -> Result<Self, StoreError> {
        let path = path.strip_prefix("//").unwrap_or(path).to_owned();
        if path.is_empty() {
            return Err(StoreError::Url("sqlite: needs a path, as in sqlite:longhaul.db".to_owned()));
        }
        let opened = tokio::task::spawn_blocking(move || {
            let parent = Path::new(&path).parent().filter(|parent| !parent.as_os_str().is_empty());
            if let Some(parent) = parent {
                std::fs::create_dir_all(parent)
                    .map_err(|error| StoreError::Url(format!("cannot create '{}': {error}", parent.display())))?;
            }
            // SQLite makes the files beside it with the same permissions.
            match super::backup::make_private(Path::new(&path)) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(StoreError::Url(format!("cannot create '{path}': {error}")));
                }
                _ => {}
            }
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
                | OpenFlags::SQLITE_OPEN_CREATE
                | OpenFlags::SQLITE_OPEN_NO_MUTEX;
            let mut connection = Connection::open_with_flags(&path, flags)
                .map_err(|error| StoreError::Url(format!("cannot open '{path}': {error}")))?;
            let log = prepare(&mut connection, 24 * 1024)?;
            Ok::<_, StoreError>((connection, log, path))
        });
        let (connection, log, path) = opened.await.map_err(|error| StoreError::Failed(error.to_string()))??;
        Self::with(connection, log, Some(Readers::new(path)), hints)
    }

    /// A store that lives in memory and ends with this value.
    pub(crate) fn in_memory(hints: Arc<Hints>) -> Result<Self, StoreError> {
        let mut connection = Connection::open_in_memory().map_err(store_error)?;
        let log = prepare(&mut connection, 16 * 1024)?;
        Self::with(connection, log, None, hints)
    }

    /// A database in memory for several stores of this process, see [`SqliteStore::on`].
    #[cfg(feature = "faults")]
    pub(crate) fn shared_memory() -> Result<Arc<Mutex<Connection>>, StoreError> {
        let mut connection = Connection::open_in_memory().map_err(store_error)?;
        prepare(&mut connection, 16 * 1024)?;
        Ok(Arc::new(Mutex::new(connection)))
    }

    /// A store on a database that others use too. Whatever is asked of it is done where it is asked for, without a thread.
    #[cfg(feature = "faults")]
    pub(crate) fn on(database: Arc<Mutex<Connection>>, hints: Arc<Hints>) -> Self {
        Self::made_of(Writer::here(database), None, hints)
    }

    fn with(
        connection: Connection,
        log: Log,
        readers: Option<Readers>,
        hints: Arc<Hints>,
    ) -> Result<Self, StoreError> {
        let shared_file = readers.is_some();
        let writer = Writer::start(connection, log, shared_file.then(|| Arc::clone(&hints)))
            .map_err(|error| StoreError::Failed(format!("cannot start the writer thread: {error}")))?;
        Ok(Self::made_of(writer, readers, hints))
    }

    fn made_of(writer: Writer, readers: Option<Readers>, hints: Arc<Hints>) -> Self {
        Self {
            readers: readers.map(Arc::new),
            writer,
            hints,
            clock: Arc::default(),
            boot: boot_id().into(),
            gauge: Arc::default(),
            late: Arc::default(),
        }
    }

    /// Runs `job` in a writing transaction; gives hints when it is on disk.
    async fn write<T: Send + 'static>(
        &self,
        urgent: bool,
        job: impl FnOnce(&mut Tx<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (clock, boot) = (Arc::clone(&self.clock), Arc::clone(&self.boot));
        let (gauge, late) = (Arc::clone(&self.gauge), Arc::clone(&self.late));
        let operation = faults::Operation::current();
        let (result, told) = self
            .writer
            .transact(urgent, move |transaction| {
                let offset = clock.offset();
                let mut tx = Tx {
                    sql: transaction,
                    now: wall_micros() + offset,
                    lease_now: boot_micros() + offset,
                    boot: &boot,
                    gauge: &gauge,
                    late: &late,
                    append: None,
                    depths: BTreeMap::new(),
                    told: Told::default(),
                };
                let result = job(&mut tx)?;
                let told = tx.finish()?;
                operation.committing()?;
                Ok((result, told))
            })
            .await?;
        #[cfg(feature = "faults")]
        apart::write(&self.writer, told.apart).await?;
        if told.ready {
            self.hints.tell_ready();
        }
        if told.due {
            self.hints.tell_due();
        }
        if told.sessions {
            self.hints.tell_sessions();
        }
        self.hints.tell_changed(told.changed);
        self.hints.tell_finished(told.finished);
        for task in told.controlled {
            self.hints.tell_controlled(task);
        }
        Ok(result)
    }

    /// Runs `job` on a reading connection.
    async fn read<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        match &self.readers {
            Some(readers) => readers.read(job).await,
            None => self.writer.call(false, move |connection| job(connection).map_err(store_error)).await,
        }
    }
}

/// An open writing transaction and what it has gathered so far.
struct Tx<'a> {
    sql: &'a Transaction<'a>,
    /// The store's clock for timers and deadlines.
    now: i64,
    /// The host's boot clock, for leases.
    lease_now: i64,
    boot: &'a str,
    gauge: &'a Known<Option<u64>>,
    late: &'a Known<Option<Late>>,
    /// The statement that nearly every transaction uses for each of its entries.
    append: Option<CachedStatement<'a>>,
    /// Changes of the number of pending tasks per queue.
    depths: BTreeMap<String, i64>,
    told: Told,
}

/// What to hint at once the transaction is on disk.
#[derive(Default)]
struct Told {
    ready: bool,
    /// Something is due for the keeper.
    due: bool,
    /// Someone must turn to the lock service.
    sessions: bool,
    changed: Vec<TaskId>,
    finished: Vec<TaskId>,
    controlled: Vec<TaskId>,
    /// What a mutant writes in another transaction.
    #[cfg(feature = "faults")]
    apart: Vec<apart::Row>,
}

impl Told {
    fn tell(&mut self, task: TaskId, state: State) {
        if state.is_final() {
            self.finished.push(task);
        } else {
            self.changed.push(task);
        }
    }
}

impl Tx<'_> {
    fn count_pending(&mut self, queue: &str, by: i64) {
        match self.depths.get_mut(queue) {
            Some(count) => *count += by,
            None => {
                self.depths.insert(queue.to_owned(), by);
            }
        }
    }

    /// Writes the changes of pending tasks so far, so that the bounds of queues are exact from here on.
    fn save_depths(&mut self) -> Result<(), StoreError> {
        let mut add = self.sql.prepare_cached(include_str!("sqlite/sql/depth_add.sql")).map_err(store_error)?;
        for (queue, by) in std::mem::take(&mut self.depths) {
            if by != 0 {
                add.execute((queue, by)).map_err(store_error)?;
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Told, StoreError> {
        self.save_depths()?;
        Ok(self.told)
    }
}

/// Checks the library, sets the pragmas and brings the schema up to date.
fn prepare(connection: &mut Connection, cache_kib: i64) -> Result<Log, StoreError> {
    trust_library(rusqlite::version_number())?;
    turn::wait_evenly(connection).map_err(store_error)?;
    connection.set_prepared_statement_cache_capacity(128);
    // One plan per statement, whatever is bound to it; without this, some statements would be
    // planned anew at every call.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(store_error)?;
    let pragmas = format!(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -{cache_kib};
         PRAGMA temp_store = MEMORY; PRAGMA foreign_keys = OFF;"
    );
    // Of those who open a new file at once, one makes it a WAL database.
    turn::until_free(|| connection.execute_batch(&pragmas)).map_err(store_error)?;
    let log = Log::of(connection).map_err(store_error)?;
    let transaction =
        connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(store_error)?;
    transaction
        .execute_batch(
            "CREATE TABLE IF NOT EXISTS longhaul_migrations (
                 version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)",
        )
        .map_err(store_error)?;
    let found = transaction
        .query_row("SELECT coalesce(max(version), 0) FROM longhaul_migrations", (), |row| row.get(0))
        .map_err(store_error)?;
    for migration in migrate::missing(found)? {
        transaction.execute_batch(migration.sqlite).map_err(store_error)?;
        transaction
            .execute(
                "INSERT INTO longhaul_migrations (version, name, applied_at) VALUES (?, ?, ?)",
                (migration.version, migration.name, wall_micros()),
            )
            .map_err(store_error)?;
    }
    transaction.commit().map_err(store_error)?;
    Ok(log)
}

/// Refuses libraries that can corrupt a WAL database (the WAL-reset bug of 3.7.0 to 3.51.2).
fn trust_library(version: i32) -> Result<(), StoreError> {
    const FIRST_SAFE: i32 = 3_051_003;
    if version < FIRST_SAFE {
        return Err(StoreError::Incompatible(format!(
            "SQLite {}.{}.{} can corrupt WAL databases; link 3.51.3 or newer (the bundled one is)",
            version / 1_000_000,
            version / 1_000 % 1_000,
            version % 1_000
        )));
    }
    Ok(())
}

/// What an error of SQLite means for the caller.
pub(super) fn store_error(error: rusqlite::Error) -> StoreError {
    if is_unreadable(&error) {
        return StoreError::Incompatible(format!("a row of the database is damaged ({error}); restore a backup"));
    }
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            StoreError::Unavailable("another process holds the database file".to_owned())
        }
        Some(ErrorCode::DiskFull) => StoreError::Unavailable("the disk is full".to_owned()),
        Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) => StoreError::Unavailable(error.to_string()),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Incompatible(format!("the database file is damaged ({error}); restore a backup"))
        }
        _ => StoreError::Failed(error.to_string()),
    }
}

/// Whether a row has something else in it than was ever written there.
pub(super) fn is_unreadable(error: &rusqlite::Error) -> bool {
    use rusqlite::Error::{FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType, Utf8Error};
    matches!(
        error,
        FromSqlConversionFailure(..) | IntegralValueOutOfRange(..) | InvalidColumnType(..) | Utf8Error(..)
    )
}

#[async_trait]
impl Store for SqliteStore {
    async fn submit(&self, batch: &[NewTask]) -> Result<Vec<Result<Accepted, SubmitRefused>>, StoreError> {
        let batch = batch.to_vec();
        faults::around("submit", self.write(false, move |tx| submit::submit(tx, &batch))).await
    }

    async fn claim(&self, ask: &Claim) -> Result<Claimed, StoreError> {
        let ask = ask.clone();
        faults::around("claim", self.write(false, move |tx| claim::claim(tx, &ask))).await
    }

    async fn commit(&self, batch: &[Commit]) -> Result<Vec<Result<Committed, CommitRefused>>, StoreError> {
        let batch = batch.to_vec();
        faults::around(Commit::operation(&batch), self.write(false, move |tx| commit::commit(tx, &batch))).await
    }

    async fn heartbeat(&self, beat: &Heartbeat) -> Result<Beats, StoreError> {
        let beat = beat.clone();
        faults::around("heartbeat", self.write(true, move |tx| claim::heartbeat(tx, &beat))).await
    }

    async fn control(&self, batch: &[Control]) -> Result<Vec<Result<Controlled, ControlRefused>>, StoreError> {
        let batch = batch.to_vec();
        let control = move |tx: &mut Tx<'_>| batch.iter().map(|control| control::control(tx, control)).collect();
        faults::around("control", self.write(false, control)).await
    }

    async fn lock(&self, change: &LockChange) -> Result<Result<Locked, CommitRefused>, StoreError> {
        let change = change.clone();
        self.write(false, move |tx| locks::change(tx, &change)).await
    }

    async fn let_go(&self, tasks: &[TaskId]) -> Result<(), StoreError> {
        let tasks = tasks.to_vec();
        self.write(false, move |tx| tasks.iter().try_for_each(|&task| locks::let_go(tx, task))).await
    }

    async fn sweep(&self, limit: usize, ticks: bool) -> Result<Swept, StoreError> {
        faults::around("sweep", self.write(false, move |tx| sweep::sweep(tx, limit, ticks))).await
    }

    async fn register(&self, worker: &WorkerInfo) -> Result<(), StoreError> {
        let worker = worker.clone();
        self.write(false, move |tx| control::register(tx, &worker)).await
    }

    async fn retire(&self, worker: Uuid) -> Result<(), StoreError> {
        self.write(false, move |tx| {
            tx.sql.execute("DELETE FROM workers WHERE id = ?", [rows::Id(worker)]).map_err(store_error)?;
            Ok(())
        })
        .await
    }

    async fn configure(&self, settings: &Settings) -> Result<(), StoreError> {
        let settings = settings.clone();
        self.write(false, move |tx| limits::configure(tx, &settings)).await
    }

    async fn task(&self, tenant: &str, id: TaskId) -> Result<Option<Task>, StoreError> {
        let tenant = tenant.to_owned();
        self.read(move |sql| read::task(sql, &tenant, id)).await
    }

    async fn list(&self, tenant: &str, filter: &Filter) -> Result<Page, StoreError> {
        let (tenant, filter) = (tenant.to_owned(), filter.clone());
        self.read(move |sql| read::list(sql, &tenant, &filter)).await
    }

    async fn log(&self, task: TaskId, after: u64, bytes: usize) -> Result<Vec<LogRow>, StoreError> {
        self.read(move |sql| read::log(sql, task, after, bytes)).await
    }

    async fn advanced(&self, known: &[(TaskId, u64)]) -> Result<Vec<(TaskId, u64)>, StoreError> {
        let known = known.to_vec();
        self.read(move |sql| read::advanced(sql, &known)).await
    }

    async fn state(&self, task: TaskId) -> Result<Option<(u64, AgentState)>, StoreError> {
        self.read(move |sql| read::state(sql, task)).await
    }

    async fn checkpoints(&self, task: TaskId) -> Result<Vec<Checkpoint>, StoreError> {
        self.read(move |sql| read::checkpoints(sql, task)).await
    }

    async fn asks(&self, tenant: &str, task: Option<TaskId>) -> Result<Vec<Ask>, StoreError> {
        let (tenant, now) = (tenant.to_owned(), self.clock.now_micros());
        self.read(move |sql| match task {
            Some(task) if read::task(sql, &tenant, task)?.is_some() => asks::of_task(sql, task),
            Some(_) => Ok(Vec::new()),
            None => asks::open(sql, &tenant, now),
        })
        .await
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        self.read(read::queues).await
    }

    async fn workers(&self) -> Result<Vec<WorkerInfo>, StoreError> {
        self.read(read::workers).await
    }

    async fn save_schedule(&self, schedule: &Schedule) -> Result<Result<Schedule, Invalid>, StoreError> {
        let schedule = schedule.clone();
        self.write(false, move |tx| schedule::save(tx, &schedule)).await
    }

    async fn pause_schedule(&self, tenant: &str, name: &str, pause: bool) -> Result<Option<Schedule>, StoreError> {
        let (tenant, name) = (tenant.to_owned(), name.to_owned());
        self.write(false, move |tx| schedule::pause(tx, &tenant, &name, pause)).await
    }

    async fn remove_schedule(&self, tenant: &str, name: &str) -> Result<bool, StoreError> {
        let (tenant, name) = (tenant.to_owned(), name.to_owned());
        self.write(false, move |tx| schedule::remove(tx, &tenant, &name)).await
    }

    async fn schedules(&self, tenant: &str) -> Result<Vec<Schedule>, StoreError> {
        let tenant = tenant.to_owned();
        self.read(move |sql| schedule::list(sql, &tenant)).await
    }

    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn lanes(&self) -> Lanes {
        // One of them is written at a time. When a second one is ready, the writer does not have to wait for those whose
        // answers it has just given.
        Lanes { most: 2, plenty: 128 }
    }

    async fn floor(&self, seconds: f64) -> Result<Floor, StoreError> {
        self.writer.call(false, move |connection| floor::floor(connection, seconds).map_err(store_error)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_with_the_wal_reset_bug_are_refused() {
        assert!(trust_library(3_051_002).is_err());
        assert!(trust_library(3_051_003).is_ok());
        assert!(trust_library(rusqlite::version_number()).is_ok());
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_new_store_is_for_its_owner_alone_and_an_old_one_stays_as_it_is() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mode = |name: &str| {
            let found = std::fs::metadata(folder.path().join(name)).unwrap_or_else(|_| panic!("no {name}"));
            found.permissions().mode() & 0o777
        };
        let path = folder.path().join("new.db");
        let open = async |path: &Path| {
            SqliteStore::open(&path.display().to_string(), Arc::default()).await.expect("opens")
        };
        let store = open(&path).await;
        assert_eq!(["new.db", "new.db-wal", "new.db-shm"].map(mode), [0o600; 3]);
        super::super::backup::BackupStore::backup(&store, &folder.path().join("copy.db"))
            .await
            .expect("the store answers")
            .expect("copied");
        assert_eq!(mode("copy.db"), 0o600);
        drop(store);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("set");
        let _store = open(&path).await;
        assert_eq!(mode("new.db"), 0o640);
    }

    #[test]
    fn commits_are_synced_to_disk() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut connection = Connection::open(folder.path().join("t.db")).expect("opens");
        prepare(&mut connection, 1_024).expect("prepares");
        let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0)).expect("reads");
        assert_eq!(pragma("synchronous"), 2, "FULL");
        let mode: String = connection.pragma_query_value(None, "journal_mode", |row| row.get(0)).expect("reads");
        assert_eq!(mode, "wal");
    }
}
