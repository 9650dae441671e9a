//! The connections that only read. There are a few, opened as they are needed and kept: whoever asks while all are in use waits for
//! one, which is sooner there than a new one, with its schema to be read and its statements to be compiled.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::Semaphore;

use super::store_error;
use crate::store::StoreError;

/// How many there are at most.
const READERS: usize = 4;

/// See the module.
pub(super) struct Readers {
    pub(super) path: String,
    free: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

impl Readers {
    pub(super) fn new(path: String) -> Self {
        Self { path, free: Arc::new(Semaphore::new(READERS)), idle: Mutex::default() }
    }

    /// Runs `job` on one of them, on a thread that may block.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let failed = |error: &dyn std::fmt::Display| StoreError::Failed(error.to_string());
        let turn = Arc::clone(&self.free).acquire_owned().await.map_err(|error| failed(&error))?;
        let readers = Arc::clone(self);
        let reading = tokio::task::spawn_blocking(move || {
            // Kept until the connection is back, also when nobody waits for the result any more.
            let _turn = turn;
            readers.with(job)
        });
        reading.await.map_err(|error| failed(&error))?
    }

    fn with<T>(&self, job: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, StoreError> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let connection = match kept {
            Some(connection) => connection,
            None => self.open().map_err(store_error)?,
        };
        let result = job(&connection).map_err(store_error);
        idle().push(connection);
        result
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.set_prepared_statement_cache_capacity(64);
        // One plan per statement, as for the writer.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        connection.pragma_update(None, "query_only", true)?;
        connection.pragma_update(None, "cache_size", -1_024)?;
        Ok(connection)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn many_who_read_at_once_share_a_few_connections() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("read.db");
        Connection::open(&path).and_then(|made| made.execute_batch("CREATE TABLE t (x)")).expect("made");
        let readers = Arc::new(Readers::new(path.display().to_string()));
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let reads: Vec<_> = (0..200)
            .map(|_| {
                let (readers, now, most) = (Arc::clone(&readers), Arc::clone(&now), Arc::clone(&most));
                tokio::spawn(async move {
                    let job = move |connection: &Connection| {
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        let read = connection.query_row("SELECT count(*) FROM t", (), |row| row.get::<_, i64>(0));
                        std::thread::sleep(Duration::from_millis(1));
                        now.fetch_sub(1, Ordering::SeqCst);
                        read
                    };
                    readers.read(job).await
                })
            })
            .collect();
        for read in reads {
            assert_eq!(read.await.expect("ran").expect("read"), 0);
        }
        assert!(most.load(Ordering::SeqCst) <= READERS);
        assert!(readers.idle.lock().expect("whole").len() <= READERS);
    }

    #[tokio::test]
    async fn a_read_that_fails_or_panics_leaves_room_for_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("read.db");
        Connection::open(&path).and_then(|made| made.execute_batch("CREATE TABLE t (x)")).expect("made");
        let readers = Arc::new(Readers::new(path.display().to_string()));
        for _ in 0..2 * READERS {
            let failed = readers.read(|connection| connection.execute_batch("SELECT y FROM t")).await;
            assert!(failed.is_err());
            let panicked = readers.read(|_| -> rusqlite::Result<()> { panic!("a bug") }).await;
            assert!(panicked.is_err());
        }
        let read =
            readers.read(|connection| connection.query_row("SELECT 1", (), |row| row.get::<_, i64>(0))).await;
        assert_eq!(read.expect("read"), 1);
    }
}
