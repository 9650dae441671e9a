//! Deliveries that were put off: kept by the consumer until their time has come, for brokers that cannot.
//!
//! Each of them is one of the consumer's unsettled ones, whose number is bounded. When the consumer dies, the
//! broker gives them to another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

/// What is kept, by when it is due.
pub(crate) struct Held<T>(Arc<Inner<T>>);

struct Inner<T> {
    kept: Mutex<Kept<T>>,
    changed: Notify,
}

struct Kept<T> {
    /// The number tells those of the same moment apart.
    by_time: BTreeMap<(Instant, u64), T>,
    number: u64,
    /// The consumer is gone.
    closed: bool,
}

impl<T> Clone for Held<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Held<T> {
    pub(crate) fn new() -> Self {
        let kept = Kept { by_time: BTreeMap::new(), number: 0, closed: false };
        Self(Arc::new(Inner { kept: Mutex::new(kept), changed: Notify::new() }))
    }

    fn kept(&self) -> MutexGuard<'_, Kept<T>> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps it; when the consumer is gone, drops it.
    pub(crate) fn put(&self, at: Instant, what: T) {
        let mut kept = self.kept();
        if kept.closed {
            return;
        }
        kept.number += 1;
        let number = kept.number;
        kept.by_time.insert((at, number), what);
        drop(kept);
        self.0.changed.notify_one();
    }

    /// Forgets everything: the broker gives it again.
    pub(crate) fn clear(&self) {
        let forgotten = std::mem::take(&mut self.kept().by_time);
        drop(forgotten);
    }

    /// The consumer is gone: forgets everything, also what comes later, which may hold what holds this.
    pub(crate) fn close(&self) {
        self.kept().closed = true;
        self.clear();
    }

    /// The next one whose time has come; waits for it, for ever if there is none.
    pub(crate) async fn due(&self) -> T {
        loop {
            let first = {
                let mut kept = self.kept();
                match kept.by_time.first_entry() {
                    Some(first) if first.key().0 <= Instant::now() => return first.remove(),
                    first => first.map(|first| first.key().0),
                }
            };
            match first {
                None => self.0.changed.notified().await,
                Some(at) => tokio::select! {
                    () = self.0.changed.notified() => {}
                    () = tokio::time::sleep_until(at) => {}
                },
            }
        }
    }
}
