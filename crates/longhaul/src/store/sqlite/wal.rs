//! The write-ahead log, and when it is copied into the database: after a commit, by the writer's thread.
//!
//! SQLite by itself does so at every commit once the log is long, and begins the log anew in a moment in which nobody reads it. Where
//! several processes always read there is no such moment: every commit pays for a copy, and the log grows without end. Here it is
//! copied each so many pages; and if it still grows, a commit waits a moment for those who read the log, while new readers
//! already read the database.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use rusqlite::Connection;
use rusqlite::hooks::Wal;

use super::turn;

/// The pages of a long log: it is copied.
const LONG: i32 = 4_000;
/// It is copied again after so many more.
const AGAIN: i32 = 1_000;
/// The pages of a log that is too long: readers are waited for.
const TOO_LONG: i32 = 16_000;
/// For how long.
const PATIENCE: Duration = Duration::from_millis(100);
/// The largest file that is kept for a log that began anew.
const MOST_KEPT_BYTES: i64 = 64 << 20;

/// See the module.
#[derive(Clone, Default)]
pub(super) struct Log {
    /// How long it was after the last commit of this process.
    pages: Arc<AtomicI32>,
    /// How long it was when it was copied last.
    copied_at: Arc<AtomicI32>,
}

impl Log {
    /// The log of what this connection writes.
    pub(super) fn of(connection: &mut Connection) -> rusqlite::Result<Self> {
        connection.execute_batch("PRAGMA wal_autocheckpoint = 0")?;
        connection.pragma_update(None, "journal_size_limit", MOST_KEPT_BYTES)?;
        let log = Self::default();
        let pages = Arc::clone(&log.pages);
        connection.wal_hook(Some(move |_: &mut Wal, now: i32| {
            pages.store(now, Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(log)
    }

    /// Whether something is to be done about it.
    pub(super) fn is_long(&self) -> bool {
        let (pages, copied_at) = (self.pages.load(Ordering::Relaxed), self.copied_at.load(Ordering::Relaxed));
        next(pages, copied_at).is_some()
    }

    /// Does it.
    pub(super) fn keep_short(&self, connection: &Connection) {
        let (pages, copied_at) = (self.pages.load(Ordering::Relaxed), self.copied_at.load(Ordering::Relaxed));
        let Some(pragma) = next(pages, copied_at) else { return };
        self.copied_at.store(pages, Ordering::Relaxed);
        // What was committed stays so, whatever comes of this; it is tried again.
        let _ = turn::with_patience(PATIENCE, || connection.query_row(pragma, (), |_| Ok(())));
    }
}

/// What is done with a log of so many pages, that had `copied_at` when it was copied last.
fn next(pages: i32, copied_at: i32) -> Option<&'static str> {
    // One that is shorter than it was has begun anew.
    if pages < LONG || (copied_at..copied_at + AGAIN).contains(&pages) && copied_at > 0 {
        return None;
    }
    Some(if pages < TOO_LONG { "PRAGMA wal_checkpoint(PASSIVE)" } else { "PRAGMA wal_checkpoint(RESTART)" })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::super::prepare;
    use super::*;

    #[test]
    fn a_log_is_copied_when_it_is_long_and_after_each_part_that_is_added() {
        let at = |pages, copied_at| next(pages, copied_at).map(|pragma| pragma.contains("RESTART"));
        assert_eq!([at(10, 0), at(3_999, 0), at(4_100, 0)], [None, None, Some(false)]);
        assert_eq!([at(4_100, 4_100), at(5_099, 4_100), at(5_100, 4_100)], [None, None, Some(false)]);
        assert_eq!([at(16_500, 15_100), at(17_000, 16_500), at(17_500, 16_500)], [Some(true), None, Some(true)]);
        // It began anew.
        assert_eq!([at(12, 17_500), at(4_000, 17_500)], [None, Some(false)]);
    }

    #[test]
    fn a_log_stays_short_although_someone_always_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.db");
        let mut writer = Connection::open(&path).expect("opens");
        let log = prepare(&mut writer, 1_024).expect("prepares");
        writer.execute_batch("CREATE TABLE t (n INTEGER PRIMARY KEY, x BLOB)").expect("made");
        let (done, begun) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        // Each ends its read when another has begun a later one.
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let (path, done, begun) = (path.clone(), Arc::clone(&done), Arc::clone(&begun));
                std::thread::spawn(move || {
                    let reader = Connection::open(path).expect("opens");
                    while !done.load(Ordering::SeqCst) {
                        reader.execute_batch("BEGIN; SELECT count(*) FROM t").expect("reads");
                        let own = begun.fetch_add(1, Ordering::SeqCst);
                        while begun.load(Ordering::SeqCst) <= own + 1 && !done.load(Ordering::SeqCst) {
                            std::thread::yield_now();
                        }
                        reader.execute_batch("COMMIT").expect("ends");
                    }
                })
            })
            .collect();
        let mut longest = 0;
        for number in 0..600 {
            let insert = "INSERT INTO t VALUES (?1, randomblob(400000)) ON CONFLICT DO UPDATE SET x = excluded.x";
            writer.execute(insert, [number % 7]).expect("written");
            log.keep_short(&writer);
            let file = path.with_extension("db-wal").metadata().expect("there");
            longest = longest.max(file.len() / 4_096);
        }
        done.store(true, Ordering::SeqCst);
        for reader in readers {
            reader.join().expect("read");
        }
        // 60,000 pages were written.
        assert!(longest < 20_000, "the log had {longest} pages");
    }
}
