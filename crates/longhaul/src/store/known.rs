//! What a process knows for a moment, so that not every submit has to ask the database for it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// See the module.
#[derive(Debug)]
pub(crate) struct Known<T>(Mutex<Option<(Instant, T)>>);

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone> Known<T> {
    /// How long it is taken to be so.
    const AGE: Duration = Duration::from_millis(500);

    /// What is known; `None` when it has to be found out again.
    pub(crate) fn get(&self) -> Option<T> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        known.filter(|(at, _)| at.elapsed() < Self::AGE).map(|(_, known)| known)
    }

    pub(crate) fn learn(&self, known: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), known));
    }

    pub(crate) fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
