//! The one thread that writes to the database file. Transactions of this process follow one
//! another here; between processes SQLite's own lock decides.
//!
//! While it has nothing to do, the thread looks every few milliseconds whether another process
//! wrote to the file (`data_version` of this connection changes exactly then) and tells the
//! others of this process.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::oneshot;

use super::store_error;
use crate::store::{Hints, StoreError};

/// How often an idle writer looks for other processes' writes.
const LOOK_EVERY: Duration = Duration::from_millis(20);

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

#[derive(Default)]
struct Jobs {
    queue: VecDeque<Job>,
    closed: bool,
}

struct Shared {
    jobs: Mutex<Jobs>,
    wake: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        // Jobs run outside the lock, so a panic cannot leave the queue half changed.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends work to the writer thread; the thread ends when this is dropped.
pub(crate) struct Writer(Place);

/// Where work is done.
enum Place {
    /// On a thread of its own.
    Thread(Arc<Shared>),
    /// Where it is asked for, on a connection that several stores share: in a simulation nothing may take time.
    #[cfg(feature = "faults")]
    Here(Arc<Mutex<Connection>>),
}

impl Writer {
    /// Starts the thread. `hints`: whom to tell about other processes' writes.
    pub(crate) fn start(connection: Connection, hints: Option<Arc<Hints>>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { jobs: Mutex::default(), wake: Condvar::new() });
        let thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("longhaul-sqlite".to_owned())
            .spawn(move || work(&thread, connection, hints.as_deref()))?;
        Ok(Self(Place::Thread(shared)))
    }

    /// Works where it is asked to.
    #[cfg(feature = "faults")]
    pub(crate) fn here(connection: Arc<Mutex<Connection>>) -> Self {
        Self(Place::Here(connection))
    }

    /// Runs `job` in a transaction of its own and gives its result once that is on disk. Urgent
    /// jobs go before all others.
    pub(crate) async fn transact<T: Send + 'static>(
        &self,
        urgent: bool,
        job: impl FnOnce(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.call(urgent, move |connection| {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(store_error)?;
            let result = job(&transaction)?;
            transaction.commit().map_err(store_error)?;
            Ok(result)
        })
        .await
    }

    /// Runs `job` on the connection, without a transaction.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        urgent: bool,
        job: impl FnOnce(&mut Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        #[allow(clippy::infallible_destructuring_match, reason = "with the feature `faults` there are two places")]
        let shared = match &self.0 {
            Place::Thread(shared) => shared,
            #[cfg(feature = "faults")]
            Place::Here(connection) => {
                // A job that panicked has rolled its transaction back.
                return job(&mut connection.lock().unwrap_or_else(PoisonError::into_inner));
            }
        };
        let (reply, result) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            // Whoever asked may have stopped waiting; the work is done all the same.
            let _ = reply.send(job(connection));
        });
        {
            let mut jobs = shared.lock();
            if urgent {
                jobs.queue.push_front(job);
            } else {
                jobs.queue.push_back(job);
            }
        }
        shared.wake.notify_one();
        result.await.map_err(|_| StoreError::Unavailable("the writer stopped".to_owned()))?
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        match &self.0 {
            Place::Thread(shared) => {
                shared.lock().closed = true;
                shared.wake.notify_one();
            }
            #[cfg(feature = "faults")]
            Place::Here(_) => {}
        }
    }
}

fn work(shared: &Shared, mut connection: Connection, hints: Option<&Hints>) {
    let mut version = data_version(&connection);
    loop {
        let next = {
            let mut jobs = shared.lock();
            loop {
                if let Some(job) = jobs.queue.pop_front() {
                    break Some(job);
                }
                if jobs.closed {
                    return;
                }
                let (guard, waited) =
                    shared.wake.wait_timeout(jobs, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner);
                jobs = guard;
                if waited.timed_out() && jobs.queue.is_empty() && !jobs.closed {
                    break None;
                }
            }
        };
        match next {
            Some(job) => {
                // A panic in a job is a bug of ours, but it must not take the store down: the
                // transaction is rolled back when it is dropped, and the caller is told.
                let job = std::panic::AssertUnwindSafe(|| job(&mut connection));
                if std::panic::catch_unwind(job).is_err() {
                    tracing::error!("a database job panicked; its transaction was rolled back");
                }
            }
            None => {
                let seen = data_version(&connection);
                // Unreadable for a moment is as if nothing had changed.
                if seen.is_some() && seen != version {
                    version = seen;
                    if let Some(hints) = hints {
                        hints.tell_anything();
                    }
                }
            }
        }
    }
}

fn data_version(connection: &Connection) -> Option<i64> {
    let mut pragma = connection.prepare_cached("PRAGMA data_version").ok()?;
    pragma.query_row((), |row| row.get(0)).ok()
}
