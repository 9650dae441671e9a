//! The write-ahead log, and when it is copied into the database: whoever commits does that, after its commit.
//!
//! SQLite by itself does so at every commit once the log is long, and begins the log anew in a moment in which nobody reads it. Where
//! several processes always read there is no such moment: every commit pays for a copy, and the log grows without end. Here it is
//! copied each so many pages; and if it still grows, a commit waits a moment for those who read the log, while new readers
//! already read the database.

use std::time::Duration;

use rusqlite::Connection;
use rusqlite::hooks::Wal;
use rusqlite::wal::CheckpointMode;

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

/// From now on the log is kept as the module says by this connection.
pub(super) fn keep_short(connection: &mut Connection) -> rusqlite::Result<()> {
    connection.execute_batch("PRAGMA wal_autocheckpoint = 0")?;
    connection.pragma_update(None, "journal_size_limit", MOST_KEPT_BYTES)?;
    let mut copied_at = 0;
    connection.wal_hook(Some(move |wal: &mut Wal, pages: i32| {
        if let Some(mode) = next(pages, &mut copied_at) {
            // The commit has happened, whatever comes of this; another one tries again.
            let _ = turn::with_patience(PATIENCE, || wal.checkpoint_v2(mode));
        }
        Ok(())
    }))
}

/// What is done with a log of so many pages; `copied_at` is how many it had when it was copied last.
fn next(pages: i32, copied_at: &mut i32) -> Option<CheckpointMode> {
    if pages < *copied_at {
        *copied_at = 0;
    }
    if pages < LONG || (*copied_at > 0 && pages - *copied_at < AGAIN) {
        return None;
    }
    *copied_at = pages;
    Some(if pages < TOO_LONG { CheckpointMode::PASSIVE } else { CheckpointMode::RESTART })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::super::prepare;
    use super::*;

    #[test]
    fn a_log_is_copied_when_it_is_long_and_after_each_part_that_is_added() {
        let mut copied_at = 0;
        let mut at = |pages| next(pages, &mut copied_at).map(|mode| matches!(mode, CheckpointMode::RESTART));
        assert_eq!([at(10), at(3_999), at(4_100), at(4_200), at(5_099)], [None, None, Some(false), None, None]);
        assert_eq!([at(5_100), at(16_500), at(17_000), at(17_500)], [Some(false), Some(true), None, Some(true)]);
        // It began anew.
        assert_eq!([at(12), at(3_000), at(4_000)], [None, None, Some(false)]);
    }

    #[test]
    fn a_log_stays_short_although_someone_always_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.db");
        let mut writer = Connection::open(&path).expect("opens");
        prepare(&mut writer, 1_024).expect("prepares");
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
            let log = path.with_extension("db-wal").metadata().expect("there");
            longest = longest.max(log.len() / 4_096);
        }
        done.store(true, Ordering::SeqCst);
        for reader in readers {
            reader.join().expect("read");
        }
        // 60,000 pages were written.
        assert!(longest < 20_000, "the log had {longest} pages");
    }
}
