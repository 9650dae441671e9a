//! The broker and the lock service of a process, as they are configured.
//!
//! A broker that is away stops nothing, neither at the start: what is to be told is kept, and everything begins when it
//! answers. A URL that can never work, or a broker that does not let us in, is told at once.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use longhaul::outbox::{Replies, Reply, ReplyError};
use longhaul::{Client, LockServiceError};
use longhaul_bus::{
    Bus, BusError, BusReplies, Hints, HintsHandle, Intake, IntakeHandle, IntakeSettings, Mode, Publisher,
    PublisherHandle, PublisherSettings, ReplyAddresses, Topic,
};
use longhaul_server::App;
use tokio::task::JoinHandle;

use crate::config::{self, Config, EventForm};
use crate::exit::Failure;

/// The subscriber that publishes.
pub(crate) const SUBSCRIBER: &str = "bus";
/// The pause before a broker that was away at the start is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// How long nothing more is said of a broker that is away.
const QUIET: Duration = Duration::from_secs(60);

impl From<BusError> for Failure {
    fn from(error: BusError) -> Self {
        match error {
            BusError::Invalid(_) => Self::usage(error.to_string()),
            BusError::Denied { .. } | BusError::Unreachable { .. } | BusError::Failed { .. } => {
                Self::internal(error.to_string())
            }
        }
    }
}

/// Gives the client the lock service that is configured.
pub(crate) async fn use_locks(client: &Client, config: &Config) -> Result<(), Failure> {
    let Some(url) = &config.locks.url else { return Ok(()) };
    let service = longhaul_bus::locks::connect(url).await.map_err(|error| match error {
        LockServiceError::Url(why) => Failure::usage(why),
        other => {
            let remedy = lock_remedy(&other);
            Failure::internal(format!("{other}; {remedy}"))
        }
    })?;
    match service {
        Some(service) => client.use_lock_service(service).await?,
        None => client.use_store_locks().await?,
    }
    Ok(())
}

/// What to do about a lock service.
pub(crate) fn lock_remedy(error: &LockServiceError) -> &'static str {
    match error {
        LockServiceError::Unavailable { .. } => "start it, or correct --locks, LONGHAUL_LOCKS or locks.url",
        LockServiceError::Refused { .. } => {
            "correct the user and the password in --locks, LONGHAUL_LOCKS or locks.url, or let it do what is asked"
        }
        LockServiceError::Url(_) => "correct --locks, LONGHAUL_LOCKS or locks.url",
    }
}

/// What to do about a broker.
pub(crate) fn bus_remedy(error: &BusError) -> &'static str {
    match error {
        BusError::Unreachable { .. } => "start it, or correct --bus, LONGHAUL_BUS or bus.url",
        BusError::Denied { .. } => {
            "correct the user and the password in --bus, LONGHAUL_BUS or bus.url, or let the broker allow it"
        }
        BusError::Failed { .. } => "see what the broker's log says",
        BusError::Invalid(_) => "correct --bus, LONGHAUL_BUS or bus.url",
    }
}

/// What a process does on the bus, from its start to its end.
pub(crate) struct OnBus {
    there: Arc<There>,
    /// Taken when it begins.
    opening: Mutex<Option<Opening>>,
    begun: OnceLock<JoinHandle<()>>,
}

/// What is to begin.
struct Opening {
    client: Client,
    plan: Plan,
    /// `None` when the broker was away.
    bus: Option<Arc<dyn Bus>>,
    app: Option<App>,
}

/// What begins when the broker answers.
#[derive(Default)]
struct There {
    replies: OnceLock<BusReplies>,
    running: Mutex<Option<Running>>,
}

struct Running {
    publisher: PublisherHandle,
    intake: Option<IntakeHandle>,
    _hints: HintsHandle,
}

/// What is done, read from the configuration.
struct Plan {
    url: String,
    events: PublisherSettings,
    tasks: Option<IntakeSettings>,
    tenant: String,
    replies: ReplyAddresses,
    mode: Mode,
    /// The channel of hints, of this store alone.
    channel: String,
    replaces_notify: bool,
}

impl Plan {
    async fn new(client: &Client, bus: &config::Bus, default_handler: Option<&String>) -> Result<Self, Failure> {
        let mode = match bus.form {
            EventForm::Structured => Mode::Structured,
            EventForm::Binary => Mode::Binary,
        };
        let events = PublisherSettings {
            types: bus.types.clone(),
            mode,
            max_behind: bus.max_behind,
            subscriber: SUBSCRIBER.to_owned(),
            ..PublisherSettings::new(Topic::log(&bus.events)?)
        };
        let tasks = bus.tasks.as_deref().map(Topic::queue).transpose()?.map(|topic| IntakeSettings {
            default_handler: default_handler.cloned(),
            ack_wait: bus.ack_wait,
            ..IntakeSettings::new(topic)
        });
        Ok(Self {
            url: bus.url.clone(),
            events,
            tasks,
            tenant: bus.tenant.clone(),
            replies: match bus.replies.as_slice() {
                [] => ReplyAddresses::default(),
                others => ReplyAddresses::new(others),
            },
            mode,
            channel: format!("longhaul.hints.{}", client.store_name().await?),
            replaces_notify: bus.replaces_notify,
        })
    }

