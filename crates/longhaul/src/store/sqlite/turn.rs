//! Waiting for the turn to write, when another process has it.
//!
//! SQLite's own busy timeout pauses longer and longer, up to a tenth of a second. So whoever has waited longest looks most
//! seldom, and those who have just come pass by: beside a few processes that write without a pause, one waits for seconds, and
//! loses its leases meanwhile. Here everyone looks equally often, and has the same chance at each turn.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rusqlite::Connection;

/// How long a turn is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two looks: shorter than most transactions.
const PAUSE: Duration = Duration::from_millis(1);

/// From now on this connection waits for its turns as the module says.
pub(super) fn wait_evenly(connection: &mut Connection) -> rusqlite::Result<()> {
    connection.busy_handler(Some(look_again))
}

/// Whether to look again, after a pause. `looks` begins with 0 for each turn that is waited for.
fn look_again(looks: i32) -> bool {
    thread_local! {
        static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    if looks == 0 {
        SINCE.set(Some(Instant::now()));
    }
    let waits_on = SINCE.get().is_none_or(|since| since.elapsed() < PATIENCE);
    if waits_on {
        std::thread::sleep(PAUSE);
    }
    waits_on
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rusqlite::TransactionBehavior;

    use super::super::prepare;
    use super::*;

    /// What is too long for a turn.
    const ENOUGH: Duration = Duration::from_millis(750);

    /// The longest of so many turns, beside others who write without a pause.
    fn longest(turns: usize, others: usize) -> Duration {
        let folder = tempfile::tempdir().expect("a folder");
        let open = || {
            let mut connection = Connection::open(folder.path().join("t.db")).expect("opens");
            prepare(&mut connection, 1_024).expect("prepares");
            connection
        };
        let over = AtomicBool::new(false);
        let mut own = open();
        std::thread::scope(|scope| {
            for _ in 0..others {
                let (mut other, over) = (open(), &over);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let turn = other.transaction_with_behavior(TransactionBehavior::Immediate);
                        let Ok(turn) = turn else { continue };
                        // As long as a transaction that is synced.
                        std::thread::sleep(Duration::from_millis(3));
                        turn.rollback().expect("rolls back");
                    }
                });
            }
            let mut longest = Duration::ZERO;
            for _ in 0..turns {
                let begun = Instant::now();
                let turn = own.transaction_with_behavior(TransactionBehavior::Immediate);
                // One that never came has taken as long as that; the others must end before anything can fail here.
                let came = turn.and_then(|turn| turn.rollback()).is_ok();
                longest = longest.max(begun.elapsed());
                if !came || longest > ENOUGH {
                    break;
                }
            }
            over.store(true, Ordering::Relaxed);
            longest
        })
    }

    #[test]
    fn a_turn_comes_soon_beside_others_who_write_without_a_pause() {
        let longest = longest(60, 4);
        assert!(longest <= ENOUGH, "{longest:?}");
    }
}
