//! The store: where tasks live. One trait of few methods, each one transaction, each taking a
//! batch; SQLite and PostgreSQL behind it.
//!
//! What holds for every method:
//! - It is one transaction: after an error of the whole call nothing of it happened, or, when
//!   the connection broke during COMMIT ([`StoreError::Unavailable`]), all of it may have.
//!   Repeating the same call is then safe: every entry is idempotent under ids made by the
//!   caller.
//! - Entries of a batch are independent: one that is refused does not hurt the others.
//! - Times are the store's clock, never the caller's (see `clock.rs`).
//!
//! `batch.rs` gathers single requests into these batches; `rules.rs` holds the decisions both
//! stores share; `postgres/` and `sqlite/` hold the SQL.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::error::TaskError;
use crate::event::{LogEntry, LogRow};
use crate::record::UndoOn;
use crate::schedule::{MAX_SCHEDULES, Schedule};
use crate::state::{AgentState, StateChange};
use crate::task::{Invalid, NewTask, Phase, State, Task, TaskId, Waiting};

pub mod access;
pub mod ask;
pub mod backup;
pub(crate) mod batch;
pub(crate) mod clock;
pub mod control;
pub mod feed;
pub mod floor;
pub(crate) mod hints;
pub mod inspect;
pub(crate) mod known;
pub mod list;
pub(crate) mod locks;
pub(crate) mod migrate;
pub(crate) mod news;
pub mod outbox;
pub mod overview;
pub(crate) mod postgres;
pub(crate) mod rules;
pub mod sessions;
pub mod settings;
pub(crate) mod sqlite;
pub mod subscribers;
#[cfg(test)]
mod suite;

pub use access::{AccessStore, NewToken, Role, TokenInfo};
pub use ask::{Ask, AskChange, AskKind, AskStatus, NewAsk};
pub use backup::BackupStore;
pub use clock::Clock;
pub use control::{Action, Cancel, Control, ControlRefused, Controlled};
pub use feed::FeedStore;
pub use floor::Floor;
pub use hints::Hints;
pub use inspect::{Inspected, inspect};
pub use list::{Filter, Page};
pub use outbox::{Delivery, DeliveryStatus, OutboxStats, OutboxStore};
pub use overview::{HandlerInfo, OverviewStore, StateCounts, Stats};
pub use sessions::{LockInfo, SessionStore};
pub use settings::{QueueInfo, QueueSettings, Settings, WorkerInfo};
pub use subscribers::{SubscriberInfo, SubscriberStore};

