//! Events out: everything that happens to tasks, of all tenants, as CloudEvents on a topic of the bus.
//!
//! The publisher is a durable subscriber of the store, so that nothing is written twice: a broker that is down only makes it
//! wait, and what happened meanwhile is read from where it was. Of all processes one at a time publishes.
//!
//! An event of a task is sent when the broker has acknowledged the one before it, so that no failure can swap two of them;
//! those of different tasks go side by side. After a failure an event may be sent again, with the same id.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longhaul::{Client, Error, Subscriber, SubscriberHandle, SubscriberStats, TaskError, TaskId, Told};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prometheus_client::registry::Registry;

use crate::bus::{Bus, NotPublished, Outgoing, To, Topic};
use crate::cloud_event::{self, Mode, event_id};
use crate::meter::PublisherMeter;

/// How often what the broker did not take is sent again before the engine is asked for the batch again.
const TRIES: usize = 3;
/// The pause before that.
const PAUSE: Duration = Duration::from_millis(100);
/// What a tenant's name is written as in a subject: one word.
const WORD: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// How events are published.
#[derive(Clone, Debug)]
pub struct PublisherSettings {
    /// Where to.
    pub topic: Topic,
    /// Which types: `task.completed`, `task.*`, `*`.
    pub types: Vec<String>,
    /// In which form.
    pub mode: Mode,
    /// The name of the subscriber in the store: another name begins anew.
    pub subscriber: String,
    /// How many events are taken from the store at once, at most 10,000.
    pub batch: usize,
    /// How far it may be behind before submits are refused.
    pub max_behind: Duration,
}

impl PublisherSettings {
    /// Everything to this topic.
    pub fn new(topic: Topic) -> Self {
        Self {
            topic,
            types: vec!["*".to_owned()],
            mode: Mode::default(),
            subscriber: "bus".to_owned(),
            batch: 4_000,
            max_behind: Duration::from_secs(3 * 86_400),
        }
    }
}

/// Publishes events.
///
/// ```
/// use std::sync::Arc;
///
/// use longhaul::Client;
/// use longhaul_bus::{Bus, MemoryBus, Publisher, PublisherSettings, Topic};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::open("memory:").await?;
/// let bus: Arc<dyn Bus> = Arc::new(MemoryBus::new()); // or longhaul_bus::connect("nats://…").await?
/// let settings = PublisherSettings::new(Topic::log("longhaul.events")?);
/// let publisher = Publisher::start(&client, bus, settings).await?;
/// // Every event of every task is now on the bus.
/// publisher.stop().await;
/// # Ok(())
/// # }
/// ```
pub struct Publisher;

impl Publisher {
    /// Keeps the place of a publisher that cannot start yet: what happens from now on is kept for it. One that has its
    /// place stays there.
    pub async fn keep_place(client: &Client, settings: &PublisherSettings) -> Result<(), Error> {
        let waiting = subscriber(client, settings)?
            .start_batches(async |_| Err(TaskError::retryable("bus", "there is no broker yet")))
            .await?;
        waiting.stop().await;
        Ok(())
    }

    /// Starts to publish the events of all tenants of the client's store: those from now on, or from where a publisher of the
    /// same name was.
    pub async fn start(
        client: &Client,
        bus: Arc<dyn Bus>,
        settings: PublisherSettings,
    ) -> Result<PublisherHandle, Error> {
        let meter = PublisherMeter::default();
        let subscriber = subscriber(client, &settings)?;
        let sending = Arc::new(Sending {
            bus,
            topic: settings.topic,
            mode: settings.mode,
            meter: meter.clone(),
            behind_us: Mutex::default(),
        });
        let subscriber = subscriber
            .start_batches(move |told| {
                let sending = Arc::clone(&sending);
                async move { sending.send(&told).await }
            })
            .await?;
        Ok(PublisherHandle { subscriber, meter })
    }
}

fn subscriber(client: &Client, settings: &PublisherSettings) -> Result<Subscriber, Error> {
    Ok(client
        .subscriber(&settings.subscriber)
        .types(settings.types.clone())?
        .all_tenants()
        .batch(settings.batch)
        .back_off(Duration::from_millis(200), Duration::from_secs(5))
        .max_behind(settings.max_behind))
}

/// A running publisher. Dropped, it stops at once, and another process goes on when its lease is over.
pub struct PublisherHandle {
    subscriber: SubscriberHandle,
    meter: PublisherMeter,
}

impl PublisherHandle {
    /// Ends after what is under way; another process goes on at once.
    pub async fn stop(self) {
        self.subscriber.stop().await;
    }

    /// What it did, and how far it is behind.
    pub fn stats(&self) -> SubscriberStats {
        self.subscriber.stats()
    }

    /// Makes what it counts known to a registry.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.meter.register(registry);
    }
}

