//! The worker: claims tasks, runs their handlers, keeps its leases alive, and lets go of what it
//! lost.
//!
//! One loop owns the list of running tasks. Claims and heartbeats are asked for beside it, one of
//! each at a time, so that a slow answer delays nothing else.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::{RawValue, to_raw_value};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::Instrument;
use uuid::Uuid;

use crate::client::{Client, Error};
use crate::engine::Engine;
use crate::error::TaskError;
use crate::faults::{self, Mutant};
use crate::keeper;
use crate::leader::{self, Leader};
use crate::meter::{HandlerMeter, QueueMeter};
use crate::record::{Record, records_of};
use crate::retry::RetryPolicy;
use crate::run::driver::{HandlerFuture, Manners, run_to_end};
use crate::run::shown::{begins, run_span};
use crate::run::{Run, Signals};
use crate::sessions;
use crate::store::rules::SUSPECT_CRASHES;
use crate::store::{Beat, Beats, Claim, Claimed, Heartbeat, Lease, StoreError, WorkerInfo};
use crate::task::TaskId;

/// How often a worker with room looks for tasks without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The most tasks of one claim.
const MAX_CLAIM: usize = 1_000;

type Handler = Arc<dyn Fn(Run, &RawValue) -> HandlerFuture + Send + Sync>;

/// Runs tasks. Built with its handlers and settings, then started.
#[must_use = "a worker does nothing until it is started"]
pub struct Worker {
    client: Client,
    handlers: HashMap<String, Handler>,
    settings: WorkerSettings,
}

#[derive(Clone, Debug)]
struct WorkerSettings {
    name: String,
    queues: Vec<String>,
    timeouts: BTreeMap<String, Duration>,
    slots: usize,
    lease: Duration,
    drain: Duration,
    cancel_grace: Duration,
    retry: RetryPolicy,
}

impl Worker {
    /// A worker for the queue `default`, with 64 slots.
    pub fn new(client: &Client) -> Self {
        let settings = WorkerSettings {
            name: process_name(),
            queues: vec!["default".to_owned()],
            timeouts: BTreeMap::new(),
            slots: 64,
            lease: Duration::from_secs(15),
            drain: Duration::from_secs(30),
            cancel_grace: Duration::from_secs(10),
            retry: RetryPolicy::default(),
        };
        Self { client: client.clone(), handlers: HashMap::new(), settings }
    }

    /// Adds a handler: an async function of the run and the task's input.
    pub fn handler<F, Fut, In, Out, E>(mut self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(Run, In) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Out, E>> + Send + 'static,
        In: DeserializeOwned,
        Out: Serialize,
        E: Into<TaskError>,
    {
        let handler: Handler = Arc::new(move |run, input| match serde_json::from_str(input.get()) {
            Ok(input) => {
                let work = function(run, input);
                Box::pin(async move {
                    let result = work.await.map_err(Into::into)?;
                    to_raw_value(&result).map_err(|error| {
                        TaskError::fatal("bad_result", format!("the result cannot be written as JSON: {error}"))
                    })
                })
            }
            Err(error) => {
                let error =
                    TaskError::fatal("bad_input", format!("the input is not what the handler takes: {error}"));
                Box::pin(std::future::ready(Err(error)))
            }
        });
        self.handlers.insert(name.into(), handler);
        self
    }

    /// How long tasks of a handler may take in all, from their submit on, when they have no deadline
    /// of their own: waiting in line, running, and waiting for people count.
    pub fn timeout(mut self, handler: impl Into<String>, timeout: Duration) -> Self {
        self.settings.timeouts.insert(handler.into(), timeout);
        self
    }

    /// The queues it serves, instead of `default`.
    pub fn queues<S: Into<String>>(mut self, queues: impl IntoIterator<Item = S>) -> Self {
        self.settings.queues = queues.into_iter().map(Into::into).collect();
        self
    }

    /// How many tasks it runs at once.
    pub fn slots(mut self, slots: usize) -> Self {
        self.settings.slots = slots.max(1);
        self
    }

    /// How long a task stays with a worker that gives no sign of life; a sign is given every
    /// third of it. 15 s by default.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease.max(Duration::from_millis(30));
        self
    }