/// Durable storage of tasks.
#[async_trait]
pub trait Store:
    AccessStore
    + BackupStore
    + FeedStore
    + OutboxStore
    + OverviewStore
    + SessionStore
    + SubscriberStore
    + Send
    + Sync
    + 'static
{
    /// Accepts tasks: row, first log row (event `task.submitted`, input) and idempotency key
    /// together. After it returns, an accepted task is on disk. An entry whose key or digest
    /// (within its window) is known gives the existing task.
    async fn submit(&self, batch: &[NewTask]) -> Result<Vec<Result<Accepted, SubmitRefused>>, StoreError>;

    /// Leases up to `ask.max` ready tasks, lowest rank first, within all limits. Each lease has
    /// a fence larger than any the task had before, and a `task.started` event. Two callers
    /// never get the same task. Repeating a claim with the same number gives the same leases.
    async fn claim(&self, ask: &Claim) -> Result<Claimed, StoreError>;

    /// Writes what runs have done. An entry is accepted only under the current fence; see
    /// [`CommitRefused`] for the other reasons to refuse. After it returns, the records are on
    /// disk and will be replayed. No two entries of a batch may be for the same task.
    async fn commit(&self, batch: &[Commit]) -> Result<Vec<Result<Committed, CommitRefused>>, StoreError>;

    /// Extends leases and says which are lost or cancelled. Has a way of its own to the
    /// database, so that it is never behind a queue of commits.
    async fn heartbeat(&self, beat: &Heartbeat) -> Result<Beats, StoreError>;

    /// Does what people and other programs ask of tasks: cancel, resume, decide, …
    async fn control(&self, batch: &[Control]) -> Result<Vec<Result<Controlled, ControlRefused>>, StoreError>;

    /// Asks for a lock, or gives one back, for a run under its fence. What comes of it, now or
    /// later, arrives in the task's log, in the transaction that changes the lock: a lock is given
    /// to one task at a time, to who asked first, with a token larger than any before. Repeating a
    /// change under the same address does nothing more. Not a batch: who wants the same lock
    /// waits for each other anyway.
    async fn lock(&self, change: &LockChange) -> Result<Result<Locked, CommitRefused>, StoreError>;

    /// Takes the locks, and the places in line, of those of these tasks that have ended. The sweep
    /// does the same, a moment later.
    async fn let_go(&self, tasks: &[TaskId]) -> Result<(), StoreError>;

    /// Does what is due: takes back expired leases, readies tasks whose time has come, ends
    /// those past their deadline, passes on locks whose holder ended or had them for long enough,
    /// removes finished tasks past their retention, submits the tasks of schedules whose tick has
    /// come (unless `ticks` says to leave those to others). At most `limit` of each kind. Anyone may call it
    /// at any time, also several at once.
    async fn sweep(&self, limit: usize, ticks: bool) -> Result<Swept, StoreError>;

    /// Makes a worker and its handlers known; a submit for a handler never registered is refused.
    async fn register(&self, worker: &WorkerInfo) -> Result<(), StoreError>;

    /// Removes a worker that stopped.
    async fn retire(&self, worker: Uuid) -> Result<(), StoreError>;

    /// Sets queues, limits and retention; what is not named stays as it was.
    async fn configure(&self, settings: &Settings) -> Result<(), StoreError>;

    /// One task of `tenant`.
    async fn task(&self, tenant: &str, id: TaskId) -> Result<Option<Task>, StoreError>;

    /// Tasks of `tenant`, newest first or oldest first. A search looks at a bounded number of tasks
    /// per page, so a page can be short, or empty, and have a next one.
    async fn list(&self, tenant: &str, filter: &Filter) -> Result<Page, StoreError>;

    /// Log rows with events after number `after`, in order, up to about `bytes` at a time, and at least one if
    /// there are any.
    async fn log(&self, task: TaskId, after: u64, bytes: usize) -> Result<Vec<LogRow>, StoreError>;

    /// Which of these tasks have events after the number given, and the number of their newest;
    /// a task that is gone is given with 0.
    async fn advanced(&self, known: &[(TaskId, u64)]) -> Result<Vec<(TaskId, u64)>, StoreError>;

    /// The task's state and its version.
    async fn state(&self, task: TaskId) -> Result<Option<(u64, AgentState)>, StoreError>;

    /// The task's checkpoints, newest first.
    async fn checkpoints(&self, task: TaskId) -> Result<Vec<Checkpoint>, StoreError>;

    /// The questions and approvals of one task, oldest first, or all that are open in a tenant.
    async fn asks(&self, tenant: &str, task: Option<TaskId>) -> Result<Vec<Ask>, StoreError>;

    /// All queues that were configured or hold tasks.
    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError>;

    /// All workers that are registered.
    async fn workers(&self) -> Result<Vec<WorkerInfo>, StoreError>;

    /// Creates a schedule, or replaces the one of this name and tenant. One that fires at the same
    /// times as before keeps its next tick, and a paused one stays paused. Gives it as it is from
    /// now on.
    async fn save_schedule(&self, schedule: &Schedule) -> Result<Result<Schedule, Invalid>, StoreError>;

    /// Lets a schedule rest, or go on with its first tick from now on, and gives it as it is then;
    /// `None` when there is none.
    async fn pause_schedule(&self, tenant: &str, name: &str, pause: bool) -> Result<Option<Schedule>, StoreError>;

    /// Removes a schedule; its tasks stay. Says whether there was one.
    async fn remove_schedule(&self, tenant: &str, name: &str) -> Result<bool, StoreError>;

    /// All schedules of `tenant`, by name.
    async fn schedules(&self, tenant: &str) -> Result<Vec<Schedule>, StoreError>;

    /// The store's clock.
    fn clock(&self) -> &Clock;

    /// How many transactions of one kind may usefully be under way at once.
    fn lanes(&self) -> Lanes;

    /// Measures the storage itself, see [`Floor`].
    async fn floor(&self, seconds: f64) -> Result<Floor, StoreError>;
}

