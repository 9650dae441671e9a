//! The conformance suite: what every store must do, said once and run on each of them.
//!
//! A test is an async function over a [`bed::Bed`] (a fresh store with one worker), named as a
//! sentence about behaviour, and listed in its file's `on_every_store!`. Time is moved with the
//! store's clock, never slept through. `cargo test suite` runs it; `./dev test suite` runs it
//! with a PostgreSQL of its own.

/// Makes a test of each function for each store, as `sqlite::NAME`, `memory::NAME`, `postgres::NAME`.
macro_rules! on_every_store {
    ($($test:ident),+ $(,)?) => {
        on_every_store!(@ sqlite, on_sqlite, $($test),+);
        on_every_store!(@ memory, on_memory, $($test),+);
        on_every_store!(@ postgres, on_postgres, $($test),+);
    };
    (@ $store:ident, $on:ident, $($test:ident),+) => {
        mod $store {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    crate::store::suite::bed::$on(super::$test).await;
                }
            )+
        }
    };
}

mod bed;

mod access;
mod asks;
mod checkpoint;
mod claim;
mod commit;
mod control;
mod cost;
mod family;
mod feed;
mod hostile;
mod keys;
mod lease;
mod limits;
mod lists;
mod lock;
mod locked;
mod log;
mod outbox;
mod outcome;
mod overview;
mod reads;
mod retention;
mod schedule;
mod sessions;
mod state;
mod submit;
mod subscribers;
mod sweep;
mod truth;
mod undo;
