//! Subscribers: async handlers of events that never miss one.
//!
//! A subscriber has a name, and under that name a durable place in the log of all tasks: after a restart, a
//! crash or a week it goes on where it was. Any number of processes may start it; one at a time runs it, and
//! another takes over within seconds when that one dies. It reads beside the tasks and never holds them up.
//!
//! `subscriber/hold.rs` takes and keeps the place, `subscriber/read.rs` reads from it, `subscriber/deliver.rs`
//! calls the handler and tries again.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::client::{Client, Error};
use crate::engine::Engine;
use crate::error::TaskError;
use crate::event::Event;
use crate::faults;
use crate::feed::patterns::Patterns;
use crate::meter::SubscriberMeter;
use crate::retry::RetryPolicy;
use crate::store::SubscriberInfo;
use crate::store::feed::Place;
use crate::store::subscribers::NewSubscriber;
use crate::task::Invalid;

mod deliver;
mod hold;
mod read;

/// The longest name.
const MAX_NAME: usize = 128;
/// The most events of one batch.
const MAX_BATCH: usize = 10_000;
/// The most tasks whose events are handled side by side.
const MAX_CONCURRENCY: usize = 1_024;

/// An event, and whose task it is of.
#[derive(Clone, Debug)]
pub struct Told {
    /// The owner of the task.
    pub tenant: Arc<str>,
    /// What happened.
    pub event: Event,
}

type Handled = Pin<Box<dyn Future<Output = Result<(), TaskError>> + Send>>;

/// What is called.
#[derive(Clone)]
enum Handler {
    /// For each event.
    Each(Arc<dyn Fn(Told) -> Handled + Send + Sync>),
    /// For many at once.
    Batches(Arc<dyn Fn(Arc<[Told]>) -> Handled + Send + Sync>),
}

/// A durable subscriber of events, in the making; see [`Client::subscriber`].
///
/// Every event is given at least once, those of a task in their order. When a process dies between handling an
/// event and noting that it did, the event is given again: its task and number are then the same.
#[must_use = "a subscriber hears nothing until it is started"]
pub struct Subscriber {
    client: Client,
    name: String,
    patterns: Patterns,
    all_tenants: bool,
    from_start: bool,
    batch: usize,
    concurrency: usize,
    lease: Duration,
    retry: RetryPolicy,
    max_behind: Option<Duration>,
}

impl Client {
    /// A durable subscriber of this name, for events of this tenant's tasks. Its name stands for its place:
    /// started again, it goes on where it was.
    ///
    /// ```
    /// use longhaul::{Client, NewTask, Run, TaskError, Told, Worker};
    /// use tokio::sync::mpsc;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = Client::open("memory:").await?;
    /// let (cleaned, mut hosts) = mpsc::channel(8);
    /// let notifier = client
    ///     .subscriber("notifier")
    ///     .types(["disk.cleaned"])?
    ///     .start(move |told: Told| {
    ///         let cleaned = cleaned.clone();
    ///         // An error is tried again, with longer and longer pauses.
    ///         async move { Ok(cleaned.send(told.event.data["host"].to_string()).await?) }
    ///     })
    ///     .await?;
    ///
    /// let clean = async |run: Run, host: String| {
    ///     run.publish("disk.cleaned", &serde_json::json!({ "host": host })).await?;
    ///     Ok::<_, TaskError>("done")
    /// };
    /// let worker = Worker::new(&client).handler("clean", clean).start().await?;
    /// client.submit(NewTask::new("clean", &"web-1")).await?;
    /// assert_eq!(hosts.recv().await.as_deref(), Some("\"web-1\""));
    ///
    /// notifier.stop().await;
    /// worker.stop().await;
    /// # Ok(())
    /// # }
    /// ```
    pub fn subscriber(&self, name: impl Into<String>) -> Subscriber {
        Subscriber {
            client: self.clone(),
            name: name.into(),
            patterns: Patterns::default(),
            all_tenants: false,
            from_start: false,
            batch: 1_000,
            concurrency: 1,
            lease: Duration::from_secs(6),
            retry: RetryPolicy {
                attempts: u32::MAX,
                first: Duration::from_millis(500),
                cap: Duration::from_secs(60),
                jitter: true,
            },
            max_behind: Some(Duration::from_secs(3 * 86_400)),
        }
    }

    /// All subscribers of the store, by name.
    pub async fn subscribers(&self) -> Result<Vec<SubscriberInfo>, Error> {
        Ok(self.engine.store.subscribers().await?)
    }

    /// Forgets a subscriber and its place, whoever runs it; says whether there was one. What it has not
    /// passed is no longer kept for it.
    pub async fn remove_subscriber(&self, name: &str) -> Result<bool, Error> {
        Ok(self.engine.store.remove_subscriber(name).await?)
    }
}

impl Subscriber {
    /// Only events of these types: exact ones (`task.completed`), or all that begin so (`disk.*`, `*`). Others
    /// are passed by.
    pub fn types<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Result<Self, Invalid> {
        self.patterns = Patterns::new(patterns)?;
        Ok(self)
    }

    /// The events of every tenant's tasks, not only of this client's.
    pub fn all_tenants(mut self) -> Self {
        self.all_tenants = true;
        self
    }

    /// When it is new, it begins with the oldest event that is kept, instead of with what happens from now on.
    pub fn from_start(mut self) -> Self {
        self.from_start = true;
        self
    }

    /// How many events [`Subscriber::start_batches`] gives at once, at most: 1,000, unless said otherwise.
    pub fn batch(mut self, most: usize) -> Self {
        self.batch = most.clamp(1, MAX_BATCH);
        self
    }

    /// Of how many tasks [`Subscriber::start`] handles events side by side: 1, unless said otherwise.
    pub fn concurrency(mut self, most: usize) -> Self {
        self.concurrency = most.clamp(1, MAX_CONCURRENCY);
        self
    }