/// How many transactions of one kind may be under way at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// At most so many.
    pub most: usize,
    /// More than one only while so many requests wait: fewer would make small transactions of what could be a large one.
    pub plenty: usize,
}

impl Lanes {
    /// One after the other.
    pub const ONE: Self = Self { most: 1, plenty: 1 };
}

/// Opens the store at `url`: `sqlite:PATH`, `postgres://…` or `memory:`. Creates and migrates it
/// when needed.
pub(crate) async fn open(url: &str, hints: Arc<Hints>) -> Result<Arc<dyn Store>, StoreError> {
    if url == "memory:" {
        return Ok(Arc::new(sqlite::SqliteStore::in_memory(hints)?));
    }
    if let Some(path) = url.strip_prefix("sqlite:") {
        return Ok(Arc::new(sqlite::SqliteStore::open(path, hints).await?));
    }
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Ok(Arc::new(postgres::PostgresStore::open(url, hints).await?));
    }
    Err(StoreError::Url(format!(
        "'{url}' is not a store; use sqlite:PATH, postgres://USER@HOST/DATABASE or memory:"
    )))
}

/// Why a whole call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The store cannot be reached or did not answer; the call may or may not have happened.
    #[error("the store is not reachable ({0}); try again")]
    Unavailable(String),
    /// The address is not one of a store.
    #[error("{0}")]
    Url(String),
    /// The database is of another version, damaged, or of a kind that cannot be trusted.
    #[error("{0}")]
    Incompatible(String),
    /// The store refused the statement.
    #[error("the store refused: {0}")]
    Failed(String),
}

impl StoreError {
    /// Whether repeating the same call may help.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// Whether the server ended the transaction because it and another waited for each other.
    pub(crate) fn is_deadlock(&self) -> bool {
        matches!(self, Self::Unavailable(why) if why.contains("40P01"))
    }
}

/// A task is in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its id; another than asked for when the key was known.
    pub id: TaskId,
    /// Whether this call created it.
    pub new: bool,
    /// When it was accepted, microseconds.
    pub created_at: i64,
}

/// Why a task was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitRefused {
    /// The queue has as many pending tasks as it may have.
    #[error("queue '{queue}' is full ({max} pending tasks); try again in {} s", retry_after.as_secs())]
    QueueFull {
        /// The queue.
        queue: String,
        /// Its bound.
        max: u64,
        /// When a place is likely to be free.
        retry_after: Duration,
    },
    /// The key belongs to a task with other content.
    #[error("the key '{key}' belongs to task {existing}, which has other content; use another key")]
    KeyConflict {
        /// The key.
        key: String,
        /// The task that has it.
        existing: TaskId,
    },
    /// No worker ever registered this handler.
    #[error("no worker has registered a handler named '{handler}'; start one that has it, or check the name")]
    UnknownHandler {
        /// The name.
        handler: String,
    },
    /// The task that made this one has ended or was cancelled.
    #[error("its parent {parent} has ended or was cancelled")]
    ParentEnded {
        /// The parent.
        parent: TaskId,
    },
    /// More is to be sent to webhooks than may be, and this task would add to it.
    #[error("{max} tasks have events to be sent to webhooks; try again in {} s", retry_after.as_secs())]
    OutboxFull {
        /// The bound.
        max: u64,
        /// When there may be room.
        retry_after: Duration,
    },
    /// A subscriber has not passed the events of so long ago that what is kept for it may not grow any more.
    #[error(
        "the subscriber '{subscriber}' is {} behind with events, longer than it may be; run it, remove it, or \
         let it be behind for longer; try again in {} s",
        words(*behind), retry_after.as_secs()
    )]
    SubscriberBehind {
        /// Its name.
        subscriber: String,
        /// How old the oldest event is that it has not passed.
        behind: Duration,
        /// When it may have passed enough.
        retry_after: Duration,
    },
    /// The request itself is wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// A duration of this size for people.
