//! Overview: what stands where, for those who run the thing; and pausing queues.

use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;

use uuid::Uuid;

use super::{Cancel, QueueInfo, StoreError, WorkerInfo};
use crate::task::TaskId;

/// Up to how many tasks of a state are counted where no index knows their number.
pub const COUNTED: u64 = 10_000;

/// Up to how many tasks ahead of another are counted.
pub(crate) const AHEAD: u64 = 1_000;

/// What operators ask of a store.
#[async_trait]
pub trait OverviewStore: Send + Sync {
    /// Lets the tasks of a queue rest (`by` says who asked), or go on. Tasks that run go on either way.
    /// Says whether that changed anything.
    async fn pause_queue(&self, queue: &str, pause: bool, by: &str) -> Result<bool, StoreError>;

    /// Every handler that some worker once had: its name and when it was first seen, microseconds.
    async fn handlers(&self) -> Result<Vec<(String, i64)>, StoreError>;

    /// What is known of where a task stands beside the task itself; `lock` is the stored name of the lock
    /// it waits for.
    async fn facts(&self, task: TaskId, lock: Option<&str>) -> Result<Option<Facts>, StoreError>;

    /// How many tasks of a tenant are in each state, see [`StateCounts`].
    async fn count_states(&self, tenant: &str) -> Result<StateCounts, StoreError>;
}

/// How many tasks of a tenant are in each state. Exact while there are fewer than [`COUNTED`] tasks; beyond
/// that every number but `running` is "at least so many", so that counting never walks a whole history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StateCounts {
    /// In the queue.
    pub pending: u64,
    /// Leased by a worker; always exact.
    pub running: u64,
    /// Suspended.
    pub waiting: u64,
    /// Ended well, and still kept.
    pub completed: u64,
    /// Ended with an error, and still kept.
    pub failed: u64,
    /// Ended by request, and still kept.
    pub cancelled: u64,
    /// Whether some number is only "at least".
    pub bounded: bool,
}

impl StateCounts {
    /// From the numbers by state among the newest `of` tasks, and by index when those were not all.
    pub(crate) fn from_counts(newest: [u64; 6], of: u64, indexed: Option<[u64; 5]>) -> Self {
        let [pending, running, waiting, completed, failed, cancelled] = newest;
        let counts = Self { pending, running, waiting, completed, failed, cancelled, bounded: of >= COUNTED };
        // Both are "at least" for what is bounded.
        match indexed {
            None => counts,
            Some([pending, running, waiting, failed, cancelled]) => Self {
                pending: counts.pending.max(pending),
                running,
                waiting: counts.waiting.max(waiting),
                failed: counts.failed.max(failed),
                cancelled: counts.cancelled.max(cancelled),
                ..counts
            },
        }
    }
}

/// Where a task stands, in detail. Times are microseconds of the store's clock.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub(crate) now: i64,
    /// Not to be started before.
    pub(crate) run_at: Option<i64>,
    /// The limit that holds it back, by its stored name.
    pub(crate) parked: Option<String>,
    /// That limit: how many may run, how many do.
    pub(crate) limit: Option<(u64, u64)>,
    /// Some of the tenant's tasks that count in it.
    pub(crate) holders: Vec<TaskId>,
    /// Ready tasks for the same handler that come first in its queue, up to [`AHEAD`].
    pub(crate) ahead: u64,
    /// Since when its queue is paused, and by whom.
    pub(crate) paused: Option<(i64, String)>,
    /// The worker that has it.
    pub(crate) owner: Option<Uuid>,
    /// How long its lease still is.
    pub(crate) lease_left: Option<i64>,
    /// When its newest run began, if that is among its newest events.
    pub(crate) started_at: Option<i64>,
    /// The lock it waits for: who has it, and until when.
    pub(crate) lock: Option<(Option<TaskId>, Option<i64>)>,
    /// How many others come first in the line for it.
    pub(crate) lock_ahead: u64,
    /// The lock service that keeps it, or is asked for it.
    pub(crate) lock_service: Option<String>,
    /// What that said last, if it was bad news.
    pub(crate) lock_trouble: Option<String>,
    /// Who asked to cancel it, and why.
    pub(crate) cancel: Option<Cancel>,
}

/// A handler as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HandlerInfo {
    /// Its name.
    pub name: String,
    /// When a worker first had it.
    pub first_seen: Timestamp,
    /// How many workers have it now.
    pub workers: usize,
}

/// The whole at a glance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// The tenant's tasks by state.
    pub tasks: StateCounts,
    /// All queues.
    pub queues: Vec<QueueInfo>,
    /// All workers.
    pub workers: Vec<WorkerInfo>,
    /// When the task was accepted that is ready for the longest time, of those at the head of a line.
    pub oldest_ready: Option<Timestamp>,
}
