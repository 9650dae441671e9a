//! The store's clock, as this process knows it.
//!
//! Decisions about leases, timers and deadlines are made in the store, by the store's clock.
//! Here the process keeps an estimate of it (learned from every answer that carries a time), for
//! event times and for local timers. Tests can move the clock with [`Clock::advance`]; the
//! offset is then part of every question put to the store.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

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

    /// A question whose answer will carry the store's time.
    pub(crate) fn ask(&self) -> Asked<'_> {
        Asked { clock: self, offset: self.offset(), at: Instant::now() }
    }
}

/// See [`Clock::ask`].
pub(crate) struct Asked<'a> {
    clock: &'a Clock,
    /// What tests had moved the clock by; they may move it again before the answer.
    pub(crate) offset: i64,
    at: Instant,
}

impl Asked<'_> {
    /// Takes over the time in the answer. It was read at some moment since the question, so an estimate that fits any of
    /// these moments is as good as before, and any other is set anew, by the moment of the answer, so that it is rather
    /// behind than ahead: an answer that took long says little.
    pub(crate) fn answered(&self, store_now: i64) {
        self.fit(store_now - self.offset - wall_micros(), micros(self.at.elapsed()));
    }

    /// The skew was at least `least`, and at most `slack` more.
    fn fit(&self, least: i64, slack: i64) {
        let known = self.clock.skew.load(Ordering::Relaxed);
        if !(least..=least + slack).contains(&known) {
            self.clock.skew.store(least, Ordering::Relaxed);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_answer_moves_the_clock_no_further_than_it_must() {
        let clock = Clock::default();
        let skew = || clock.skew.load(Ordering::Relaxed);
        let asked = clock.ask();
        asked.fit(500_000, 2_000);
        assert_eq!(skew(), 500_000, "the first answer sets it");
        asked.fit(-12_500_000, 13_000_000);
        assert_eq!(skew(), 500_000, "13 s on the way: the store's time may have been read at any moment of it");
        asked.fit(480_000, 1_000);
        assert_eq!(skew(), 480_000, "a quick answer says more than the estimate");
        asked.fit(482_000, 40_000);
        assert_eq!(skew(), 482_000);
    }

    #[test]
    fn an_answer_is_measured_from_its_question() {
        let clock = Clock::default();
        let mut asked = clock.ask();
        asked.answered(wall_micros() + 60_000_000);
        let ahead = clock.now_micros() - wall_micros();
        assert!((50_000_000..=60_000_000).contains(&ahead), "{ahead}");
        // Asked two minutes ago, read then: it says nothing against a clock that is a minute ahead.
        asked.at = Instant::now().checked_sub(Duration::from_secs(120)).expect("this host runs for longer");
        asked.answered(wall_micros() - 59_000_000);
        assert!((50_000_000..=61_000_000).contains(&(clock.now_micros() - wall_micros())));
    }
}
