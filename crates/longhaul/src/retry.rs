//! How long to wait before trying again.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::faults;

/// How often to try and how long to wait in between: `first`, doubled each time, at most `cap`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// Tries in all; 1 means no second try.
    pub attempts: u32,
    /// The wait before the second try.
    pub first: Duration,
    /// The longest wait.
    pub cap: Duration,
    /// Whether each wait is drawn from its own upper half, so that many tasks that failed
    /// together do not come back together.
    pub jitter: bool,
}

impl Default for RetryPolicy {
    /// Three tries, 1 s, 2 s, 4 s … at most 60 s, with jitter.
    fn default() -> Self {
        Self { attempts: 3, first: Duration::from_secs(1), cap: Duration::from_secs(60), jitter: true }
    }
}

impl RetryPolicy {
    /// One try only.
    pub fn once() -> Self {
        Self { attempts: 1, ..Self::default() }
    }

    /// The wait after `failures` failed tries, without jitter.
    pub fn ceiling(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.cap)
    }

    /// The wait after `failures` failed tries.
    pub fn delay(&self, failures: u32) -> Duration {
        let ceiling = self.ceiling(failures);
        if self.jitter { ceiling.mul_f64(faults::random_range(0.5..=1.0)) } else { ceiling }
    }

    /// Whether another try is allowed after `failures` failed ones.
    pub fn allows(&self, failures: u32) -> bool {
        failures < self.attempts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn waits_double_up_to_the_cap() {
        let policy = RetryPolicy { cap: Duration::from_secs(5), jitter: false, ..RetryPolicy::default() };
        let waits: Vec<u64> = (1..=5).map(|n| policy.delay(n).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 5, 5]);
    }

    #[test]
    fn three_attempts_are_three_tries_in_all() {
        let policy = RetryPolicy::default();
        assert!(policy.allows(2));
        assert!(!policy.allows(3));
        assert!(!RetryPolicy::once().allows(1));
    }

    proptest! {
        #[test]
        fn jitter_stays_in_the_upper_half(failures in 0u32..100) {
            let policy = RetryPolicy::default();
            let (delay, ceiling) = (policy.delay(failures), policy.ceiling(failures));
            prop_assert!(delay <= ceiling && delay >= ceiling / 2);
        }
    }
}