fn words(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..=119 => format!("{seconds} s"),
        seconds @ 120..=7_199 => format!("{} min", seconds / 60),
        seconds @ 7_200..=172_799 => format!("{} h", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// A worker's request for tasks.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Who asks.
    pub worker: Uuid,
    /// The number of this claim of this worker, so that an unanswered one can be repeated.
    pub number: u64,
    /// The queues it serves.
    pub queues: Vec<String>,
    /// The handlers it has.
    pub handlers: Vec<String>,
    /// How long a task of a handler may take in all, from its submit on, when it has no deadline of
    /// its own; by handler.
    pub timeouts: BTreeMap<String, Duration>,
    /// How many tasks it has room for.
    pub max: usize,
    /// How long it may hold them without a heartbeat.
    pub lease: Duration,
    /// Whether it runs nothing else, so that a task suspected of killing its worker may run.
    pub idle: bool,
}

/// The answer to a claim.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The leases, lowest rank first.
    pub leases: Vec<Lease>,
    /// A suspect is waiting for a worker that runs nothing else.
    pub suspect_waits: bool,
}

/// The right to run a task; the only way to write to it.
#[derive(Clone, Debug)]
pub struct Lease {
    /// The task.
    pub task: TaskId,
    /// Grows with every lease of this task.
    pub fence: u64,
    /// The task's owner.
    pub tenant: String,
    /// What runs it.
    pub handler: String,
    /// The line it stood in.
    pub queue: String,
    /// Its labels.
    pub tags: BTreeMap<String, String>,
    /// Runs that ended with the handler's error so far.
    pub attempts: u32,
    /// How many of those are allowed.
    pub max_attempts: u32,
    /// Leases lost since the last recorded step.
    pub crashes: u32,
    /// Whether it goes forward or undoes what it did.
    pub phase: Phase,
    /// When it undoes what it did without a request.
    pub undo_on: UndoOn,
    /// When it must be over, microseconds.
    pub deadline: Option<i64>,
    /// The trace it belongs to.
    pub traceparent: Option<String>,
    /// Since when it stood in line as it was claimed, microseconds: submitted, woken, its time come, or
    /// given another priority. Not known when the claim was repeated.
    pub in_line_since: Option<i64>,
    /// The number of its newest event.
    pub last_seq: u64,
    /// Its log: all of it when short, else only the first row.
    pub log: Vec<LogRow>,
}

/// How much of a log is read at a time by those who read all of it.
pub(crate) const LOG_PAGE: usize = 1024 * 1024;

/// Logs with at most this many events come whole with the claim.
pub(crate) const LOG_WITH_CLAIM: u64 = 64;

/// What one run writes in one transaction.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The task.
    pub task: TaskId,
    /// The lease's fence.
    pub fence: u64,
    /// The number of this commit under this fence: 1, 2, 3 …
    pub number: u32,
    /// Whether it takes the task forward (a new intent, a record, completion), which a cancel
    /// or a deadline forbids. The record of an effect that was under way is not forward.
    pub forward: bool,
    /// Whether a step was recorded, which proves that the task does not just kill its worker.
    pub recorded: bool,
    /// Refuse ([`CommitRefused::Stale`]) when the log has grown past this number; used by
    /// suspends, so that a signal that comes meanwhile is not missed.
    pub known_seq: Option<u64>,
    /// What is added to the log.
    pub entry: LogEntry,
    /// The newest progress, JSON.
    pub progress: Option<String>,
    /// What the task has used so far, JSON.
    pub usage: Option<String>,
    /// Changes of the task's state.
    pub patches: Vec<StateChange>,
    /// A snapshot to go on from.
    pub checkpoint: Option<NewCheckpoint>,
    /// Whether something was recorded that has to be undone if the task fails.
    pub undoable: bool,
    /// When that is undone from now on, if that changes.
    pub undo_on: Option<UndoOn>,
    /// The phase the task is in from now on, when that changes.
    pub phase: Option<Phase>,
    /// Questions and approvals that are opened or closed.
    pub asks: Vec<AskChange>,
    /// How the run ended, if it did.
    pub outcome: Option<Outcome>,
}