    /// After which time without a word another process may take over. 6 s, unless said otherwise; a word is
    /// given every third of it.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.max(Duration::from_millis(30));
        self
    }

    /// The pause after a handler's first error, which doubles with each further one, and the longest: 500 ms
    /// and a minute, unless said otherwise.
    pub fn back_off(mut self, first: Duration, longest: Duration) -> Self {
        (self.retry.first, self.retry.cap) = (first, longest.max(first));
        self
    }

    /// How old the oldest event that it has not passed may be before submits are refused, so that what is kept
    /// for it does not grow without bound: three days, unless said otherwise. `Duration::MAX`: for ever.
    pub fn max_behind(mut self, age: Duration) -> Self {
        self.max_behind = (age < Duration::MAX).then_some(age);
        self
    }

    /// Starts to give each event to `handler`: those of one task one after another, those of different tasks
    /// side by side if [`Subscriber::concurrency`] says so.
    ///
    /// An error is tried again after a pause; the task's later events wait for it, those of other tasks only
    /// when they are many. One that trying again cannot mend ([`TaskError::fatal`]) is told in the log and
    /// passed by.
    pub async fn start<F, Fut>(self, handler: F) -> Result<SubscriberHandle, Error>
    where
        F: Fn(Told) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), TaskError>> + Send + 'static,
    {
        self.run(Handler::Each(Arc::new(move |told| Box::pin(handler(told))))).await
    }

    /// Starts to give events to `handler` in batches, in the order in which they became visible. After any
    /// error the same batch is given again, after a pause.
    pub async fn start_batches<F, Fut>(self, handler: F) -> Result<SubscriberHandle, Error>
    where
        F: Fn(Arc<[Told]>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), TaskError>> + Send + 'static,
    {
        self.run(Handler::Batches(Arc::new(move |batch| Box::pin(handler(batch))))).await
    }

    async fn run(self, handler: Handler) -> Result<SubscriberHandle, Error> {
        let plain = !self.name.is_empty() && self.name.len() <= MAX_NAME && !self.name.contains(char::is_control);
        if !plain {
            let problem = format!("must have 1 to {MAX_NAME} bytes and no control characters");
            return Err(Invalid::new("name", problem).into());
        }
        let engine = Arc::clone(&self.client.engine);
        let at = if self.from_start { Place::START } else { engine.store.feed_now().await? };
        let tenant = (!self.all_tenants).then(|| self.client.tenant.to_string());
        let new = NewSubscriber { name: self.name.clone(), tenant, at, max_behind: self.max_behind };
        engine.store.begin_subscriber(&new).await??;
        let meter = engine.meter.subscriber(&self.name);
        let shared = Arc::new(Shared {
            engine: Arc::downgrade(&engine),
            meter,
            handled: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            holding: AtomicBool::new(false),
            oldest: AtomicI64::new(0),
        });
        let (stop, stopping) = watch::channel(false);
        let holder = hold::Holder::new(engine, self, handler, Arc::clone(&shared), stopping);
        Ok(SubscriberHandle { task: tokio::spawn(faults::of_process(holder.run())), stop, shared })
    }
}

/// What a running subscriber shows of itself.
struct Shared {
    engine: Weak<Engine>,
    /// Counts for all of this name in this process; the others are of this one alone.
    meter: SubscriberMeter,
    handled: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    holding: AtomicBool,
    /// The time of the oldest event that was read and not handled, microseconds; 0 when there is none.
    oldest: AtomicI64,
}

impl Shared {
    /// How old the oldest event is that was read and not handled.
    fn behind(&self) -> Duration {
        let oldest = self.oldest.load(Ordering::Relaxed);
        match self.engine.upgrade() {
            Some(engine) if oldest > 0 => {
                let age = engine.store.clock().now_micros() - oldest;
                Duration::from_micros(age.max(0).unsigned_abs())
            }
            _ => Duration::ZERO,
        }
    }

    /// Shows the newest.
    fn show(&self) {
        self.meter.behind.set(self.behind().as_secs_f64());
    }

    /// So many events were handled.
    fn handled(&self, count: usize) {
        self.handled.fetch_add(count as u64, Ordering::Relaxed);
        self.meter.handled.inc_by(count as u64);
    }

    /// A call failed and is made again.
    fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.meter.failed.inc();
    }

    /// An event is passed by.
    fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.meter.refused.inc();
    }
}

/// What a subscriber of this process has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubscriberStats {
    /// Whether this process runs it now; else another does, or nobody can.
    pub holding: bool,
    /// Events that were handled here.
    pub handled: u64,
    /// Calls that failed and are made again.
    pub failed: u64,
    /// Events that were passed by because the handler's error was fatal.
    pub refused: u64,
    /// How old the oldest event is that was read and not handled; zero when all are.
    pub behind: Duration,
}

/// A running subscriber. Dropped, it stops at once, and another process takes over when its lease is over;
/// [`SubscriberHandle::stop`] is kinder.
pub struct SubscriberHandle {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
    shared: Arc<Shared>,
}

impl SubscriberHandle {
    /// Waits for the calls under way (at most ten seconds), notes how far it has come, lets others take over
    /// at once, and ends.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        // It ends by itself; a panic in it was told already.
        let _ = (&mut self.task).await;
    }

    /// What was done so far.
    pub fn stats(&self) -> SubscriberStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        SubscriberStats {
            holding: self.shared.holding.load(Ordering::Relaxed),
            handled: read(&self.shared.handled),
            failed: read(&self.shared.failed),
            refused: read(&self.shared.refused),
            behind: self.shared.behind(),
        }
    }
}

impl Drop for SubscriberHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}
