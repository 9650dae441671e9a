//! Tasks in: a topic of the bus whose messages are submits.
//!
//! A message is JSON as in `POST /v1/tasks`, or a CloudEvent with that as its data. It is acknowledged when the task is on
//! disk. Its id is the task's key, so that a message that comes again is the same task. One that can never be a task goes to
//! the dead letters, with the reason. When the queue is full, or the store is away, nothing is lost and nothing more is taken
//! for a while.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longhaul::outbox::ReplyTo;
use longhaul::request::{self, NoHandler, Submit};
use longhaul::store::{StoreError, SubmitRefused};
use longhaul::task::Invalid;
use longhaul::{Client, Error, NewTask};
use prometheus_client::registry::Registry;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::bus::{Bus, BusError, Consumer, Delivery, Message, Subscription, Topic};
use crate::cloud_event;
use crate::meter::{IntakeMeter, TakenIn};
use crate::outage::Outage;

/// The longest key of a task.
const MAX_KEY: usize = 255;
/// How long is waited when the store is away, and how long for what it refuses without a reason we know.
const STORE_AWAY: Duration = Duration::from_secs(1);
const STORE_FAILED: Duration = Duration::from_secs(10);
/// The shortest and the longest pause while the broker is away.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How tasks are taken in.
#[derive(Clone, Debug)]
pub struct IntakeSettings {
    /// From where.
    pub topic: Topic,
    /// The group that shares the work; every process of a cluster has the same.
    pub group: String,
    /// How many messages are under way at once.
    pub in_flight: usize,
    /// How long a message may stay unsettled before another process gets it.
    pub ack_wait: Duration,
    /// What runs a task that does not say; without, the only handler there is.
    pub default_handler: Option<String>,
}

impl IntakeSettings {
    /// Tasks from this topic, everything else by default.
    pub fn new(topic: Topic) -> Self {
        let group = "longhaul".to_owned();
        Self { topic, group, in_flight: 256, ack_wait: Duration::from_secs(60), default_handler: None }
    }
}

/// What an intake has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntakeCounts {
    /// Messages that became tasks.
    pub new: u64,
    /// Messages whose task was there already.
    pub known: u64,
    /// Messages that went to the dead letters.
    pub rejected: u64,
    /// Times a message was put off.
    pub put_off: u64,
}

/// Takes tasks in.
pub struct Intake;

impl Intake {
    /// Starts to take in tasks for the client's tenant. Fails at once when the topic cannot be consumed.
    pub async fn start(
        client: &Client,
        bus: Arc<dyn Bus>,
        settings: IntakeSettings,
    ) -> Result<IntakeHandle, BusError> {
        let what = Subscription {
            topic: settings.topic.clone(),
            group: settings.group.clone(),
            in_flight: settings.in_flight,
            ack_wait: settings.ack_wait,
        };
        let consumer = bus.consume(&what).await?;
        let meter = IntakeMeter::default();
        let taking = Arc::new(Taking {
            client: client.clone(),
            settings,
            meter: meter.clone(),
            until: Mutex::new(Instant::now()),
        });
        let (stop, stopping) = watch::channel(false);
        let task = tokio::spawn(run(taking, consumer, stopping));
        Ok(IntakeHandle { task, stop, meter })
    }
}

/// A running intake. Dropped, it stops at once; what was under way is taken in by others, or later, once.
pub struct IntakeHandle {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
    meter: IntakeMeter,
}

impl IntakeHandle {
    /// Takes nothing more, waits for what is under way, and ends.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        // It ends by itself; a panic in it was told already.
        let _ = (&mut self.task).await;
    }

    /// What was done so far.
    pub fn counts(&self) -> IntakeCounts {
        let read = |what| self.meter.read(what);
        IntakeCounts {
            new: read(TakenIn::New),
            known: read(TakenIn::Known),
            rejected: read(TakenIn::Rejected),
            put_off: read(TakenIn::PutOff),
        }
    }

    /// Makes what it counts known to a registry.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.meter.register(registry);
    }
}

impl Drop for IntakeHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The loop: takes messages, as long as nothing says to wait, and settles each in a task of its own.
async fn run(taking: Arc<Taking>, mut consumer: Box<dyn Consumer>, mut stopping: watch::Receiver<bool>) {
    let mut jobs = JoinSet::new();
    let (mut pause, mut outage) = (SHORTEST_PAUSE, Outage::default());
    loop {
        let until = taking.until();
        let next = async {
            tokio::time::sleep_until(until).await;
            consumer.next().await
        };
        tokio::select! {
            biased;
            // The sender is the handle, whose drop ends this task.
            _ = stopping.changed() => break,
            Some(ended) = jobs.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "taking in a task broke off; its message comes again");
                }
            }
            taken = next => match taken {
                Ok(delivery) => {
                    pause = SHORTEST_PAUSE;
                    if let Some(after) = outage.over() {
                        tracing::warn!(?after, "tasks are taken in again");
                    }
                    let taking = Arc::clone(&taking);
                    jobs.spawn(async move { taking.take(delivery).await });
                }
                Err(error) => {
                    match outage.met() {
                        true => tracing::warn!(%error, "no tasks can be taken in; trying again"),
                        false => tracing::debug!(%error, "no tasks can be taken in"),
                    }
                    taking.wait_for(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            },
        }
    }
    while jobs.join_next().await.is_some() {}
    consumer.close().await;
}

