//! The PostgreSQL store: for clusters, and for those who have a PostgreSQL anyway.
//!
//! - Every write is a few set-based statements over arrays, whatever the size of the batch, and
//!   statements that do not wait for an answer are sent together.
//! - Rows are locked in one order everywhere: locks by name, tasks by id (and with them their lines of
//!   the outbox, by a trigger), then limits by name, then depths by queue. Whoever needs further
//!   tasks after that takes only those nobody else has (`SKIP LOCKED`). So does whoever fires schedules,
//!   before everything else.
//! - All names are unqualified, so `search_path` decides where the tables are.
//! - Isolation is read committed: each statement sees what was committed before it began, and a
//!   row that changed meanwhile is checked again before it is written.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use deadpool_postgres::Pool;
use uuid::Uuid;

use super::known::Known;
use super::subscribers::Late;
use super::{
    Accepted, Ask, Beats, Checkpoint, Claim, Claimed, Clock, Commit, CommitRefused, Committed, Control,
    ControlRefused, Controlled, Filter, Floor, Heartbeat, Hints, Lanes, LockChange, Locked, Page, QueueInfo,
    Settings, Store, StoreError, SubmitRefused, Swept, WorkerInfo,
};
use crate::event::LogRow;
use crate::faults;
use crate::schedule::Schedule;
use crate::state::AgentState;
use crate::task::{Invalid, NewTask, State, Task, TaskId};

mod access;
mod asks;
mod backup;
mod claim;
mod commit;
mod configure;
mod connect;
mod control;
mod feed;
mod floor;
mod heads;
mod limits;
mod locks;
mod notify;
mod outbox;
mod overview;
mod read;
mod rows;
mod schedule;
mod schema;
mod sessions;
mod state;
mod submit;
mod subscribers;
mod sweep;
mod workers;

use connect::{Address, Tx};
use notify::Notifier;

/// How many pairs of rows count the pending tasks of a queue: one of a pair for submits, the other
/// for everyone else.
const DEPTH_PAIRS: u32 = 16;

/// See the module.
pub(crate) struct PostgresStore {
    pool: Pool,
    /// Heartbeats' own connection.
    reserved: Pool,
    /// The address, for programs of PostgreSQL's own.
    config: tokio_postgres::Config,
    hints: Arc<Hints>,
    notifier: Notifier,
    /// Names this installation among those in the same database.
    channel: String,
    clock: Clock,
    /// Handlers known to be registered; none is ever removed.
    handlers: Mutex<HashSet<String>>,
    /// The newest claim of each worker here: the same number again is a repetition.
    claims: Mutex<HashMap<Uuid, u64>>,
    /// Tasks that ended last counted in limits, so those that end next may as well.
    holds_expected: AtomicBool,
    /// Takes turns over the rows that count pending tasks, from a random start.
    turn: AtomicU32,
    /// The bound of the outbox, when it is reached.
    gauge: Known<Option<u64>>,
    /// A subscriber that is too far behind.
    late: Known<Option<Late>>,
    /// When the feed's index was last summed up here.
    summed_up: AtomicI64,
}

impl PostgresStore {
    /// Connects, checks the server and brings the schema up to date.
    pub(crate) async fn open(url: &str, hints: Arc<Hints>) -> Result<Self, StoreError> {
        let address = Address::parse(url)?;
        let (pool, reserved) = (address.pool()?, address.reserved()?);
        let channel = schema::prepare(Tx::on(&pool).await?).await?;
        let config = address.config.clone();
        let notifier = Notifier::start(address, channel.clone(), Arc::clone(&hints));
        Ok(Self {
            pool,
            reserved,
            config,
            hints,
            notifier,
            channel,
            clock: Clock::default(),
            handlers: Mutex::default(),
            claims: Mutex::default(),
            holds_expected: AtomicBool::new(false),
            turn: AtomicU32::new(rand::random_range(0..DEPTH_PAIRS)),
            gauge: Known::default(),
            late: Known::default(),
            summed_up: AtomicI64::new(0),
        })
    }

    /// Which server it is and which schema version the database has, without changing it.
    pub(super) async fn inspect(url: &str) -> Result<(String, i64), StoreError> {
        schema::inspect(Tx::on(&Address::parse(url)?.reserved()?).await?).await
    }

    async fn tx(&self) -> Result<Tx, StoreError> {
        Tx::on(&self.pool).await
    }

    /// The row of `depths` to count in. Each transaction takes the next pair, so that those under
    /// way at the same time do not wait for each other's commit.
    fn depth_shard(&self, submit: bool) -> i32 {
        let pair = self.turn.fetch_add(1, Ordering::Relaxed) % DEPTH_PAIRS;
        // At most 31.
        i32::try_from(pair * 2 + u32::from(!submit)).unwrap_or(0)
    }

    /// Whether tasks that end are likely to count in limits; only saves round trips.
    fn holds_expected(&self) -> bool {
        self.holds_expected.load(Ordering::Relaxed)
    }

    fn expect_holds(&self, expected: bool) {
        self.holds_expected.store(expected, Ordering::Relaxed);
    }

