//! Faults on purpose, for the suite that proves the guarantees (`crates/longhaul-prove`): named points at
//! which the engine dies, fails or dawdles, a clock that is wrong, and mutants, which are defects that the suite
//! must find.
//!
//! Everything here is empty without the feature `faults`, which no release of the product has. With it, nothing
//! happens either until an environment variable says so:
//!
//! - `LONGHAUL_FAULTS=claim.before_commit=abort@3,heartbeat.begin=error@1..` is a list of point, kind and turn. A kind is
//!   `abort`, `error` or `delay:MILLISECONDS`. `@3` means the third time only, `@3..` from then on, `@3..6` the third to
//!   the sixth time, and nothing every time.
//! - `LONGHAUL_FAULTS_FIRED=PATH`: a line is appended there for each fault, before it happens, and for what the engine
//!   met that was made outside of it (a pool without a free connection).
//! - `LONGHAUL_FAULTS_CLOCK=-3600`: this process's wall clock is off by so many seconds.
//! - `LONGHAUL_FAULTS_SCHEMA=5`: this process knows no newer schema than version 5.
//! - `LONGHAUL_MUTANT=NAME`: one of [`Mutant::ALL`].
//!
//! A simulation ([`Simulation`]) needs no variables: it is begun on a thread, and from then on time, ids and chance of what
//! runs there come from its seed. Several simulated processes ([`Process`]) share one database in memory ([`Database`]), each on
//! a way of its own ([`Way`]) on which calls are lost, delayed and repeated.
//!
//! A point of the store is `OPERATION.begin` (before anything is asked of the database), `OPERATION.before_commit`
//! or `OPERATION.after_commit` (the caller does not get the answer). [`POINTS`] has all.

use crate::error::TaskError;
use crate::store::StoreError;

#[cfg(feature = "faults")]
mod on;
#[cfg(feature = "faults")]
mod process;
#[cfg(feature = "faults")]
mod simulation;
#[cfg(feature = "faults")]
mod unreliable;
#[cfg(feature = "faults")]
mod way;

#[cfg(not(feature = "faults"))]
pub(crate) use off::{
    Operation, after, around, at, clock_micros, committing, is, met, newest_schema, now_v7, of_process,
    random_range, simulated_boot, simulated_wall,
};
#[cfg(feature = "faults")]
pub use on::POINTS;
#[cfg(feature = "faults")]
pub(crate) use on::{Operation, after, around, at, clock_micros, committing, is, met, newest_schema};
#[cfg(feature = "faults")]
pub use process::Process;
#[cfg(feature = "faults")]
pub(crate) use process::of_process;
#[cfg(feature = "faults")]
pub use simulation::{Simulation, simulated_boot};
#[cfg(feature = "faults")]
pub(crate) use simulation::{now_v7, random_range, simulated_wall};
#[cfg(feature = "faults")]
pub use unreliable::Database;
#[cfg(feature = "faults")]
pub use way::{Fault, Odds, Way};

/// A defect that the suite must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "faults"),
    allow(dead_code, unreachable_pub, reason = "only named where the real checks stand")
)]
pub enum Mutant {
    /// A commit is taken whatever fence it comes with.
    FenceNotChecked,
    /// Events are written after the transaction that they tell of. SQLite.
    EventApart,
    /// The step completed first is undone first.
    UndoForward,
    /// A claim counts by what limits were before it locked them. PostgreSQL.
    LimitReadThenWrite,
    /// A worker takes its leases for extended without a word to the store.
    HeartbeatIgnored,
    /// Equal submits do not wait for each other. PostgreSQL.
    IdempotencyReadThenWrite,
    /// Leases are measured by each process's own clock. PostgreSQL.
    LeaseByLocalClock,
    /// The log of all tasks is read up to the newest place, whatever is still under way before it. PostgreSQL.
    OutboxByCursor,
    /// An approval counts whatever the one who gave it saw.
    ApprovalUnbound,
    /// A task completes although its cancel was acknowledged.
    CancelLost,
}

/// What each function does is said in `faults/on.rs`; without the feature, none does anything.
#[cfg(not(feature = "faults"))]
mod off {
    use std::future::{Ready, ready};
    use std::ops::RangeInclusive;

    use uuid::Uuid;

    use super::{Mutant, StoreError, TaskError};

    #[inline(always)]
    pub(crate) fn simulated_wall() -> Option<i64> {
        None
    }

    #[inline(always)]
    pub(crate) fn simulated_boot() -> Option<i64> {
        None
    }

    #[inline(always)]
    pub(crate) fn now_v7() -> Uuid {
        Uuid::now_v7()
    }

    #[inline(always)]
    pub(crate) fn random_range(range: RangeInclusive<f64>) -> f64 {
        rand::random_range(range)
    }

    #[inline(always)]
    pub(crate) fn of_process<F: Future>(future: F) -> F {
        future
    }

    #[inline(always)]
    pub(crate) fn is(_: Mutant) -> bool {
        false
    }

    #[inline(always)]
    pub(crate) fn clock_micros() -> i64 {
        0
    }

    #[inline(always)]
    pub(crate) fn newest_schema() -> i64 {
        i64::MAX
    }

    #[inline(always)]
    pub(crate) fn met(_: &'static str) {}

    #[inline(always)]
    pub(crate) fn around<F: Future>(_: &'static str, call: F) -> F {
        call
    }

    #[inline(always)]
    pub(crate) fn at(_: &'static str) -> Ready<Result<(), StoreError>> {
        ready(Ok(()))
    }

    #[inline(always)]
    pub(crate) fn after<T>(_: &'static str, outcome: Result<T, TaskError>) -> Ready<Result<T, TaskError>> {
        ready(outcome)
    }

    #[inline(always)]
    pub(crate) fn committing() -> Ready<Result<(), StoreError>> {
        ready(Ok(()))
    }

    pub(crate) struct Operation;

    impl Operation {
        #[inline(always)]
        pub(crate) fn current() -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) fn committing(&self) -> Result<(), StoreError> {
            Ok(())
        }
    }
}
