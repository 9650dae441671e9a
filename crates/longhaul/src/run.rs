//! The run: what a handler is given to do durable work with.
//!
//! [`Run::step`] records a result once and replays it after a crash. Everything a handler does
//! between steps is done again in a replay, so effects belong in steps.
//!
//! `desk.rs` decides what is delivered when, `driver.rs` polls the handler and writes, `step.rs`
//! is one step, `journal.rs` what was recorded, `shown.rs` what logs and traces show of it.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Span;

use crate::engine::Engine;
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::meter::HandlerMeter;
use crate::record::{Effect, Op, Record, UndoOn};
use crate::state::{AgentState, StateChange, StatePatch};
use crate::store::{Cancel, Lease};
use crate::task::{TaskId, timestamp};

mod checkpoint;
pub(crate) mod child;
mod desk;
pub(crate) mod driver;
pub(crate) mod journal;
mod line;
pub(crate) mod lock;
mod order;
mod outgoing;
pub(crate) mod shown;
mod step;
mod told;
mod undo;
pub(crate) mod wait;

pub use checkpoint::{CheckpointPolicy, OnRefused};
pub use child::Child;
pub use lock::{Acquire, Lock};
pub use step::{Step, StepContext};
pub use wait::{Approval, Approve, Question, Risk, Signal, Sleep};

use desk::{Asking, Desk, Turn};
use journal::Key;

/// What the worker tells a run while it runs.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// Until when the lease is certain to be held, by this host's clock.
    pub(crate) lease_until: Instant,
    /// Someone asked to cancel the task.
    pub(crate) cancel: Option<Cancel>,
    /// The lease is another's by now.
    pub(crate) lost: bool,
    /// The worker stops: hand the task back.
    pub(crate) hand_back: bool,
    /// The number of the task's newest event, as far as the worker has heard.
    pub(crate) last_seq: u64,
}

/// A handler's way to do durable work. Cheap to clone.
#[derive(Clone)]
pub struct Run {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Arc<Engine>,
    lease: Lease,
    /// Effects are not started in the last third of a lease.
    lease_time: Duration,
    desk: Mutex<Desk>,
    signals: watch::Receiver<Signals>,
    /// Set once nothing new may start.
    closed: watch::Sender<bool>,
    meter: Arc<HandlerMeter>,
    /// What the spans of steps are below. Taken out when the run ends: a handler can keep the run longer,
    /// or for ever, in an undo that nobody needed.
    span: Mutex<Span>,
}

impl Run {
    /// A run of a leased task. With a log that cannot be read the run is given all the same, to
    /// end the task with the error.
    pub(crate) fn new(
        engine: Arc<Engine>,
        mut lease: Lease,
        lease_time: Duration,
        signals: watch::Receiver<Signals>,
        meter: Arc<HandlerMeter>,
        span: Span,
    ) -> Result<Self, (Self, TaskError)> {
        let log = std::mem::take(&mut lease.log);
        // The newest event is this lease's own `task.started`.
        let complete = log.last().is_some_and(|row| row.last_seq() + 1 >= lease.last_seq);
        let mut desk = Desk::new(lease.task, lease.fence, lease.undo_on);
        let read = desk.load(if complete { &log } else { &[] }, complete);
        if complete {
            desk.saw(lease.last_seq);
        }
        let closed = watch::Sender::new(false);
        let (desk, span) = (Mutex::new(desk), Mutex::new(span));
        let run =
            Self { inner: Arc::new(Inner { engine, lease, lease_time, desk, signals, closed, meter, span }) };
        match read {
            Ok(()) => Ok(run),
            Err(error) => Err((run, error)),
        }
    }

    /// The task's id.
    pub fn id(&self) -> TaskId {
        self.inner.lease.task
    }

    /// The task's owner.
    pub fn tenant(&self) -> &str {
        &self.inner.lease.tenant
    }

