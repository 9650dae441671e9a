//! The one connection that writes to the database file, and its thread. Transactions of this process follow one
//! another here; between processes SQLite's own lock decides.
//!
//! A transaction that finds nothing before it, after others that were quick, is made at once by whoever asks: to wake the thread, and be
//! woken by it, would take longer than the transaction.
//!
//! While it has nothing to do, the thread looks every few milliseconds whether another process
//! wrote to the file (`data_version` of this connection changes exactly then) and tells the
//! others of this process.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;

use super::wal::Log;
use super::{store_error, turn};
use crate::store::{Hints, StoreError};

/// How often an idle writer looks for other processes' writes.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A transaction that takes no longer is quick.
const QUICK: Duration = Duration::from_millis(2);
/// After one that was not, so many are left to the thread.
const WARY: u32 = 16;
/// How long others can look for the turn, after one that was had here: twice as long as they pause between two looks.
const COURTESY: Duration = turn::PAUSE.saturating_mul(2);
/// For so long it is taken for likely that a process that wanted the turn wants it again.
const LATELY: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

#[derive(Default)]
struct Jobs {
    queue: VecDeque<Job>,
    closed: bool,
}

struct Shared {
    jobs: Mutex<Jobs>,
    wake: Condvar,
    connection: Mutex<Connection>,
    log: Log,
    /// So many transactions are still left to the thread.
    wary: AtomicU32,
    others: Mutex<Others>,
}

/// Whoever has just had the turn is awake when it becomes free, and the others only look from time to time: with more to
/// write, it would have the next turn too, and the one after that, while the others wait.
#[derive(Default)]
struct Others {
    /// When another process had the turn that was wanted here.
    met: Option<Instant>,
    /// When the newest turn that was had here ended.
    had: Option<Instant>,
}

impl Others {
    /// How long they are still to be let look.
    fn courtesy(&self, now: Instant) -> Option<Duration> {
        let lately = self.met.is_some_and(|met| now.duration_since(met) < LATELY);
        let since = now.duration_since(self.had.filter(|_| lately)?);
        COURTESY.checked_sub(since).filter(|left| !left.is_zero())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        // Jobs run outside the lock, so a panic cannot leave the queue half changed.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, urgent: bool, job: Job) {
        let mut jobs = self.lock();
        if urgent {
            jobs.queue.push_front(job);
        } else {
            jobs.queue.push_back(job);
        }
        drop(jobs);
        self.wake.notify_one();
    }

    /// The connection, for one who may use it at once: nothing is before it, it will not take long, and others of
    /// the runtime go on meanwhile.
    fn at_once(&self) -> Option<MutexGuard<'_, Connection>> {
        if self.wary.load(Ordering::Relaxed) > 0 || !self.lock().queue.is_empty() {
            return None;
        }
        if self.others().courtesy(Instant::now()).is_some() {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        if runtime.runtime_flavor() != RuntimeFlavor::MultiThread || runtime.metrics().num_workers() < 2 {
            return None;
        }
        self.connection.try_lock().ok()
    }

    /// Learns how long a transaction took, which has ended, and whether another process was waited for.
    fn took(&self, time: Duration, met: bool) {
        let wary = if time > QUICK { WARY } else { self.wary.load(Ordering::Relaxed).saturating_sub(1) };
        self.wary.store(wary, Ordering::Relaxed);
        let (now, mut others) = (Instant::now(), self.others());
        others.had = Some(now);
        others.met = if met { Some(now) } else { others.met };
    }