struct Sending {
    bus: Arc<dyn Bus>,
    topic: Topic,
    mode: Mode,
    meter: PublisherMeter,
    /// The batch that is being sent, by its first and last event, and how many of its waves the broker has.
    behind_us: Mutex<(Option<(String, String)>, usize)>,
}

impl Sending {
    /// Sends a batch. After an error the same batch comes again, and goes on with the wave that failed.
    async fn send(&self, told: &[Told]) -> Result<(), TaskError> {
        let waves = waves(told);
        let done = self.begin(told);
        for (number, wave) in waves.iter().enumerate().skip(done) {
            let messages: Vec<Outgoing> = wave.iter().map(|told| self.message(told)).collect();
            self.send_wave(messages).await.map_err(|not| TaskError::retryable("bus", not.to_string()))?;
            self.behind_us.lock().unwrap_or_else(PoisonError::into_inner).1 = number + 1;
        }
        Ok(())
    }

    /// How many waves of this batch are done.
    fn begin(&self, told: &[Told]) -> usize {
        let ends =
            told.first().zip(told.last()).map(|(first, last)| (event_id(&first.event), event_id(&last.event)));
        let mut behind_us = self.behind_us.lock().unwrap_or_else(PoisonError::into_inner);
        if behind_us.0 != ends {
            *behind_us = (ends, 0);
        }
        behind_us.1
    }

    async fn send_wave(&self, mut left: Vec<Outgoing>) -> Result<(), NotPublished> {
        for last in (0..TRIES).map(|attempt| attempt + 1 == TRIES) {
            match self.bus.publish(&left).await {
                Ok(()) => {
                    self.meter.published(left.len());
                    return Ok(());
                }
                Err(not) => {
                    self.meter.published(left.len() - not.which.len());
                    self.meter.failed(not.which.len());
                    if last {
                        return Err(not);
                    }
                    let mut which = not.which.into_iter().peekable();
                    left = left
                        .into_iter()
                        .enumerate()
                        .filter_map(|(place, message)| which.next_if_eq(&place).map(|_| message))
                        .collect();
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        Ok(())
    }

    fn message(&self, told: &Told) -> Outgoing {
        let (prefix, max) = (self.bus.event_prefix(), self.bus.max_bytes());
        let message = cloud_event::message(&told.tenant, &told.event, self.mode, prefix, max);
        let subject = subject(&told.tenant, &told.event.kind);
        Outgoing { to: To::Topic { topic: self.topic.clone(), subject }, message }
    }
}

/// The finer address of an event: the tenant in one word, then the words of its type.
fn subject(tenant: &str, kind: &str) -> String {
    let mut subject = utf8_percent_encode(tenant, WORD).to_string();
    for word in kind.split('.').filter(|word| !word.is_empty()) {
        subject.push('.');
        subject.push_str(word);
    }
    subject
}

/// A batch in waves: each has at most one event of a task, and a task's are in their order.
fn waves(told: &[Told]) -> Vec<Vec<&Told>> {
    let mut waves: Vec<Vec<&Told>> = Vec::new();
    let mut next: HashMap<TaskId, usize> = HashMap::new();
    for told in told {
        let wave = next.entry(told.event.task_id).or_default();
        if *wave == waves.len() {
            waves.push(Vec::new());
        }
        waves[*wave].push(told);
        *wave += 1;
    }
    waves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(task: u128, seq: u64) -> Told {
        let event = longhaul::Event {
            seq,
            task_id: TaskId(uuid::Uuid::from_u128(task)),
            kind: "progress".to_owned(),
            time: jiff::Timestamp::UNIX_EPOCH,
            run: 0,
            step: None,
            data: serde_json::Value::Null,
        };
        Told { tenant: "default".into(), event }
    }

    #[test]
    fn a_wave_has_one_event_of_a_task_and_waves_keep_their_order() {
        let batch = [told(1, 1), told(2, 1), told(1, 2), told(1, 3), told(3, 1), told(2, 2)];
        let waves = waves(&batch);
        let shown: Vec<Vec<(u128, u64)>> = waves
            .iter()
            .map(|wave| wave.iter().map(|told| (told.event.task_id.0.as_u128(), told.event.seq)).collect())
            .collect();
        assert_eq!(shown, [vec![(1, 1), (2, 1), (3, 1)], vec![(1, 2), (2, 2)], vec![(1, 3)]]);
    }

    #[test]
    fn a_subject_has_the_tenant_in_one_word() {
        assert_eq!(subject("default", "task.completed"), "default.task.completed");
        assert_eq!(subject("acme.com", "disk.cleaned"), "acme%2Ecom.disk.cleaned");
        assert_eq!(subject("*", "a..b."), "%2A.a.b");
    }
}
