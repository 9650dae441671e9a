//! What the engine counts. Every number is an atomic of `prometheus-client`; who wants to publish them
//! registers them ([`crate::Client::register_metrics`]).
//!
//! Labels have few values: outcomes, and the names of handlers and queues that a worker of this process
//! serves. Never a task's id or a step's name. What has a name of its own is looked up once and kept
//! ([`HandlerMeter`], [`QueueMeter`]), so that counting costs a few atomics per task.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::store::{Accepted, Outcome, SubmitRefused, Swept};

type Labels = Vec<(&'static str, String)>;
type Counters = Family<Labels, Counter>;
type Seconds = Family<Labels, Gauge<f64, AtomicU64>>;
type Durations = Family<Labels, Histogram, fn() -> Histogram>;

/// From a short step to a task that takes hours.
const SECONDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0, 1_800.0, 7_200.0];
/// A transaction takes less.
const BATCH_SECONDS: [f64; 12] =
    [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0];

/// What became of a submit.
#[derive(Clone, Copy, Debug)]
enum Submitted {
    New,
    Known,
    QueueFull,
    OutboxFull,
    SubscriberBehind,
    KeyConflict,
    UnknownHandler,
    ParentEnded,
    Invalid,
}

impl Submitted {
    const NAMES: [&str; 9] = [
        "new",
        "known",
        "queue_full",
        "outbox_full",
        "subscriber_behind",
        "key_conflict",
        "unknown_handler",
        "parent_ended",
        "invalid",
    ];
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Completed,
    Failed,
    Cancelled,
    Suspended,
    Retry,
    Released,
    /// Nothing more could be written: the lease is another's, or the store is away.
    Lost,
}

impl Ended {
    const NAMES: [&str; 7] = ["completed", "failed", "cancelled", "suspended", "retry", "released", "lost"];

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl From<&Outcome> for Ended {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Completed { .. } => Self::Completed,
            Outcome::Failed { .. } => Self::Failed,
            Outcome::Cancelled { .. } => Self::Cancelled,
            Outcome::Suspended { .. } => Self::Suspended,
            Outcome::Retry { .. } => Self::Retry,
            Outcome::Released => Self::Released,
        }
    }
}

/// What came of one try of a step, or of its undo.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepEnded {
    Completed,
    /// For good.
    Failed,
    /// To be tried again.
    Retried,
    InDoubt,
    Undone,
    /// The undo failed for good.
    NotUndone,
}

impl StepEnded {
    const NAMES: [&str; 6] = ["completed", "failed", "retried", "in_doubt", "undone", "not_undone"];
}

/// A transaction for many.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Batch {
    Submit,
    Commit,
}

impl Batch {
    const NAMES: [&str; 2] = ["submit", "commit"];
}

/// What became of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Checkpointed {
    Taken,
    /// It was too old, damaged, or of another version.
    Refused,
}

impl Checkpointed {
    const NAMES: [&str; 2] = ["taken", "refused"];
}

const SWEPT: [&str; 6] = ["expired", "due", "told", "removed", "ticks", "locks"];

/// See the module.
pub(crate) struct Meter {
    submits: Counters,
    submitted: [Counter; 9],
    pub(crate) claims: Counter,
    claimed: Counters,
    queue_wait: Durations,
    runs: Counters,
    run_seconds: Durations,
    steps: Counters,
    step_seconds: Durations,
    batches: Counters,
    batch_entries: Counters,
    batch_seconds: Durations,
    batch_meters: [BatchMeter; 2],
    pub(crate) heartbeats: Counter,
    pub(crate) leases_lost: Counter,
    sweeps: Counter,
    swept: Counters,
    swept_counters: [Counter; 6],
    checkpoints: Counters,
    checkpointed: [Counter; 2],
    subscribed: Counters,
    subscriber_behind: Seconds,
    handlers: Mutex<HashMap<String, Arc<HandlerMeter>>>,
    queues: Mutex<HashMap<String, Arc<QueueMeter>>>,
}

/// What is counted of one handler.
pub(crate) struct HandlerMeter {
    runs: [Counter; 7],
    run_seconds: Histogram,
    steps: [Counter; 6],
    step_seconds: Histogram,
}

impl HandlerMeter {
    pub(crate) fn run_ended(&self, ended: Ended, took: Duration) {
        self.runs[ended as usize].inc();
        self.run_seconds.observe(took.as_secs_f64());
    }

