//! Waiting for the turn to write, when another process has it.
//!
//! SQLite's own busy timeout pauses longer and longer, up to a tenth of a second. So whoever has waited longest looks most
//! seldom, and those who have just come pass by: beside a few processes that write without a pause, one waits for seconds, and
//! loses its leases meanwhile. Here everyone looks equally often; and who has just had a turn lets the others look before it
//! takes the next (`writer.rs`), so that all have the same chance.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior};

/// How long a turn is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two looks: shorter than most transactions.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// From now on this connection waits for its turns as the module says.
pub(super) fn wait_evenly(connection: &mut Connection) -> rusqlite::Result<()> {
    connection.busy_handler(Some(look_again))
}

thread_local! {
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static MOST: Cell<Duration> = const { Cell::new(PATIENCE) };
    static WAITED: Cell<bool> = const { Cell::new(false) };
}

/// Does it, and says whether a turn was waited for.
pub(super) fn watched<T>(job: impl FnOnce() -> T) -> (T, bool) {
    WAITED.set(false);
    (job(), WAITED.get())
}

/// Waits only for so long in `job`.
pub(super) fn with_patience<T>(patience: Duration, job: impl FnOnce() -> T) -> T {
    MOST.set(patience);
    let done = job();
    MOST.set(PATIENCE);
    done
}

/// Does it again and again while another process has the turn. For what SQLite does not wait for by itself: one that reads
/// already and wants to write is told at once that another one does.
pub(super) fn until_free<T>(mut job: impl FnMut() -> rusqlite::Result<T>) -> rusqlite::Result<T> {
    let since = Instant::now();
    loop {
        match job() {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                let Some(pause) = pause_after(since.elapsed(), PATIENCE) else { return Err(error) };
                std::thread::sleep(pause);
            }
            done => return done,
        }
    }
}

/// Begins a transaction, if nobody else has the turn.
pub(super) fn begin_if_free(connection: &mut Connection) -> rusqlite::Result<Option<Transaction<'_>>> {
    match with_patience(Duration::ZERO, || connection.transaction_with_behavior(TransactionBehavior::Immediate)) {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => Ok(None),
        begun => begun.map(Some),
    }
}

/// Whether to look again, after a pause. `looks` begins with 0 for each turn that is waited for.
fn look_again(looks: i32) -> bool {
    if looks == 0 {
        SINCE.set(Some(Instant::now()));
    }
    let pause = pause_after(SINCE.get().map_or(Duration::ZERO, |since| since.elapsed()), MOST.get());
    if let Some(pause) = pause {
        WAITED.set(true);
        std::thread::sleep(pause);
    }
    pause.is_some()
}

/// The pause before the next look of one who has waited for so long: the same for all; `None` when it was long enough.
fn pause_after(waited: Duration, most: Duration) -> Option<Duration> {
    (waited < most).then_some(PAUSE)
}

#[cfg(test)]
mod tests {
    use super::super::prepare;
    use super::*;

    #[test]
    fn who_has_waited_long_looks_as_often_as_who_has_just_come() {
        assert_eq!(pause_after(Duration::ZERO, PATIENCE), Some(PAUSE));
        assert_eq!(pause_after(PATIENCE - Duration::from_millis(1), PATIENCE), Some(PAUSE));
        assert_eq!(pause_after(PATIENCE, PATIENCE), None);
    }

    #[test]
    fn a_new_file_that_another_process_writes_to_is_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("new.db");
        let mut other = Connection::open(&file).expect("opens");
        let writing = other.transaction_with_behavior(TransactionBehavior::Immediate).expect("begins");
        let (tell, told) = std::sync::mpsc::channel();
        let opening = std::thread::spawn(move || {
            let mut connection = Connection::open(file).expect("opens");
            tell.send(prepare(&mut connection, 1_024).map(|_| ())).expect("someone hears it");
        });
        let early = told.recv_timeout(Duration::from_millis(100));
        assert!(early.is_err(), "it is not open while another one writes: {early:?}");
        writing.commit().expect("commits");
        told.recv().expect("it ends").expect("the store opens");
        opening.join().expect("it ends");
    }

    #[test]
    fn a_store_does_not_wait_as_sqlite_does_by_itself() {
        let mut connection = Connection::open_in_memory().expect("opens");
        prepare(&mut connection, 1_024).expect("prepares");
        // SQLite's own waiting has its time here; whoever brings another way has none.
        let own: i64 = connection.query_row("PRAGMA busy_timeout", (), |row| row.get(0)).expect("answers");
        assert_eq!(own, 0);
    }
}
