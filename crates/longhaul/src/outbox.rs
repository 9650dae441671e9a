//! The outbox: tells others what happens to tasks, by webhooks and replies.
//!
//! The store knows which lines (a task and one of its destinations) have something to send; see
//! `store/outbox.rs`. Here is who sends: a loop that takes due lines, a bounded number of deliveries
//! under way, and the rules of trying again (`outbox/line.rs`). Any number of processes may run one
//! at a time on the same store. What a process that is killed had taken is due again a minute later.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{Id, JoinError, JoinHandle, JoinSet};
use uuid::Uuid;

mod address;
mod client;
mod line;
pub(crate) mod reply;
mod secret;
mod target;
mod webhook;

pub use address::IpRange;
pub use reply::{Replies, Reply, ReplyError, ReplyRule, ReplyTo};
pub use secret::WebhookSecret;
pub use target::{Endpoint, MAX_ENDPOINTS, Webhook};
pub(crate) use target::{check_endpoint, too_many_endpoints};

use crate::client::{Client, Error};
use crate::engine::Engine;
use crate::store::StoreError;
use crate::store::outbox::{DEFAULT_MAX_DUE, Due, TakeDue};
use address::Rules;
use line::Deliverer;
use webhook::Sender;

/// The longest pause between looks: how late something is that no hint told of.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The shortest pause after a look that found nothing: however busy the store is, looking stays cheap.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause while the store does not answer.
const MOST_PATIENCE: Duration = Duration::from_secs(5);

/// How an outbox sends.
#[derive(Clone)]
pub struct OutboxSettings {
    /// What signs: with each of them, so that receivers can change over from one to the next. Without
    /// any, the store's own ([`Client::webhook_secret`]).
    pub secrets: Vec<WebhookSecret>,
    /// Addresses that may be called although they are not of the open internet.
    pub allow: Vec<IpRange>,
    /// Whether this host itself may be called.
    pub allow_loopback: bool,
    /// How many tasks' lines may have something to send before submits that would add to them are
    /// refused.
    pub max_due: u64,
    /// How many deliveries are under way at once.
    pub in_flight: usize,
    /// How many of those to the same host.
    pub per_receiver: usize,
    /// How long a receiver may take to answer.
    pub timeout: Duration,
    /// The pause after the first failure; it doubles with each further one.
    pub first_retry: Duration,
    /// The longest pause between tries.
    pub longest_retry: Duration,
    /// A delivery that failed for this long is dead.
    pub give_up_after: Duration,
    /// Who takes the results of tasks submitted with [`NewTask::reply`](crate::NewTask::reply) to where they go.
    /// Without anyone they are left to outboxes of other processes.
    pub replies: Option<Arc<dyn Replies>>,
}

impl fmt::Debug for OutboxSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            secrets,
            allow,
            allow_loopback,
            max_due,
            in_flight,
            per_receiver,
            timeout,
            first_retry,
            longest_retry,
            give_up_after,
            replies,
        } = self;
        f.debug_struct("OutboxSettings")
            .field("secrets", secrets)
            .field("allow", allow)
            .field("allow_loopback", allow_loopback)
            .field("max_due", max_due)
            .field("in_flight", in_flight)
            .field("per_receiver", per_receiver)
            .field("timeout", timeout)
            .field("first_retry", first_retry)
            .field("longest_retry", longest_retry)
            .field("give_up_after", give_up_after)
            .field("replies", &replies.is_some())
            .finish()
    }
}

impl Default for OutboxSettings {
    fn default() -> Self {
        Self {
            secrets: Vec::new(),
            allow: Vec::new(),
            allow_loopback: false,
            max_due: DEFAULT_MAX_DUE,
            in_flight: 64,
            per_receiver: 8,
            timeout: Duration::from_secs(15),
            first_retry: Duration::from_secs(5),
            longest_retry: Duration::from_secs(3_600),
            give_up_after: Duration::from_secs(86_400),
            replies: None,
        }
    }
}

/// Sends what is to be sent.
///
/// ```
/// use longhaul::{Client, Outbox, OutboxSettings};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::open("memory:").await?;
/// let outbox = Outbox::start(&client, OutboxSettings::default()).await?;
/// // Every task submitted with a webhook is now told of when it ends.
/// outbox.stop().await;
/// # Ok(())
/// # }
/// ```
pub struct Outbox;

impl Outbox {
    /// Starts to send for all tenants of the client's store, until it is stopped.
    pub async fn start(client: &Client, mut settings: OutboxSettings) -> Result<OutboxHandle, Error> {
        client.engine.store.bound_outbox(settings.max_due).await?;
        if settings.secrets.is_empty() {
            settings.secrets.push(client.webhook_secret().await?);
        }
        let rules = Rules { allow: settings.allow.clone(), loopback: settings.allow_loopback };
        let (secrets, timeout) = (settings.secrets.clone(), settings.timeout);
        // Reads the system's certificates.
        let sender = tokio::task::spawn_blocking(move || Sender::new(rules, secrets, timeout)).await;
        let sender = sender.map_err(|error| error.to_string()).and_then(|sender| sender);
        let sender = sender.map_err(StoreError::Failed)?;
        let (stop, stopping) = watch::channel(false);
        let counts = Arc::new(Counts::default());
        let deliverer = Deliverer::new(&client.engine, sender, &settings, Arc::clone(&counts), stopping.clone());
        let sending = Loop {
            engine: Arc::clone(&client.engine),
            settings,
            deliverer: Arc::new(deliverer),
            jobs: JoinSet::new(),
            lanes: HashMap::new(),
            after_lane: String::new(),
        };
        Ok(OutboxHandle { task: tokio::spawn(sending.run(stopping)), stop, counts })
    }
}