    /// One try ended so; `took` is the time of the effect alone.
    pub(crate) fn step_tried(&self, took: Duration) {
        self.step_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn step_ended(&self, ended: StepEnded) {
        self.steps[ended as usize].inc();
    }
}

/// What is counted of one queue.
pub(crate) struct QueueMeter {
    claimed: Counter,
    wait: Histogram,
}

impl QueueMeter {
    /// A task was claimed that stood in line for so long; not known when a claim was repeated.
    pub(crate) fn claimed(&self, waited: Option<Duration>) {
        self.claimed.inc();
        if let Some(waited) = waited {
            self.wait.observe(waited.as_secs_f64());
        }
    }
}

/// What is counted of one subscriber.
pub(crate) struct SubscriberMeter {
    pub(crate) handled: Counter,
    pub(crate) failed: Counter,
    pub(crate) refused: Counter,
    /// The age of the oldest event that was read and not handled, in seconds.
    pub(crate) behind: Gauge<f64, AtomicU64>,
}

impl SubscriberMeter {
    const NAMES: [&str; 3] = ["handled", "failed", "refused"];
}

struct BatchMeter {
    batches: Counter,
    entries: Counter,
    seconds: Histogram,
}

fn durations() -> Histogram {
    Histogram::new(SECONDS)
}

fn batch_durations() -> Histogram {
    Histogram::new(BATCH_SECONDS)
}

/// One counter for each name, known to the family from the beginning, so that it is 0 and not absent.
fn each<const N: usize>(
    family: &Counters,
    label: &'static str,
    names: [&str; N],
    others: &Labels,
) -> [Counter; N] {
    names.map(|name| {
        let mut labels = others.clone();
        labels.push((label, name.to_owned()));
        family.get_or_create_owned(&labels)
    })
}

impl Default for Meter {
    fn default() -> Self {
        let (submits, swept, checkpoints) = (Counters::default(), Counters::default(), Counters::default());
        let (batches, batch_entries) = (Counters::default(), Counters::default());
        let batch_seconds = Durations::new_with_constructor(batch_durations);
        let batch_meters = Batch::NAMES.map(|kind| {
            let labels = vec![("kind", kind.to_owned())];
            BatchMeter {
                batches: batches.get_or_create_owned(&labels),
                entries: batch_entries.get_or_create_owned(&labels),
                seconds: batch_seconds.get_or_create_owned(&labels),
            }
        });
        let none = Labels::new();
        Self {
            submitted: each(&submits, "outcome", Submitted::NAMES, &none),
            submits,
            claims: Counter::default(),
            claimed: Counters::default(),
            queue_wait: Durations::new_with_constructor(durations),
            runs: Counters::default(),
            run_seconds: Durations::new_with_constructor(durations),
            steps: Counters::default(),
            step_seconds: Durations::new_with_constructor(durations),
            batches,
            batch_entries,
            batch_seconds,
            batch_meters,
            heartbeats: Counter::default(),
            leases_lost: Counter::default(),
            sweeps: Counter::default(),
            swept_counters: each(&swept, "what", SWEPT, &none),
            swept,
            checkpointed: each(&checkpoints, "outcome", Checkpointed::NAMES, &none),
            checkpoints,
            subscribed: Counters::default(),
            subscriber_behind: Seconds::default(),
            handlers: Mutex::default(),
            queues: Mutex::default(),
        }
    }
}

impl Meter {
    /// What is counted of a handler; to be kept by who counts.
    pub(crate) fn handler(&self, name: &str) -> Arc<HandlerMeter> {
        let mut known = self.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        let made = known.entry(name.to_owned()).or_insert_with(|| {
            let labels = vec![("handler", name.to_owned())];
            Arc::new(HandlerMeter {
                runs: each(&self.runs, "outcome", Ended::NAMES, &labels),
                run_seconds: self.run_seconds.get_or_create_owned(&labels),
                steps: each(&self.steps, "outcome", StepEnded::NAMES, &labels),
                step_seconds: self.step_seconds.get_or_create_owned(&labels),
            })
        });
        Arc::clone(made)
    }