    /// How long running tasks may go on after the worker was told to stop, before they are
    /// handed back. 30 s by default.
    pub fn drain(mut self, drain: Duration) -> Self {
        self.settings.drain = drain;
        self
    }

    /// How long an effect that may not happen twice has to be recorded after a cancel. 10 s by
    /// default.
    pub fn cancel_grace(mut self, grace: Duration) -> Self {
        self.settings.cancel_grace = grace;
        self
    }

    /// How long a task waits after its handler's error before it is run again.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.settings.retry = policy;
        self
    }

    /// A name for people, instead of host and process id.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = name.into();
        self
    }

    /// Registers the worker and starts it in the background.
    pub async fn start(self) -> Result<WorkerHandle, Error> {
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            // Dropping the handle stops the worker too.
            let _ = stopped.await;
        };
        let work = self.prepare().await?;
        Ok(WorkerHandle { stop: Some(stop), task: Some(tokio::spawn(faults::of_process(work.run(shutdown)))) })
    }

    /// Registers the worker and works until `shutdown` is ready and the running tasks have ended
    /// or were handed back.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
        self.prepare().await?.run(shutdown).await;
        Ok(())
    }

    async fn prepare(self) -> Result<Work, Error> {
        let id = faults::now_v7();
        let engine = Arc::clone(&self.client.engine);
        let now = engine.store.clock().now().as_microsecond();
        let mut handlers: Vec<String> = self.handlers.keys().cloned().collect();
        handlers.sort();
        let info = WorkerInfo {
            id,
            name: self.settings.name.clone(),
            handlers: handlers.clone(),
            queues: self.settings.queues.clone(),
            slots: u32::try_from(self.settings.slots).unwrap_or(u32::MAX),
            started_at: now,
            seen_at: now,
            running: 0,
        };
        engine.store.register(&info).await?;
        let metered = |(name, handler): (String, Handler)| {
            let meter = engine.meter.handler(&name);
            (name, Served { handler, meter })
        };
        let queue = |name: &String| (name.clone(), engine.meter.queue(name));
        Ok(Work {
            id,
            handlers: self.handlers.into_iter().map(metered).collect(),
            queues: self.settings.queues.iter().map(queue).collect(),
            engine,
            info,
            settings: self.settings,
            running: HashMap::new(),
            line: VecDeque::new(),
            runs: JoinSet::new(),
            pace: Pace::new(),
            claims: 0,
            suspect_waits: false,
            suspect_runs: None,
            draining: false,
        })
    }
}