/// What an outbox of this process has done so far.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    delivered: AtomicU64,
    failed: AtomicU64,
    dead: AtomicU64,
    in_flight: AtomicU64,
}

/// The same at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxCounts {
    /// Deliveries that were taken.
    pub delivered: u64,
    /// Attempts that failed and are made again.
    pub failed: u64,
    /// Deliveries that were given up.
    pub dead: u64,
    /// Lines under way.
    pub in_flight: u64,
}

/// A running outbox. Dropped, it stops at once, and what it had taken is sent a minute later by
/// others; [`OutboxHandle::stop`] is kinder.
pub struct OutboxHandle {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
    counts: Arc<Counts>,
}

impl OutboxHandle {
    /// Takes nothing more, waits for what is under way (for as long as a receiver may take), and ends.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        // It ends by itself; a panic in it was told already.
        let _ = (&mut self.task).await;
    }

    /// What was done so far.
    pub fn counts(&self) -> OutboxCounts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { delivered, failed, dead, in_flight } = &*self.counts;
        OutboxCounts {
            delivered: read(delivered),
            failed: read(failed),
            dead: read(dead),
            in_flight: read(in_flight),
        }
    }
}

impl Drop for OutboxHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Loop {
    engine: Arc<Engine>,
    settings: OutboxSettings,
    deliverer: Arc<Deliverer>,
    /// What is under way; ends with the loop.
    jobs: JoinSet<()>,
    /// The lane of each job.
    lanes: HashMap<Id, String>,
    after_lane: String,
}

impl Loop {
    async fn run(mut self, mut stopping: watch::Receiver<bool>) {
        let mut told = self.engine.hints.on_told();
        let mut patience = SHORTEST_PAUSE;
        while !*stopping.borrow() {
            told.mark_unchanged();
            let looked = self.look().await;
            let pause = match looked {
                Ok(pause) => {
                    patience = SHORTEST_PAUSE;
                    pause
                }
                Err(error) => {
                    tracing::warn!(%error, "the outbox cannot be read; trying again");
                    patience = (patience * 2).min(MOST_PATIENCE);
                    patience
                }
            };
            if !pause.is_zero() {
                tokio::time::sleep(SHORTEST_PAUSE).await;
            }
            tokio::select! {
                biased;
                Some(ended) = self.jobs.join_next_with_id() => self.ended(ended),
                // The senders live as long as the engine and the handle.
                _ = stopping.changed() => {}
                _ = told.changed() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        while let Some(ended) = self.jobs.join_next_with_id().await {
            self.ended(ended);
        }
    }

    /// Takes what is due and there is room for; gives how long there is nothing more to do.
    async fn look(&mut self) -> Result<Duration, StoreError> {
        while let Some(ended) = self.jobs.try_join_next_with_id() {
            self.ended(ended);
        }
        let room = self.settings.in_flight.max(1).saturating_sub(self.jobs.len());
        if room == 0 {
            return Ok(LONGEST_PAUSE);
        }
        match self.engine.store.next_due().await? {
            None => return Ok(LONGEST_PAUSE),
            Some(micros) if micros > 0 => {
                return Ok(Duration::from_micros(micros.unsigned_abs()).min(LONGEST_PAUSE));
            }
            Some(_) => {}
        }
        let ask = self.ask(room);
        let taken = self.engine.store.take_due(&ask).await?;
        // Another look finds what is in the lanes after these; after the last one, what came meanwhile.
        let wrapped = taken.next_lane.is_empty();
        self.after_lane = taken.next_lane;
        let nothing = taken.due.is_empty();
        for due in taken.due {
            self.begin(due, ask.owner);
        }
        // What is due now and was not taken is in lanes that are full, or with someone else.
        Ok(if nothing && wrapped { LONGEST_PAUSE } else { Duration::ZERO })
    }

    fn ask(&self, room: usize) -> TakeDue {
        let most = self.settings.per_receiver.max(1);
        let mut busy: HashMap<&str, usize> = HashMap::new();
        for lane in self.lanes.values() {
            *busy.entry(lane).or_default() += 1;
        }
        TakeDue {
            owner: Uuid::now_v7(),
            lease: self.deliverer.lease(),
            max: room,
            per_lane: most,
            busy: busy.into_iter().map(|(lane, count)| (lane.to_owned(), most.saturating_sub(count))).collect(),
            after_lane: self.after_lane.clone(),
            replies: self.settings.replies.is_some(),
        }
    }

    fn begin(&mut self, due: Due, owner: Uuid) {
        let (lane, deliverer) = (due.lane.clone(), Arc::clone(&self.deliverer));
        let job = self.jobs.spawn(async move { deliverer.deliver(due, owner).await });
        self.lanes.insert(job.id(), lane);
        self.deliverer.counts.in_flight.store(self.jobs.len() as u64, Ordering::Relaxed);
    }

    fn ended(&mut self, ended: Result<(Id, ()), JoinError>) {
        let id = match ended {
            Ok((id, ())) => id,
            Err(error) => {
                tracing::error!(%error, "a delivery broke off; it is made again");
                error.id()
            }
        };
        self.lanes.remove(&id);
        self.deliverer.counts.in_flight.store(self.jobs.len() as u64, Ordering::Relaxed);
    }
}