    /// What is counted of a queue; to be kept by who counts.
    pub(crate) fn queue(&self, name: &str) -> Arc<QueueMeter> {
        let mut known = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let made = known.entry(name.to_owned()).or_insert_with(|| {
            let labels = vec![("queue", name.to_owned())];
            Arc::new(QueueMeter {
                claimed: self.claimed.get_or_create_owned(&labels),
                wait: self.queue_wait.get_or_create_owned(&labels),
            })
        });
        Arc::clone(made)
    }

    /// What is counted of a subscriber; to be kept by who counts.
    pub(crate) fn subscriber(&self, name: &str) -> SubscriberMeter {
        let labels = vec![("subscriber", name.to_owned())];
        let [handled, failed, refused] = each(&self.subscribed, "outcome", SubscriberMeter::NAMES, &labels);
        let behind = self.subscriber_behind.get_or_create_owned(&labels);
        SubscriberMeter { handled, failed, refused, behind }
    }

    pub(crate) fn submitted(&self, answer: &Result<Accepted, SubmitRefused>) {
        let what = match answer {
            Ok(accepted) if accepted.new => Submitted::New,
            Ok(_) => Submitted::Known,
            Err(SubmitRefused::QueueFull { .. }) => Submitted::QueueFull,
            Err(SubmitRefused::OutboxFull { .. }) => Submitted::OutboxFull,
            Err(SubmitRefused::SubscriberBehind { .. }) => Submitted::SubscriberBehind,
            Err(SubmitRefused::KeyConflict { .. }) => Submitted::KeyConflict,
            Err(SubmitRefused::UnknownHandler { .. }) => Submitted::UnknownHandler,
            Err(SubmitRefused::ParentEnded { .. }) => Submitted::ParentEnded,
            Err(SubmitRefused::Invalid(_)) => Submitted::Invalid,
        };
        self.submitted[what as usize].inc();
    }

    /// A transaction of so many entries was asked for and answered.
    pub(crate) fn batch(&self, kind: Batch, entries: usize, took: Duration) {
        let meter = &self.batch_meters[kind as usize];
        meter.batches.inc();
        meter.entries.inc_by(entries as u64);
        meter.seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn swept(&self, swept: &Swept) {
        self.sweeps.inc();
        let Swept { expired, due, told, removed, ticks, locks, next_due_in: _ } = *swept;
        // In the order of `SWEPT`.
        for (counter, count) in self.swept_counters.iter().zip([expired, due, told, removed, ticks, locks]) {
            counter.inc_by(count as u64);
        }
    }

    pub(crate) fn checkpoint(&self, what: Checkpointed) {
        self.checkpointed[what as usize].inc();
    }

    /// Makes everything known to a registry.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "submits",
            "Tasks that clients and runs submitted, by what became of it",
            self.submits.clone(),
        );
        registry.register("claims", "Times a worker asked for tasks", self.claims.clone());
        registry.register("tasks_claimed", "Tasks that workers got", self.claimed.clone());
        let help = "How long claimed tasks had stood ready in line";
        registry.register("queue_wait_seconds", help, self.queue_wait.clone());
        registry.register("runs", "Runs that ended, by how", self.runs.clone());
        registry.register("run_duration_seconds", "How long runs took", self.run_seconds.clone());
        registry.register("steps", "Steps and tries of steps that ended, by how", self.steps.clone());
        let help = "How long the effects of steps took, each try on its own";
        registry.register("step_duration_seconds", help, self.step_seconds.clone());
        registry.register("store_batches", "Transactions that were shared", self.batches.clone());
        registry.register("store_batch_entries", "Entries of these transactions", self.batch_entries.clone());
        let help = "How long these transactions took";
        registry.register("store_batch_duration_seconds", help, self.batch_seconds.clone());
        registry.register("heartbeats", "Times a worker extended its leases", self.heartbeats.clone());
        registry.register(
            "leases_lost",
            "Leases that were another's before their run ended",
            self.leases_lost.clone(),
        );
        registry.register("sweeps", "Times this process looked for what is due", self.sweeps.clone());
        registry.register("swept", "What these sweeps did", self.swept.clone());
        registry.register("checkpoints", "Checkpoints, by what became of them", self.checkpoints.clone());
        let help = "Events that subscribers of this process were given, by what became of it";
        registry.register("subscriber_events", help, self.subscribed.clone());
        let help = "Age of the oldest event that a subscriber of this process has read and not handled";
        registry.register("subscriber_behind_seconds", help, self.subscriber_behind.clone());
    }
}