    /// The W3C `traceparent` the task was submitted with, or inherited from its parent.
    pub fn traceparent(&self) -> Option<&str> {
        self.inner.lease.traceparent.as_deref()
    }

    /// The task's labels; one that a schedule made has its tick there.
    pub fn tags(&self) -> &BTreeMap<String, String> {
        &self.inner.lease.tags
    }

    /// The run's fence; larger than that of every run of this task before.
    pub fn fence(&self) -> u64 {
        self.inner.lease.fence
    }

    /// How many runs of this task have ended with its handler's error before.
    pub fn attempts(&self) -> u32 {
        self.inner.lease.attempts
    }

    /// When the task must be over.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.inner.lease.deadline.map(timestamp)
    }

    /// A step: `work` runs, its result is recorded, and from then on the recorded result is
    /// given instead. Tried three times by default; see [`Step`] for what can be set.
    ///
    /// The second use of a name is recorded as `name#2`, and so on. Two steps of one name at the
    /// same time need a [`Step::key`].
    pub fn step<'a, T, F, Fut, E>(&'a self, name: impl Into<String>, mut work: F) -> Step<'a, T>
    where
        T: Serialize + DeserializeOwned + Send + 'a,
        F: FnMut() -> Fut + Send + 'a,
        Fut: Future<Output = Result<T, E>> + Send + 'a,
        E: Into<TaskError>,
    {
        Step::new(self, name.into(), move |_| work())
    }

    /// A step whose function is told its idempotency key, attempt and fence, to pass them on.
    pub fn step_with<'a, T, F, Fut, E>(&'a self, name: impl Into<String>, work: F) -> Step<'a, T>
    where
        T: Serialize + DeserializeOwned + Send + 'a,
        F: FnMut(StepContext) -> Fut + Send + 'a,
        Fut: Future<Output = Result<T, E>> + Send + 'a,
        E: Into<TaskError>,
    {
        Step::new(self, name.into(), work)
    }

    /// Changes the task's state; recorded and told as `state.patched`.
    pub async fn patch(&self, patch: StatePatch) -> Result<(), TaskError> {
        let operation = self.take_place(Asking::plain("patch", Op::Patch))?;
        operation
            .once(|| {
                let event = NewEvent::new("state.patched", json!({"version": 0, "patch": patch, "by": "run"}));
                self.desk().change_state(patch.into());
                [event]
            })
            .await
    }

    /// The state the task begins with: goal, constraints and budget, once in its life. What others
    /// patched before stays; nothing happens when it was begun already. Told as `state.patched`.
    pub async fn begin_state(&self, state: AgentState) -> Result<(), TaskError> {
        std::future::poll_fn(|cx| self.desk().poll_loaded(cx)).await;
        if self.desk().journal().has_begun_state() {
            return Ok(());
        }
        let operation = self.take_place(Asking::plain("begin state", Op::Patch))?;
        operation
            .once(|| {
                let event = NewEvent::new("state.patched", json!({"version": 0, "state": state, "by": "run"}));
                self.desk().change_state(StateChange::Begin(state));
                [event]
            })
            .await
    }

    /// Writes what was gathered (progress, deferred steps) and waits for the disk.
    pub async fn flush(&self) -> Result<(), TaskError> {
        let batch = self.desk().flush();
        std::future::poll_fn(|cx| self.desk().poll_disk(batch, cx)).await;
        Ok(())
    }

    /// The task's state as this run knows it.
    pub fn state(&self) -> AgentState {
        self.desk().journal().state().1.clone()
    }

    /// When what the task did is undone without a request; by default always. Written with the run's next
    /// commit, and it counts from then on, also while the task waits or after a crash: so say it first.
    /// A task that ended without undoing can be undone by request
    /// ([`Client::undo`](crate::Client::undo)).
    pub fn undo_on(&self, policy: UndoOn) {
        self.desk().set_undo_on(policy);
    }

    /// Returns when someone has asked to cancel the task. An effect that is under way then has a
    /// moment to be recorded; the handler itself is dropped.
    pub async fn cancelled(&self) {
        let mut signals = self.inner.signals.clone();
        // The worker drops the sender only after the run.
        let _ = signals.wait_for(|signals| signals.cancel.is_some()).await;
    }

    fn take_place(&self, asking: Asking<'_>) -> Result<Operation, TaskError> {
        let op = asking.op;
        let key = self.desk().ask(asking)?;
        Ok(Operation { run: self.clone(), key, op })
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        // Every change of the desk is complete when its lock is given up, also by a panic in a
        // handler, which never runs under the lock.
        self.inner.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_micros(&self) -> i64 {
        self.inner.engine.store.clock().now_micros()
    }

    /// This host's clock at a time of the store's.
    fn instant_of(&self, at: i64) -> Instant {
        let left = at.saturating_sub(self.now_micros()).max(0).unsigned_abs();
        Instant::now() + Duration::from_micros(left)
    }

    /// Something was gathered outside of the handler's own polling (another task of the
    /// handler's): the driver must look.
    fn wake_driver(&self) {
        self.inner.closed.send_modify(|_| {});
    }

    fn context(&self, key: &Key, attempt: u32, traceparent: Option<String>) -> StepContext {
        self.context_of(key, key, attempt, traceparent)
    }

    /// The context of operation `key`, which belongs to the step `of`.
    fn context_of(&self, key: &Key, of: &Key, attempt: u32, traceparent: Option<String>) -> StepContext {
        let (part, step) = key;
        let task = self.id();
        // Undoing a step is the same call to the outside, whichever task does it. A step that was undone
        // and starts again is another.
        let (owner, generation) = {
            let desk = self.desk();
            (desk.journal().undo_of().unwrap_or(task), desk.journal().generation(of))
        };
        let mut idempotency_key =
            if *part == 0 { format!("{owner}/{step}") } else { format!("{owner}/{part}/{step}") };
        if generation > 0 {
            idempotency_key = format!("{idempotency_key}~{}", generation + 1);
        }
        StepContext { task, step: step.clone(), idempotency_key, attempt, fence: self.fence(), traceparent }
    }

    /// Returns when an effect may start: the lease has more than a third of its time left, and
    /// the run is not closing. A run that is closing is dropped while it waits here.
    async fn may_start_effect(&self) {
        let margin = self.inner.lease_time / 3;
        let safe = |signals: &Signals| signals.lease_until.saturating_duration_since(Instant::now()) > margin;
        loop {
            if *self.inner.closed.borrow() {
                return std::future::pending().await;
            }
            if safe(&self.inner.signals.borrow()) {
                return;
            }
            // The worker drops the sender only after the run. What came with the news (a cancel,
            // perhaps) is looked at first.
            let _ = self.inner.signals.clone().wait_for(safe).await;
        }
    }
}

/// An operation's place on the desk; given up when dropped.
struct Operation {
    run: Run,
    key: Key,
    op: Op,
}

impl Operation {
    /// Records an operation that cannot fail and has no result: `events` is called once in the
    /// task's life.
    async fn once<const N: usize>(&self, events: impl FnOnce() -> [NewEvent; N]) -> Result<(), TaskError> {
        match self.turn().await {
            Turn::Recorded(outcome) => return outcome.map(drop),
            Turn::Start(_) => {}
        }
        let events = events();
        let record = self.done(self.run.now_micros(), RawValue::NULL.to_owned());
        self.record(record, events).await;
        match self.turn().await {
            Turn::Recorded(outcome) => outcome.map(drop),
            Turn::Start(_) => Ok(()),
        }
    }
}

impl Operation {
    /// The record of an operation without an effect of its own.
    fn done(&self, started: i64, result: Box<RawValue>) -> Record {
        let (step, op) = (self.key.1.clone(), self.op);
        Record::Done {
            step,
            op,
            effect: Effect::Read,
            attempt: 1,
            started,
            result,
            undoable: false,
            given_after: None,
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.run.desk().leave(&self.key);
    }
}