    /// Gives hints, here and elsewhere. Only after the transaction is on disk.
    fn tell(&self, told: Told) {
        if told.due {
            self.hints.tell_due();
        }
        if told.sessions {
            self.hints.tell_sessions();
        }
        if told.is_empty() {
            return;
        }
        let relayed = self.hints.relayed().get();
        if let Some(relay) = &relayed {
            relay.tell(told.ready, &told.changed, &told.finished, &told.controlled);
        }
        if !relayed.is_some_and(|relay| relay.is_instead_of_notify()) {
            self.notifier.tell(&told);
        }
        if told.ready {
            self.hints.tell_ready();
        }
        self.hints.tell_changed(told.changed);
        self.hints.tell_finished(told.finished);
        for task in told.controlled {
            self.hints.tell_controlled(task);
        }
    }
}

/// Both maps stay usable after a panic elsewhere: every change to them is one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What to hint at once the transaction is on disk.
#[derive(Default)]
struct Told {
    ready: bool,
    /// Something is due for the keeper.
    due: bool,
    /// Someone must turn to the lock service.
    sessions: bool,
    changed: Vec<TaskId>,
    finished: Vec<TaskId>,
    controlled: Vec<TaskId>,
}

impl Told {
    fn tell(&mut self, task: TaskId, state: State) {
        if state.is_final() {
            self.finished.push(task);
        } else {
            self.changed.push(task);
        }
    }

    fn is_empty(&self) -> bool {
        !self.ready && self.changed.is_empty() && self.finished.is_empty() && self.controlled.is_empty()
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn submit(&self, batch: &[NewTask]) -> Result<Vec<Result<Accepted, SubmitRefused>>, StoreError> {
        faults::around("submit", submit::submit(self, batch)).await
    }

    async fn claim(&self, ask: &Claim) -> Result<Claimed, StoreError> {
        faults::around("claim", claim::claim(self, ask)).await
    }

    async fn commit(&self, batch: &[Commit]) -> Result<Vec<Result<Committed, CommitRefused>>, StoreError> {
        faults::around(Commit::operation(batch), commit::commit(self, batch)).await
    }

    async fn heartbeat(&self, beat: &Heartbeat) -> Result<Beats, StoreError> {
        faults::around("heartbeat", workers::heartbeat(self, beat)).await
    }

    async fn control(&self, batch: &[Control]) -> Result<Vec<Result<Controlled, ControlRefused>>, StoreError> {
        faults::around("control", control::control(self, batch)).await
    }

    async fn lock(&self, change: &LockChange) -> Result<Result<Locked, CommitRefused>, StoreError> {
        locks::change(self, change).await
    }

    async fn let_go(&self, tasks: &[TaskId]) -> Result<(), StoreError> {
        locks::let_go(self, tasks).await
    }

    async fn sweep(&self, limit: usize, ticks: bool) -> Result<Swept, StoreError> {
        faults::around("sweep", sweep::sweep(self, limit, ticks)).await
    }

    async fn register(&self, worker: &WorkerInfo) -> Result<(), StoreError> {
        workers::register(self, worker).await
    }

    async fn retire(&self, worker: Uuid) -> Result<(), StoreError> {
        workers::retire(self, worker).await
    }

    async fn configure(&self, settings: &Settings) -> Result<(), StoreError> {
        configure::configure(self, settings).await
    }

    async fn task(&self, tenant: &str, id: TaskId) -> Result<Option<Task>, StoreError> {
        read::task(self, tenant, id).await
    }

    async fn list(&self, tenant: &str, filter: &Filter) -> Result<Page, StoreError> {
        read::list(self, tenant, filter).await
    }

    async fn log(&self, task: TaskId, after: u64, bytes: usize) -> Result<Vec<LogRow>, StoreError> {
        read::log(self, task, after, bytes).await
    }

    async fn advanced(&self, known: &[(TaskId, u64)]) -> Result<Vec<(TaskId, u64)>, StoreError> {
        read::advanced(self, known).await
    }

    async fn state(&self, task: TaskId) -> Result<Option<(u64, AgentState)>, StoreError> {
        read::state(self, task).await
    }

    async fn checkpoints(&self, task: TaskId) -> Result<Vec<Checkpoint>, StoreError> {
        read::checkpoints(self, task).await
    }

    async fn asks(&self, tenant: &str, task: Option<TaskId>) -> Result<Vec<Ask>, StoreError> {
        read::asks(self, tenant, task).await
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        read::queues(self).await
    }

    async fn workers(&self) -> Result<Vec<WorkerInfo>, StoreError> {
        read::workers(self).await
    }

    async fn save_schedule(&self, schedule: &Schedule) -> Result<Result<Schedule, Invalid>, StoreError> {
        schedule::save(self, schedule).await
    }

    async fn pause_schedule(&self, tenant: &str, name: &str, pause: bool) -> Result<Option<Schedule>, StoreError> {
        schedule::pause(self, tenant, name, pause).await
    }

    async fn remove_schedule(&self, tenant: &str, name: &str) -> Result<bool, StoreError> {
        schedule::remove(self, tenant, name).await
    }

    async fn schedules(&self, tenant: &str) -> Result<Vec<Schedule>, StoreError> {
        schedule::list(self, tenant).await
    }

    fn clock(&self) -> &Clock {
        &self.clock
    }

    fn lanes(&self) -> Lanes {
        // Two share each fsync (group commit) and keep the server busy while one waits for it; more
        // only make the batches smaller.
        Lanes { most: 2, plenty: 1 }
    }

    async fn floor(&self, seconds: f64) -> Result<Floor, StoreError> {
        floor::floor(self, seconds).await
    }
}
