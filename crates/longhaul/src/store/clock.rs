//! The store's clock, as this process knows it.
//!
//! Decisions about leases, timers and deadlines are made in the store, by the store's clock.
//! Here the process keeps an estimate of it (learned from every answer that carries a time), for
//! event times and for local timers. Tests can move the clock with [`Clock::advance`]; the
//! offset is then part of every question put to the store.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use jiff::Timestamp;

use crate::faults::{self, Mutant};
use crate::task::timestamp;

/// See the module.
#[derive(Debug, Default)]
pub struct Clock {
    /// Store time minus this host's wall time, microseconds.
    skew: AtomicI64,
    /// Moved by tests, microseconds.
    offset: AtomicI64,
}

impl Clock {
    /// The store's time, as far as known here.
    pub fn now(&self) -> Timestamp {
        timestamp(self.now_micros())
    }

    pub(crate) fn now_micros(&self) -> i64 {
        wall_micros() + self.skew.load(Ordering::Relaxed) + self.offset()
    }

    /// Moves the clock of this handle forward; for tests.
    pub fn advance(&self, by: Duration) {
        self.offset.fetch_add(micros(by), Ordering::Relaxed);
    }

    /// What tests have moved the clock by, microseconds.
    pub(crate) fn offset(&self) -> i64 {
        let local = if faults::is(Mutant::LeaseByLocalClock) { faults::clock_micros() } else { 0 };
        self.offset.load(Ordering::Relaxed) + local
    }

    /// Takes over a time the store has just given. `offset` is the one it was asked with, which may
    /// have been moved meanwhile.
    pub(crate) fn learn(&self, store_now: i64, offset: i64) {
        self.skew.store(store_now - offset - wall_micros(), Ordering::Relaxed);
    }
}

/// This host's wall clock, microseconds.
pub(crate) fn wall_micros() -> i64 {
    faults::simulated_wall().unwrap_or_else(|| Timestamp::now().as_microsecond() + faults::clock_micros())
}

/// A duration in microseconds, bounded so that adding it to a time cannot overflow.
pub(crate) fn micros(duration: Duration) -> i64 {
    const CENTURY: i64 = 100 * 366 * 86_400 * 1_000_000;
    i64::try_from(duration.as_micros()).unwrap_or(CENTURY).min(CENTURY)
}

/// The host's boot clock, microseconds: leases on SQLite are measured by it, because the wall clock
/// can be set while a worker runs.
pub(crate) fn boot_micros() -> i64 {
    if let Some(simulated) = faults::simulated_boot() {
        return simulated;
    }
    #[cfg(target_os = "linux")]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        time.tv_sec * 1_000_000 + time.tv_nsec / 1_000
    }
    #[cfg(not(target_os = "linux"))]
    {
        wall_micros()
    }
}

/// Which start of the host this is: a reboot ends every worker, and its boot clock begins anew.
pub(crate) fn boot_id() -> String {
    if !cfg!(target_os = "linux") {
        return String::new();
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}