impl Commit {
    /// What a batch is called among the points of `faults.rs`.
    pub(crate) fn operation(batch: &[Self]) -> &'static str {
        if batch.iter().any(|commit| commit.outcome.is_some()) { "outcome" } else { "record" }
    }

    /// About how large it is.
    pub(crate) fn bytes(&self) -> usize {
        let result = match &self.outcome {
            Some(Outcome::Completed { result }) => result.get().len(),
            _ => 0,
        };
        let checkpoint = self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.data.len());
        256 + self.entry.bytes() + checkpoint + result
    }
}

/// How a run ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// With a result.
    Completed {
        /// The result.
        result: Box<RawValue>,
    },
    /// For good, with an error. `attempt`: the handler's error, which counts as an attempt.
    Failed {
        /// The error.
        error: TaskError,
        /// Whether it counts as an attempt.
        attempt: bool,
    },
    /// By request.
    Cancelled {
        /// Who and why.
        error: TaskError,
    },
    /// It waits for something and is woken by it, or by the time.
    Suspended {
        /// What for.
        waiting: Waiting,
        /// At the latest after this time.
        wake_after: Option<Duration>,
    },
    /// With an error, to be tried again.
    Retry {
        /// The error.
        error: TaskError,
        /// After this time.
        after: Duration,
        /// Whether it counts as an attempt; what interrupts undoing does not.
        attempt: bool,
    },
    /// Handed back by a worker that stops or lost touch; costs nothing.
    Released,
}

impl Outcome {
    /// The error it ended with, if it did.
    pub(crate) fn error(&self) -> Option<&TaskError> {
        match self {
            Self::Failed { error, .. } | Self::Cancelled { error } | Self::Retry { error, .. } => Some(error),
            Self::Completed { .. } | Self::Suspended { .. } | Self::Released => None,
        }
    }

    /// The state the task has then.
    pub fn state(&self) -> State {
        match self {
            Self::Completed { .. } => State::Completed,
            Self::Failed { .. } => State::Failed,
            Self::Cancelled { .. } => State::Cancelled,
            Self::Suspended { .. } => State::Waiting,
            Self::Retry { .. } | Self::Released => State::Pending,
        }
    }
}

/// A commit is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The number of its first event. Larger than expected when others wrote to the log since.
    pub first_seq: u64,
    /// The number of its last event.
    pub last_seq: u64,
}

/// Why a commit was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitRefused {
    /// The lease is no longer the current one.
    #[error("the lease was lost: fence {held} is not current")]
    Fenced {
        /// The fence it came with.
        held: u64,
    },
    /// The task was cancelled; nothing forward is accepted any more.
    #[error("the task was cancelled")]
    Cancelled,
    /// The deadline has passed; nothing forward is accepted any more.
    #[error("the deadline has passed")]
    DeadlineExceeded,
    /// An approval that was given in time was to be used too late.
    #[error("approval {id} has expired")]
    ApprovalExpired {
        /// Which.
        id: String,
    },
    /// Others wrote to the log since; read on and decide again.
    #[error("the log has grown to {last_seq}")]
    Stale {
        /// The number of the newest event.
        last_seq: u64,
    },
}