    async fn begin(&self, client: &Client, bus: Arc<dyn Bus>, there: &There) -> Result<Running, Failure> {
        let relay = if self.replaces_notify { client.relay().instead_of_notify() } else { client.relay() };
        let hints = Hints::start(relay, Arc::clone(&bus), &self.channel).await?;
        let publisher = Publisher::start(client, Arc::clone(&bus), self.events.clone()).await?;
        let intake = match &self.tasks {
            Some(tasks) => {
                Some(Intake::start(&client.for_tenant(&self.tenant), Arc::clone(&bus), tasks.clone()).await?)
            }
            None => None,
        };
        // Once in a process.
        let _ = there.replies.set(BusReplies::new(bus).mode(self.mode).allow(self.replies.clone()));
        Ok(Running { publisher, intake, _hints: hints })
    }
}

impl OnBus {
    /// Gets ready for what is configured; what it counts is shown by `app`. `None` without a bus.
    pub(crate) async fn start(
        client: &Client,
        config: &Config,
        app: Option<App>,
    ) -> Result<Option<Self>, Failure> {
        let Some(bus) = &config.bus else {
            without(client, app.is_some()).await?;
            return Ok(None);
        };
        let plan = Plan::new(client, bus, config.server.default_handler.as_ref()).await?;
        let replies = plan.replies.clone();
        client.check_replies(Arc::new(move |to| replies.check(to)));
        let there = Arc::new(There::default());
        Publisher::keep_place(client, &plan.events).await?;
        let bus = match longhaul_bus::connect(&plan.url).await {
            // Told when it is tried again.
            Err(BusError::Unreachable { .. }) => None,
            opened => Some(opened?),
        };
        let opening = Opening { client: client.clone(), plan, bus, app };
        Ok(Some(Self { there, opening: Mutex::new(Some(opening)), begun: OnceLock::new() }))
    }

    /// Begins. By now the handlers of this process are known to the store: a task that comes in finds its own.
    pub(crate) fn begin(&self) {
        let opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(opening) = opening {
            self.begun.get_or_init(|| tokio::spawn(open(opening, Arc::clone(&self.there))));
        }
    }

    /// Delivers results.
    pub(crate) fn replies(&self) -> Arc<dyn Replies> {
        Arc::clone(&self.there) as Arc<dyn Replies>
    }

    /// Ends after what is under way; others go on at once.
    pub(crate) async fn stop(self) {
        if let Some(begun) = self.begun.into_inner() {
            begun.abort();
            // Ended, one way or the other: what it began is in `running`.
            let _ = begun.await;
        }
        let running = self.there.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Running { publisher, intake, _hints }) = running {
            if let Some(intake) = intake {
                intake.stop().await;
            }
            publisher.stop().await;
        }
    }
}

/// What a process without a bus has to say.
async fn without(client: &Client, server: bool) -> Result<(), Failure> {
    if server {
        let why = "needs a broker, and this server has none; start it with --bus URL";
        client.check_replies(Arc::new(move |_| Err(why.to_owned())));
    }
    let left = client.subscribers().await?.into_iter().find(|known| known.name == SUBSCRIBER);
    if left.is_some_and(|left| left.held_by.is_none()) {
        tracing::warn!(
            "the store keeps events for a broker, and no process has one now: start one with --bus, or let go of them with \
             'longhaul subscribers remove {SUBSCRIBER}'"
        );
    }
    Ok(())
}

impl There {
    fn set(&self, running: Running, app: Option<&App>) {
        if let Some(app) = app {
            app.metrics().show_too(|registry| {
                running.publisher.register_metrics(registry);
                if let Some(intake) = &running.intake {
                    intake.register_metrics(registry);
                }
            });
        }
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }
}

/// Connects, if that is still to be done, and begins; again and again, until both went well.
async fn open(opening: Opening, there: Arc<There>) {
    let Opening { client, plan, mut bus, app } = opening;
    let mut told_at: Option<Instant> = None;
    loop {
        let opened = match bus.take() {
            Some(bus) => Ok(bus),
            None => longhaul_bus::connect(&plan.url).await.map_err(Failure::from),
        };
        let begun = match opened {
            Ok(bus) => plan.begin(&client, bus, &there).await,
            Err(error) => Err(error),
        };
        match begun {
            Ok(running) => {
                if told_at.is_some() {
                    tracing::warn!("the bus is there");
                }
                return there.set(running, app.as_ref());
            }
            Err(error) if told_at.is_none_or(|at| at.elapsed() >= QUIET) => {
                told_at = Some(Instant::now());
                tracing::warn!(%error, "without the bus; it is tried again");
            }
            Err(error) => tracing::debug!(%error, "without the bus"),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

#[async_trait]
impl Replies for There {
    async fn send(&self, reply: &Reply) -> Result<(), ReplyError> {
        match self.replies.get() {
            Some(replies) => replies.send(reply).await,
            None => Err(ReplyError::Failed("the bus is not there yet".to_owned())),
        }
    }
}