/// A worker that runs in the background. Dropping it stops the worker without waiting.
pub struct WorkerHandle {
    stop: Option<oneshot::Sender<()>>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl WorkerHandle {
    /// Stops claiming, lets running tasks end or hands them back, and returns when that is done.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        if let Some(task) = self.task.take() {
            // A panic of the worker's loop was reported where it happened.
            let _ = task.await;
        }
    }

    /// Ends the worker at once, as a crash would: nothing is handed back.
    pub fn abort(mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// A started worker.
struct Work {
    id: Uuid,
    engine: Arc<Engine>,
    info: WorkerInfo,
    handlers: HashMap<String, Served>,
    queues: HashMap<String, Arc<QueueMeter>>,
    settings: WorkerSettings,
    /// Every task this worker holds, started or not.
    running: HashMap<TaskId, Running>,
    /// Those that are not started yet, because every slot is taken.
    line: VecDeque<(Lease, watch::Receiver<Signals>)>,
    runs: JoinSet<(TaskId, u64)>,
    pace: Pace,
    claims: u64,
    /// A task suspected of killing its worker waits until this one runs nothing else.
    suspect_waits: bool,
    /// Such a task runs here, alone.
    suspect_runs: Option<TaskId>,
    /// Told to stop: what is not started goes back.
    draining: bool,
}

/// A handler this worker has.
#[derive(Clone)]
struct Served {
    handler: Handler,
    meter: Arc<HandlerMeter>,
}

/// A task this worker holds.
struct Running {
    fence: u64,
    signals: watch::Sender<Signals>,
    /// Since when the lease has not been extended.
    since: Instant,
    /// Its run, once it is started.
    run: Option<tokio::task::Id>,
}

/// How fast tasks end here. As many are fetched ahead as end in a moment, so that short tasks are
/// claimed in large batches, and long ones not before there is a slot for them.
struct Pace {
    since: Instant,
    ended: u32,
    per_second: f64,
}

impl Pace {
    const WINDOW: Duration = Duration::from_millis(50);
    const AHEAD: Duration = Duration::from_millis(100);

    fn new() -> Self {
        Self { since: Instant::now(), ended: 0, per_second: 0.0 }
    }

    fn one_ended(&mut self) {
        self.ended += 1;
        let elapsed = self.since.elapsed();
        if elapsed >= Self::WINDOW {
            *self = Self { per_second: f64::from(self.ended) / elapsed.as_secs_f64(), ..Self::new() };
        }
    }

    /// How many tasks to have in line.
    fn ahead(&self) -> usize {
        if self.since.elapsed() > Self::WINDOW * 4 {
            return 0;
        }
        ((self.per_second * Self::AHEAD.as_secs_f64()) as usize).min(MAX_CLAIM)
    }
}

type Asked<T> = Pin<Box<dyn Future<Output = (Instant, T)> + Send>>;
type AskedClaim = Asked<Result<Claimed, StoreError>>;
type AskedBeats = Asked<(Vec<(TaskId, u64)>, Result<Beats, StoreError>)>;

impl Work {
    async fn run(mut self, shutdown: impl Future<Output = ()> + Send) {
        // Ends with this function, however that ends.
        let mut keeper = JoinSet::new();
        let (resign, resigned) = oneshot::channel::<()>();
        let service = self.engine.locks.get().cloned();
        let leader = if service.is_some() { Leader::by_service() } else { Leader::nobody() };
        keeper.spawn(faults::of_process(keeper::keep(Arc::clone(&self.engine), Arc::clone(&leader))));
        let mut campaign = JoinSet::new();
        if let Some(service) = service {
            keeper.spawn(sessions::keep(Arc::clone(&self.engine), Arc::clone(&service)));
            let stop = async {
                // Never said, only dropped.
                let _ = resigned.await;
            };
            campaign.spawn(leader::campaign(Arc::clone(&self.engine), service, leader, stop));
        }
        let mut ready = self.engine.hints.on_ready();
        let mut controlled = self.engine.hints.on_controlled();
        let mut beat_tick = tokio::time::interval(self.settings.lease / 3);
        beat_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut look_tick = tokio::time::interval(LOOK_EVERY);
        look_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut claim: Option<AskedClaim> = None;
        let mut beats: Option<AskedBeats> = None;
        let mut may_have_more = true;
        // A task became ready while a claim was under way, which may not have seen it.
        let mut ready_meanwhile = false;
        let mut drain: Option<Instant> = None;
        let mut handed_back = false;
        // It is time for the next heartbeat, also when one is under way.
        let mut beat_due = false;
        // Tasks that someone asked something of: a heartbeat tells what.
        let mut to_ask: Vec<(TaskId, u64)> = Vec::new();
        tokio::pin!(shutdown);

        loop {
            while let Some(ended) = self.runs.try_join_next() {
                self.ended(ended);
            }
            let draining = self.draining;
            while self.runs.len() < self.settings.slots || draining {
                let Some((lease, told)) = self.line.pop_front() else { break };
                self.start(lease, told);
            }
            // A claim that is not answered even now is not waited for: its leases run out.
            if draining && self.running.is_empty() && (claim.is_none() || handed_back) {
                break;
            }
            if claim.is_none() && may_have_more && !draining {
                claim = self.room().map(|room| self.ask_claim(room));
                ready_meanwhile = false;
            }
            if beats.is_none() && (beat_due || !to_ask.is_empty()) {
                if std::mem::take(&mut beat_due) {
                    to_ask.extend(self.older_than(self.settings.lease / 4));
                }
                beats = Some(self.ask_beats(std::mem::take(&mut to_ask)));
            }
            tokio::select! {
                biased;
                _ = beat_tick.tick() => beat_due = true,
                (sent, (leases, answer)) = asked(&mut beats) => {
                    beats = None;
                    self.take_beats(sent, &leases, answer);
                }
                (sent, answer) = asked(&mut claim) => {
                    claim = None;
                    may_have_more = self.take_claim(sent, answer) || ready_meanwhile;
                }
                Some(ended) = self.runs.join_next(), if !self.runs.is_empty() => self.ended(ended),
                told = controlled.recv() => {
                    match told {
                        Ok(task) => to_ask.extend(self.running.get(&task).map(|running| (task, running.fence))),
                        // After a gap every task may be meant.
                        Err(_) => to_ask.extend(self.older_than(Duration::ZERO)),
                    }
                }
                _ = ready.changed() => {
                    may_have_more = true;
                    ready_meanwhile = true;
                }
                _ = look_tick.tick() => {
                    may_have_more = true;
                    if self.pace.ahead() == 0 {
                        // The tasks that run are long ones after all: others may have those in line.
                        self.give_up_line();
                    }
                }
                () = &mut shutdown, if !draining => {
                    tracing::info!(worker = %self.info.name, running = self.running.len(), "draining");
                    drain = Some(Instant::now() + self.settings.drain);
                    self.draining = true;
                    self.give_up_line();
                }
                () = until(drain), if !handed_back => {
                    for &task in self.running.keys() {
                        self.tell_hand_back(task);
                    }
                    // What is left now ends by itself; the leases are kept alive meanwhile.
                    handed_back = true;
                }
            }
        }
        drop((keeper, resign));
        // Does what is left to do in a moment, and is ended if it takes longer.
        let _ = tokio::time::timeout(LOOK_EVERY, campaign.join_next()).await;
        if let Err(error) = self.engine.store.retire(self.id).await {
            tracing::debug!(%error, "could not take the worker off the list; it is forgotten in time");
        }
    }

    /// Hands back every task that was not started; a run does it, and needs no slot for that.
    fn give_up_line(&mut self) {
        for (lease, told) in std::mem::take(&mut self.line) {
            self.tell_hand_back(lease.task);
            self.start(lease, told);
        }
    }

    fn tell_hand_back(&self, task: TaskId) {
        if let Some(running) = self.running.get(&task) {
            running.signals.send_modify(|signals| signals.hand_back = true);
        }
    }

    /// How many tasks to claim now; `None`: no claim. While a suspect waits for this worker to be
    /// idle, none: it is only asked whether it still waits. While one runs, no claim at all.
    fn room(&self) -> Option<usize> {
        if self.suspect_runs.is_some() {
            return None;
        }
        if self.suspect_waits && !self.running.is_empty() {
            return Some(0);
        }
        let ahead = self.pace.ahead();
        let room = (self.settings.slots + ahead).saturating_sub(self.running.len());
        // Not before the line is half empty, so that what is claimed is a batch.
        (room > 0 && self.line.len() <= ahead / 2).then_some(room)
    }

    fn ask_claim(&mut self, room: usize) -> AskedClaim {
        self.claims += 1;
        let idle = self.running.is_empty();
        let ask = Claim {
            worker: self.id,
            number: self.claims,
            queues: self.settings.queues.clone(),
            handlers: self.info.handlers.clone(),
            timeouts: self.settings.timeouts.clone(),
            max: room.min(MAX_CLAIM),
            lease: self.settings.lease,
            idle,
        };
        let (store, meter) = (Arc::clone(&self.engine.store), Arc::clone(&self.engine.meter));
        Box::pin(async move {
            // From before the first question: a claim that was answered only when it was repeated
            // has its leases since the first time.
            let sent = Instant::now();
            loop {
                meter.claims.inc();
                match store.claim(&ask).await {
                    // The claim may have happened: asked again under its number, it gives the
                    // same tasks.
                    Err(error) if error.is_unavailable() => {
                        tracing::warn!(%error, "cannot claim; trying again");
                        tokio::time::sleep(Duration::from_millis(250)).await;
                    }
                    answer => return (sent, answer),
                }
            }
        })
    }

    /// Takes the claimed tasks on; gives whether there may be more to claim.
    fn take_claim(&mut self, sent: Instant, answer: Result<Claimed, StoreError>) -> bool {
        let claimed = match answer {
            Ok(claimed) => claimed,
            Err(error) => {
                tracing::error!(%error, "a claim failed");
                return false;
            }
        };
        let waited = std::mem::replace(&mut self.suspect_waits, claimed.suspect_waits);
        let some = !claimed.leases.is_empty();
        let now = self.engine.store.clock().now_micros();
        for lease in claimed.leases {
            if let Some(queue) = self.queues.get(&lease.queue) {
                let waited = lease.in_line_since.map(|since| now.saturating_sub(since).max(0).unsigned_abs());
                queue.claimed(waited.map(Duration::from_micros));
            }
            self.take_on(lease, sent);
        }
        some || (waited && !self.suspect_waits) || (self.suspect_waits && self.running.is_empty())
    }

    /// Puts a leased task in line.
    fn take_on(&mut self, lease: Lease, since: Instant) {
        let (task, fence) = (lease.task, lease.fence);
        let (signals, told) = watch::channel(Signals {
            lease_until: since + self.settings.lease,
            cancel: None,
            lost: false,
            hand_back: self.draining,
            last_seq: lease.last_seq,
        });
        if lease.crashes >= SUSPECT_CRASHES {
            self.suspect_runs = Some(task);
        }
        if let Some(older) = self.running.insert(task, Running { fence, signals, since, run: None }) {
            // This worker lost the lease and got it anew before it noticed.
            older.signals.send_modify(|signals| signals.lost = true);
        }
        self.line.push_back((lease, told));
    }

    fn start(&mut self, lease: Lease, told: watch::Receiver<Signals>) {
        let (task, fence) = (lease.task, lease.fence);
        let engine = Arc::clone(&self.engine);
        let served = self.handlers.get(&lease.handler).cloned();
        let lease_time = self.settings.lease;
        let manners = Manners { cancel_grace: self.settings.cancel_grace, retry: self.settings.retry };
        let span = run_span(&lease);
        let run = run_lease(engine, lease, lease_time, told, served, manners).instrument(span);
        // In a box, because a run is a few kilobytes, and what is spawned is moved several times.
        let run = self.runs.spawn(faults::of_process(Box::pin(async move {
            run.await;
            (task, fence)
        })));
        if let Some(running) = self.running.get_mut(&task).filter(|running| running.fence == fence) {
            running.run = Some(run.id());
        }
    }

    fn ended(&mut self, ended: Result<(TaskId, u64), tokio::task::JoinError>) {
        match ended {
            Ok((task, fence)) => {
                self.pace.one_ended();
                if self.running.get(&task).is_some_and(|running| running.fence == fence) {
                    self.running.remove(&task);
                    self.suspect_runs = self.suspect_runs.filter(|suspect| *suspect != task);
                }
            }
            // Handlers' panics are caught inside; this is a bug of the engine's, and the task
            // goes on elsewhere once its lease has run out.
            Err(error) => {
                tracing::error!(%error, "a run ended unexpectedly");
                self.running.retain(|_, running| running.run != Some(error.id()));
                self.suspect_runs = self.suspect_runs.filter(|suspect| self.running.contains_key(suspect));
            }
        }
    }

    /// Leases not extended for `age`.
    fn older_than(&self, age: Duration) -> impl Iterator<Item = (TaskId, u64)> {
        let old = self.running.iter().filter(move |(_, running)| running.since.elapsed() >= age);
        old.map(|(task, running)| (*task, running.fence))
    }

    /// Asks to extend leases, and what became of them.
    fn ask_beats(&self, mut leases: Vec<(TaskId, u64)>) -> AskedBeats {
        self.engine.meter.heartbeats.inc();
        // The store is asked for them, and runs hear of theirs, in the same order every time.
        leases.sort_unstable();
        leases.dedup();
        let beat = Heartbeat { worker: self.id, leases: leases.clone(), lease: self.settings.lease };
        let (store, info) = (Arc::clone(&self.engine.store), self.info.clone());
        Box::pin(async move {
            // The lease is measured from before the question, so it never seems longer than it is.
            let sent = Instant::now();
            let answer = if faults::is(Mutant::HeartbeatIgnored) {
                let held = Beat::Held { cancel: None, last_seq: 0 };
                Ok(Beats { beats: vec![held; leases.len()], listed: true })
            } else {
                store.heartbeat(&beat).await
            };
            // It was taken for dead after a long silence.
            if answer.as_ref().is_ok_and(|answer| !answer.listed)
                && let Err(error) = store.register(&info).await
            {
                tracing::debug!(%error, "could not get back on the list of workers; trying again");
            }
            (sent, (leases, answer))
        })
    }

    fn take_beats(&mut self, sent: Instant, leases: &[(TaskId, u64)], answer: Result<Beats, StoreError>) {
        let beats = match answer {
            Ok(answer) => answer.beats,
            Err(error) => {
                tracing::warn!(%error, "a heartbeat failed; trying again");
                return;
            }
        };
        let until = sent + self.settings.lease;
        for ((task, fence), beat) in leases.iter().zip(beats) {
            let Some(running) = self.running.get_mut(task).filter(|running| running.fence == *fence) else {
                continue;
            };
            match beat {
                Beat::Held { cancel, last_seq } => {
                    running.since = sent;
                    running.signals.send_modify(|signals| {
                        signals.lease_until = until;
                        signals.last_seq = signals.last_seq.max(last_seq);
                        if cancel.is_some() {
                            signals.cancel = cancel;
                        }
                    });
                }
                // Or the run has just ended, and does not listen any more.
                Beat::Lost => running.signals.send_modify(|signals| signals.lost = true),
            }
        }
    }
}

/// Runs a leased task to its end.
async fn run_lease(
    engine: Arc<Engine>,
    lease: Lease,
    lease_time: Duration,
    signals: watch::Receiver<Signals>,
    served: Option<Served>,
    manners: Manners,
) {
    let begun = Instant::now();
    begins(&lease);
    let input = input_of(&lease);
    let (handler, meter) = match served {
        Some(Served { handler, meter }) => (Some(handler), meter),
        None => (None, engine.meter.handler(&lease.handler)),
    };
    let run = Run::new(engine, lease, lease_time, signals, Arc::clone(&meter), tracing::Span::current());
    let failed = |error| -> HandlerFuture { Box::pin(std::future::ready(Err(error))) };
    let (run, handler): (Run, HandlerFuture) = match (run, handler, input) {
        // The handler is called inside of what is watched for panics.
        (Ok(run), Some(handler), Ok(input)) => (run.clone(), Box::pin(async move { handler(run, &input).await })),
        (Ok(run), None, _) => {
            (run, failed(TaskError::retryable("no_handler", "the worker does not have this handler")))
        }
        (Ok(run), _, Err(error)) => (run, failed(error)),
        (Err((run, error)), ..) => (run, failed(error)),
    };
    let ended = run_to_end(run.clone(), handler, manners).await;
    meter.run_ended(ended, begun.elapsed());
    run.end_span();
}

/// The task's input, from the first row of its log.
fn input_of(lease: &Lease) -> Result<Box<RawValue>, TaskError> {
    let damaged =
        |why: String| TaskError::fatal("journal_damaged", format!("the task's input cannot be read: {why}"));
    let row = lease.log.first().ok_or_else(|| damaged("its log is empty".to_owned()))?;
    let records = records_of(row).map_err(|error| damaged(error.to_string()))?;
    records
        .into_iter()
        .find_map(|record| match record {
            Record::Input(input) => Some(input),
            _ => None,
        })
        .ok_or_else(|| damaged("it is not in the first row of its log".to_owned()))
}

async fn asked<T>(question: &mut Option<Asked<T>>) -> (Instant, T) {
    match question {
        Some(question) => question.await,
        None => std::future::pending().await,
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// This process, for people: host and process.
pub(crate) fn process_name() -> String {
    format!("{}:{}", rustix::system::uname().nodename().to_string_lossy(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_that_was_taken_off_the_list_gets_back_on_it() {
        let client = Client::open("memory:").await.expect("a store");
        let lease = Duration::from_millis(60);
        let worker = Worker::new(&client).name("ann").lease(lease).start().await.expect("starts");
        let store = Arc::clone(&client.engine.store);
        let listed = || async { store.workers().await.expect("the store answers").pop() };
        let info = listed().await.expect("on the list");
        store.retire(info.id).await.expect("taken off");
        let back = async {
            loop {
                match listed().await {
                    Some(back) => return back,
                    None => tokio::time::sleep(lease).await,
                }
            }
        };
        let back = tokio::time::timeout(Duration::from_secs(30), back).await.expect("it comes back");
        assert_eq!((back.id, back.name.as_str()), (info.id, "ann"));
        worker.stop().await;
    }
}
