//! What is set for queues and limits, and how queues and workers look from outside.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

/// A worker as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerInfo {
    /// Its id, new at every start.
    pub id: Uuid,
    /// A name for people: host and process.
    pub name: String,
    /// What it can run.
    pub handlers: Vec<String>,
    /// The queues it serves.
    pub queues: Vec<String>,
    /// How many tasks it runs at once.
    pub slots: u32,
    /// When it started, microseconds.
    pub started_at: i64,
    /// When it was last heard of, microseconds.
    pub seen_at: i64,
    /// How many tasks it holds.
    pub running: u32,
}

impl WorkerInfo {
    /// A worker that was silent for this long (six heartbeats), microseconds, is not counted on.
    pub(crate) const SILENT: i64 = 30_000_000;

    /// Whether it may be gone: it has not been heard of for six heartbeats.
    pub fn is_silent(&self, now: i64) -> bool {
        now - self.seen_at >= Self::SILENT
    }
}

/// Bounds and periods that the store enforces.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Per queue.
    pub queues: BTreeMap<String, QueueSettings>,
    /// How many tasks of a tenant may run at once.
    pub tenant_max_running: BTreeMap<String, u32>,
    /// How many tasks with a concurrency key may run at once, by key; 1 for keys not named.
    pub key_max_running: BTreeMap<String, u32>,
    /// Finished tasks are removed after this time (`Duration::MAX` keeps them); `None` leaves it
    /// as it was set before. Without any setting they are kept.
    pub retention: Option<Duration>,
}

/// Bounds of a queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueSettings {
    /// Pending tasks it accepts.
    pub max_pending: u64,
    /// Tasks of it that may run at once; `None` for no bound.
    pub max_running: Option<u32>,
    /// How much waiting one step of priority is worth.
    pub ageing: Duration,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self { max_pending: 10_000, max_running: None, ageing: Duration::from_secs(86_400) }
    }
}

/// A queue as others see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueueInfo {
    /// Its name.
    pub name: String,
    /// Tasks in it that wait to be run, now or later.
    pub pending: u64,
    /// Tasks of it that run.
    pub running: u64,
    /// The bound on `pending`.
    pub max_pending: u64,
    /// The bound on `running`.
    pub max_running: Option<u32>,
    /// When the ready task at the head of its line was accepted, microseconds.
    pub oldest: Option<i64>,
    /// Whether its tasks are not started for now.
    pub paused: bool,
}