/// What a run does with a lock.
#[derive(Clone, Debug)]
pub struct LockChange {
    /// The task's owner.
    pub tenant: String,
    /// The task.
    pub task: TaskId,
    /// The lease's fence.
    pub fence: u64,
    /// The number of the task's newest event that the run knows.
    pub known_seq: u64,
    /// Where what comes of it arrives; an operation's own.
    pub address: String,
    /// The lock's name.
    pub name: String,
    /// What.
    pub action: LockAction,
}

/// What can be done with a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockAction {
    /// Get it, now or when those who asked before are done. A task that holds it has it again,
    /// with the same token.
    Acquire {
        /// From then on it goes to the next in line, whatever the task does.
        max_hold: Duration,
        /// Wait no longer than this.
        within: Option<Duration>,
    },
    /// Give it back, if it is still held under this token.
    Release {
        /// The token it was got with.
        token: u64,
    },
}

/// A lock and the token it was got with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockToken {
    /// The lock's name.
    pub name: String,
    /// The token.
    pub token: u64,
}

impl LockToken {
    pub(crate) fn lost(&self) -> ControlRefused {
        ControlRefused::LockLost { name: self.name.clone(), token: self.token }
    }
}

/// A change of a lock is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// The number of the task's newest event.
    pub last_seq: u64,
}

/// A worker's sign of life.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    /// Who.
    pub worker: Uuid,
    /// The leases it holds: task and fence.
    pub leases: Vec<(TaskId, u64)>,
    /// For how long they are extended.
    pub lease: Duration,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug)]
pub struct Beats {
    /// In the order of the leases.
    pub beats: Vec<Beat>,
    /// Whether the worker is on the list; one that was silent for long is not, until it registers again.
    pub listed: bool,
}

/// What became of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Extended.
    Held {
        /// Someone asked to cancel the task.
        cancel: Option<Cancel>,
        /// The number of its newest event.
        last_seq: u64,
    },
    /// Not the current one any more.
    Lost,
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Leases taken back.
    pub expired: usize,
    /// Tasks whose time had come.
    pub due: usize,
    /// Tasks that ended and whose parents were told.
    pub told: usize,
    /// Finished tasks removed.
    pub removed: usize,
    /// Schedules whose tick had come.
    pub ticks: usize,
    /// Locks, and tasks that ended with some, that were looked after.
    pub locks: usize,
    /// Microseconds until something else is due, as far as known.
    pub next_due_in: Option<i64>,
}

impl Swept {
    /// Whether it hit its bound, so that there may be more to do at once.
    pub fn is_full(&self, limit: usize) -> bool {
        let counts = [self.expired, self.due, self.told, self.removed, self.ticks, self.locks];
        counts.into_iter().any(|count| count >= limit)
    }
}

/// Why a tenant gets no further schedule.
pub(crate) fn too_many_schedules() -> Invalid {
    Invalid::new("schedules", format!("are {MAX_SCHEDULES} already, the most a tenant may have; remove some"))
}

/// Why a task is not undone: it is not as it was when that was asked for.
pub(crate) fn undo_refused() -> Invalid {
    Invalid::new(UNDO_OF, "was opened again, or someone else undoes it by now")
}

/// The field of [`undo_refused`].
pub(crate) const UNDO_OF: &str = "undo_of";

/// A snapshot on its way into the store.
#[derive(Clone, Debug)]
pub struct NewCheckpoint {
    /// The version of its form; another one is refused at resume.
    pub version: u32,
    /// The iteration it was made in.
    pub iteration: u32,
    /// The snapshot, JSON.
    pub data: String,
    /// How many of the task to keep; older ones go, the newest always stays.
    pub max_count: u32,
    /// Older ones than this go.
    pub max_age: Duration,
}

/// A stored snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The log number up to which it speaks.
    pub seq: u64,
    /// The version of its form.
    pub version: u32,
    /// The iteration it was made in.
    pub iteration: u32,
    /// Checksum of `data` as it was written.
    pub checksum: u32,
    /// The snapshot, JSON.
    pub data: String,
    /// When it was made, microseconds.
    pub created_at: i64,
}