struct Taking {
    client: Client,
    settings: IntakeSettings,
    meter: IntakeMeter,
    /// Nothing is taken before.
    until: Mutex<Instant>,
}

/// Why a message does not become a task.
#[derive(Debug)]
enum Not {
    /// Never: it is a dead letter.
    Ever(String),
    /// Not now.
    Now(Duration, String),
}

impl From<Invalid> for Not {
    fn from(invalid: Invalid) -> Self {
        Self::Ever(format!("'{}' {}", invalid.field, invalid.problem))
    }
}

impl From<Error> for Not {
    fn from(error: Error) -> Self {
        let why = error.to_string();
        match error {
            Error::Refused(
                SubmitRefused::QueueFull { retry_after, .. }
                | SubmitRefused::OutboxFull { retry_after, .. }
                | SubmitRefused::SubscriberBehind { retry_after, .. },
            ) => Self::Now(retry_after, why),
            Error::Store(StoreError::Unavailable(_)) => Self::Now(STORE_AWAY, why),
            Error::Store(_) => Self::Now(STORE_FAILED, why),
            _ => Self::Ever(why),
        }
    }
}

impl Taking {
    fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for(&self, time: Duration) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = (*until).max(Instant::now() + time);
    }

    async fn take(&self, delivery: Delivery) {
        let (what, settled) = match self.submit(&delivery).await {
            Ok(new) => (if new { TakenIn::New } else { TakenIn::Known }, delivery.ack().await),
            Err(Not::Ever(why)) => {
                tracing::warn!(topic = %self.settings.topic, id = delivery.message.id, why, "a message is no task");
                (TakenIn::Rejected, delivery.reject(&why).await)
            }
            Err(Not::Now(after, why)) => {
                tracing::debug!(why, "a message waits");
                self.wait_for(after);
                (TakenIn::PutOff, delivery.redeliver(after).await)
            }
        };
        self.meter.count(what);
        if let Err(error) = settled {
            tracing::debug!(%error, "a message was not settled; it comes again");
        }
    }

    /// Whether it became a new task.
    async fn submit(&self, delivery: &Delivery) -> Result<bool, Not> {
        let task = self.task(&delivery.message, delivery.position.as_deref()).await?;
        Ok(self.client.submit(task).await?.new)
    }

    /// The task that a message asks for.
    async fn task(&self, message: &Message, position: Option<&str>) -> Result<NewTask, Not> {
        let incoming = cloud_event::read(message).map_err(Not::Ever)?;
        let submit: Submit =
            request::read(incoming.data.as_bytes()).map_err(|error| Not::Ever(error.to_string()))?;
        let mut task = submit.into_task(async || self.default_handler().await).await?;
        if task.key.is_none() {
            let id = match &incoming.identity {
                Some((source, id)) => Some(format!("{source} {id}")),
                None => message.id.clone().filter(|id| !id.is_empty()).or_else(|| position.map(str::to_owned)),
            };
            let id = id.ok_or_else(|| {
                let why = "the message has no id; set the property message_id, so that it is one task however often it comes";
                Not::Ever(why.to_owned())
            })?;
            task.key = Some(key(id));
        }
        if task.reply.is_none() {
            let correlation_id = message.correlation_id.clone().filter(|id| !id.is_empty());
            task.reply = message.reply_to.clone().map(|to| ReplyTo { to, correlation_id });
        }
        task.traceparent = incoming.traceparent.or_else(|| message.header("traceparent").map(str::to_owned));
        task.validate()?;
        Ok(task)
    }

    async fn default_handler(&self) -> Result<String, Not> {
        if let Some(handler) = &self.settings.default_handler {
            return Ok(handler.clone());
        }
        request::only_handler(&self.client).await.map_err(|none| match none {
            NoHandler::Client(error) => error.into(),
            other => Not::Ever(format!("'handler' {other}")),
        })
    }
}

/// The key of a message with this id: the id, or what stands for one that is too long.
fn key(id: String) -> String {
    if id.len() <= MAX_KEY && !id.contains('\0') {
        return id;
    }
    let digest = Sha256::digest(id.as_bytes());
    digest.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_is_no_key_is_stood_for() {
        assert_eq!(key("a".to_owned()), "a");
        let long = key("x".repeat(300));
        assert!(long.starts_with("sha256:") && long.len() == 71, "{long}");
        assert_ne!(long, key("x".repeat(301)));
    }
}