    fn others(&self) -> MutexGuard<'_, Others> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `job` in a transaction that has begun.
fn finish<T>(
    transaction: Transaction<'_>,
    job: impl FnOnce(&Transaction<'_>) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let result = job(&transaction)?;
    transaction.commit().map_err(store_error)?;
    Ok(result)
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
    pub(crate) fn start(connection: Connection, log: Log, hints: Option<Arc<Hints>>) -> std::io::Result<Self> {
        let (connection, wary) = (Mutex::new(connection), AtomicU32::new(0));
        let (jobs, wake, others) = (Mutex::default(), Condvar::new(), Mutex::default());
        let shared = Arc::new(Shared { jobs, wake, connection, log, wary, others });
        let thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("longhaul-sqlite".to_owned())
            .spawn(move || work(&thread, hints.as_deref()))?;
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
        let job = match self.transact_at_once(job) {
            Ok(done) => return done,
            Err(job) => job,
        };
        self.call(urgent, move |connection| {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(store_error)?;
            finish(transaction, job)
        })
        .await
    }

    /// What is shared with the thread, if there is one.
    fn shared(&self) -> Option<&Shared> {
        match &self.0 {
            Place::Thread(shared) => Some(shared),
            #[cfg(feature = "faults")]
            Place::Here(_) => None,
        }
    }

    /// The same without the thread, where that is better; else the job is given back.
    fn transact_at_once<T, J: FnOnce(&Transaction<'_>) -> Result<T, StoreError>>(
        &self,
        job: J,
    ) -> Result<Result<T, StoreError>, J> {
        let Some(shared) = self.shared() else { return Err(job) };
        let Some(mut connection) = shared.at_once() else { return Err(job) };
        let begun = Instant::now();
        let transaction = match turn::begin_if_free(&mut connection) {
            Ok(Some(transaction)) => transaction,
            // Another process has it; the thread waits for that.
            Ok(None) => {
                shared.others().met = Some(begun);
                return Err(job);
            }
            Err(error) => return Ok(Err(store_error(error))),
        };
        let done = caught(|| finish(transaction, job)).unwrap_or_else(|| Err(stopped()));
        drop(connection);
        shared.took(begun.elapsed(), false);
        if shared.log.is_long() {
            // The thread sees to it.
            shared.push(false, Box::new(|_| ()));
        }
        Ok(done)
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
        shared.push(urgent, job);
        result.await.map_err(|_| stopped())?
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

fn stopped() -> StoreError {
    StoreError::Unavailable("the writer stopped".to_owned())
}

/// Runs a job. A panic in it is a bug of ours, but must not take the store down: the transaction is rolled back when it is dropped.
fn caught<T>(job: impl FnOnce() -> T) -> Option<T> {
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
    if done.is_err() {
        tracing::error!("a database job panicked; its transaction was rolled back");
    }
    done.ok()
}

fn work(shared: &Shared, hints: Option<&Hints>) {
    // A job that panicked has rolled its transaction back.
    let connection = || shared.connection.lock().unwrap_or_else(PoisonError::into_inner);
    let mut version = data_version(&connection());
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
                let courtesy = shared.others().courtesy(Instant::now());
                if let Some(pause) = courtesy {
                    std::thread::sleep(pause);
                }
                let mut connection = connection();
                let begun = Instant::now();
                // Whoever waits for one that panicked is told, because the reply is dropped.
                let (_, met) = turn::watched(|| caught(|| job(&mut connection)));
                shared.took(begun.elapsed(), met);
                shared.log.keep_short(&connection);
            }
            None => {
                let seen = data_version(&connection());
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

#[cfg(test)]
mod tests {
    use super::super::prepare;
    use super::*;

    /// A writer on a new file, and the file.
    fn writer() -> (Writer, tempfile::TempDir) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut connection = Connection::open(folder.path().join("w.db")).expect("opens");
        let log = prepare(&mut connection, 1_024).expect("prepares");
        connection.execute_batch("CREATE TABLE t (x)").expect("made");
        (Writer::start(connection, log, None).expect("starts"), folder)
    }

    /// Writes a row, and gives whether the thread did.
    async fn by_the_thread(writer: &Writer) -> bool {
        let job = |transaction: &Transaction<'_>| {
            transaction.execute("INSERT INTO t VALUES (1)", ()).map_err(store_error)?;
            Ok(std::thread::current().name() == Some("longhaul-sqlite"))
        };
        writer.transact(false, job).await.expect("written")
    }

    async fn sleeps(writer: &Writer, time: Duration) {
        let job = move |_: &Transaction<'_>| {
            std::thread::sleep(time);
            Ok(())
        };
        writer.transact(false, job).await.expect("slept");
    }

    /// Makes the writer forget what was slow.
    fn forget(writer: &Writer) {
        let shared = writer.shared().expect("it has a thread");
        // Only when the thread is done with what it did last.
        let _free = shared.connection.lock().expect("whole");
        shared.wary.store(0, Ordering::Relaxed);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_finds_nothing_before_it_is_done_at_once_and_after_something_slow_by_the_thread() {
        let (writer, _folder) = writer();
        for _ in 0..2 {
            // Not while the thread looks for what other processes wrote.
            let mut tries = 0;
            while by_the_thread(&writer).await {
                tries += 1;
                assert!(tries < 100, "the thread does everything");
                forget(&writer);
            }
            sleeps(&writer, QUICK * 3).await;
            assert!(by_the_thread(&writer).await);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_process_that_always_has_something_to_write_lets_another_have_its_turns() {
        let (busy, folder) = writer();
        let mut connection = Connection::open(folder.path().join("w.db")).expect("opens");
        let log = prepare(&mut connection, 1_024).expect("prepares");
        let other = Writer::start(connection, log, None).expect("starts");
        let (busy, turns) = (Arc::new(busy), Arc::new(AtomicU32::new(0)));
        let mut writing = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (busy, turns) = (Arc::clone(&busy), Arc::clone(&turns));
            writing.spawn(async move {
                loop {
                    sleeps(&busy, Duration::from_millis(1)).await;
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut passed = Vec::new();
        for _ in 0..60 {
            let before = turns.load(Ordering::Relaxed);
            sleeps(&other, Duration::from_millis(1)).await;
            passed.push(turns.load(Ordering::Relaxed) - before);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        passed.sort_unstable();
        assert!(passed[30] <= 4, "turns of the busy one while the other waited: {passed:?}");
    }

    #[test]
    fn others_are_let_look_only_right_after_a_turn_and_when_they_wanted_one_lately() {
        let now = Instant::now();
        let ago = |time: Duration| now.checked_sub(time);
        let courtesy = |met, had| Others { met, had }.courtesy(now);
        assert_eq!(courtesy(None, Some(now)), None);
        assert_eq!(courtesy(ago(LATELY / 2), Some(now)), Some(COURTESY));
        assert_eq!(courtesy(ago(LATELY / 2), ago(COURTESY / 2)), Some(COURTESY / 2));
        assert_eq!(courtesy(ago(LATELY / 2), ago(COURTESY)), None);
        assert_eq!(courtesy(ago(LATELY), Some(now)), None);
    }

    #[tokio::test]
    async fn where_nobody_else_could_go_on_the_thread_does_it() {
        let (writer, _folder) = writer();
        assert!(by_the_thread(&writer).await);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn another_process_is_waited_for_by_the_thread() {
        let (writer, folder) = writer();
        let mut other = Connection::open(folder.path().join("w.db")).expect("opens");
        let turn = other.transaction_with_behavior(TransactionBehavior::Immediate).expect("begins");
        let writing = by_the_thread(&writer);
        tokio::pin!(writing);
        // Asked once, it has neither waited where it was asked (that would be for ten seconds) nor given up.
        let begun = Instant::now();
        let waits =
            std::future::poll_fn(|cx| std::task::Poll::Ready(writing.as_mut().poll(cx).is_pending())).await;
        assert!(waits && begun.elapsed() < Duration::from_secs(5));
        turn.commit().expect("ends");
        assert!(writing.await);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_job_that_panics_is_told_of_and_the_next_is_done() {
        let (writer, _folder) = writer();
        for _ in 0..2 {
            let job = |transaction: &Transaction<'_>| -> Result<(), StoreError> {
                transaction.execute("INSERT INTO t VALUES (2)", ()).map_err(store_error)?;
                panic!("a bug")
            };
            let told = writer.transact(false, job).await;
            assert!(matches!(told, Err(StoreError::Unavailable(_))), "{told:?}");
            // At once the first time, then by the thread.
            sleeps(&writer, QUICK * 3).await;
        }
        by_the_thread(&writer).await;
        let count = |transaction: &Transaction<'_>| {
            let count = "SELECT count(*) FROM t WHERE x = 2";
            transaction.query_row(count, (), |row| row.get::<_, i64>(0)).map_err(store_error)
        };
        assert_eq!(writer.transact(false, count).await.expect("counted"), 0);
    }
}
