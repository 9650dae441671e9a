//! Consuming a topic of Kafka. A group has one number for each partition, how far it came; messages are settled in any
//! order, so that number only moves up to the first one that is not.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext, Rebalance, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{Inner, KEEP_BROADCASTS, Seen, message};
use crate::bus::{BusError, Consumer, Delivery, Listener, Message, Settle, Subscription, dead_letter};
use crate::held::Held;

/// How long a member of a group may be silent before its partitions are given to others.
const SESSION: Duration = Duration::from_secs(10);

/// How long is waited for a record when there was an error, and how long in all.
const AFTER_ERROR: Duration = Duration::from_millis(200);
const AFTER_ERRORS: Duration = Duration::from_secs(2);

/// The next record. librdkafka connects again by itself, and puts an error into the line of records for every try: hundreds in a
/// short outage, which say nothing any more when it is over. An error is given when nothing comes after it.
async fn receive<C: ConsumerContext + 'static>(
    consumer: &StreamConsumer<C>,
) -> Result<BorrowedMessage<'_>, KafkaError> {
    let first = match consumer.recv().await {
        Ok(record) => return Ok(record),
        Err(error) => error,
    };
    let until = Instant::now() + AFTER_ERRORS;
    while Instant::now() < until {
        match tokio::time::timeout(AFTER_ERROR, consumer.recv()).await {
            Ok(Ok(record)) => return Ok(record),
            Ok(Err(_)) => {}
            Err(_) => break,
        }
    }
    Err(first)
}

/// Where each partition stands.
#[derive(Default)]
struct Places {
    /// Grows whenever partitions come or go: what was taken before is not ours any more.
    generation: u64,
    partitions: HashMap<i32, Place>,
}

#[derive(Default)]
struct Place {
    unsettled: BTreeSet<i64>,
    /// The first offset that was not given yet.
    next: i64,
}

impl Place {
    /// The first offset that is not settled.
    fn settled_up_to(&self) -> i64 {
        self.unsettled.first().copied().unwrap_or(self.next)
    }
}

#[derive(Clone)]
struct Context {
    seen: Seen,
    places: Arc<Mutex<Places>>,
}

impl Context {
    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Context {
    fn error(&self, error: KafkaError, reason: &str) {
        self.seen.error(error, reason);
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        self.seen.log(level, facility, text);
    }
}

impl ConsumerContext for Context {
    fn pre_rebalance(&self, _: &BaseConsumer<Self>, _: &Rebalance<'_>) {
        let mut places = self.places();
        places.generation += 1;
        places.partitions.clear();
    }
}

type Consuming = StreamConsumer<Context>;

pub(super) struct Taking {
    shared: Arc<Shared>,
    room: Arc<Semaphore>,
}

struct Shared {
    kafka: Arc<Inner>,
    what: Subscription,
    context: Context,
    /// `None` only while it is dropped.
    consumer: Option<Consuming>,
    held: Held<Taken>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(consumer) = self.consumer.take() {
            close(consumer);
        }
    }
}

/// Leaving a group waits for the broker, which no async task may do.
fn close<C: ConsumerContext + 'static>(consumer: StreamConsumer<C>) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(move || drop(consumer))),
        Err(_) => drop(consumer),
    }
}

/// A record under way.
struct Taken {
    shared: Arc<Shared>,
    generation: u64,
    partition: i32,
    offset: i64,
    /// When it was published, in milliseconds.
    time: i64,
    message: Message,
    _room: OwnedSemaphorePermit,
}

impl Taking {
    pub(super) async fn open(kafka: &Arc<Inner>, what: &Subscription) -> Result<Self, BusError> {
        kafka.make(&what.topic.name, kafka.keep_of(&what.topic)).await?;
        let context = Context { seen: kafka.seen.clone(), places: Arc::default() };
        let mut config = kafka.config.clone();
        // Members of one group that want different topics would share them out among all.
        config.set("group.id", format!("{}.{}", what.topic, what.group));
        config.set("enable.auto.commit", "true");
        config.set("auto.commit.interval.ms", "500");
        config.set("enable.auto.offset.store", "false");
        config.set("auto.offset.reset", "earliest");
        config.set("session.timeout.ms", SESSION.min(what.ack_wait).as_millis().to_string());
        config.set("heartbeat.interval.ms", (SESSION.min(what.ack_wait) / 4).as_millis().to_string());
        // While the broker that leads the group is away, it is looked for ten times as often.
        config.set("coordinator.query.interval.ms", "10000");
        // Beside those under way, so much may be on its way here.
        config.set("queued.min.messages", what.in_flight.max(1).to_string());
        config.set("queued.max.messages.kbytes", "16384");
        config.set("fetch.queue.backoff.ms", "50");
        let consumer: Consuming =
            config.create_with_context(context.clone()).map_err(|error| kafka.error(&error))?;
        consumer.subscribe(&[&what.topic.name]).map_err(|error| kafka.error(&error))?;
        let shared = Shared {
            kafka: Arc::clone(kafka),
            what: what.clone(),
            context,
            consumer: Some(consumer),
            held: Held::new(),
        };
        Ok(Self { shared: Arc::new(shared), room: Arc::new(Semaphore::new(what.in_flight.max(1))) })
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.shared.held.close();
        // What is under way elsewhere keeps the consumer; it must take nothing more.
        if let Some(consumer) = &self.shared.consumer {
            consumer.unsubscribe();
        }
    }
}

#[async_trait]
impl Consumer for Taking {
    async fn next(&mut self) -> Result<Delivery, BusError> {
        let shared = Arc::clone(&self.shared);
        let Some(consumer) = &shared.consumer else { std::future::pending().await };
        loop {
            let fresh = async {
                // The semaphore is never closed.
                let Ok(room) = Arc::clone(&self.room).acquire_owned().await else { std::future::pending().await };
                (room, receive(consumer).await)
            };
            let taken = tokio::select! {
                biased;
                taken = shared.held.due() => taken,
                (room, record) = fresh => {
                    let record = record.map_err(|error| shared.kafka.error(&error))?;
                    let (partition, offset) = (record.partition(), record.offset());
                    let time = record.timestamp().to_millis().unwrap_or_default();
                    let mut places = shared.context.places();
                    let place = places.partitions.entry(partition).or_default();
                    place.unsettled.insert(offset);
                    place.next = offset + 1;
                    let generation = places.generation;
                    drop(places);
                    let message = message(&record);
                    Taken { shared: Arc::clone(&shared), generation, partition, offset, time, message, _room: room }
                }
            };
            // What was put off may be another's by now.
            if taken.is_ours() {
                // A topic that was deleted and made again counts from 0 again: the time tells its records from those before.
                let (topic, Taken { time, partition, offset, .. }) = (&shared.what.topic, &taken);
                let position = format!("kafka:{topic}:{time}:{partition}:{offset}");
                return Ok(Delivery::new(taken.message.clone(), Some(position), taken));
            }
        }
    }
}

impl Taken {
    fn is_ours(&self) -> bool {
        self.shared.context.places().generation == self.generation
    }

    /// Settles it; when its partition is another's by now, that one gives it again.
    fn settle(&self) -> Result<(), BusError> {
        let settled = {
            let mut places = self.shared.context.places();
            if places.generation != self.generation {
                return Ok(());
            }
            let Some(place) = places.partitions.get_mut(&self.partition) else { return Ok(()) };
            place.unsettled.remove(&self.offset);
            place.settled_up_to()
        };
        let Some(consumer) = &self.shared.consumer else { return Ok(()) };
        let topic = &self.shared.what.topic.name;
        // librdkafka stores the offset after this one, and tells the broker from time to time.
        match consumer.store_offset(topic, self.partition, settled - 1) {
            Ok(()) => Ok(()),
            // The partition went between the look and here.
            Err(_) if !self.is_ours() => Ok(()),
            Err(error) => Err(self.shared.kafka.error(&error)),
        }
    }
}

#[async_trait]
impl Settle for Taken {
    async fn ack(self: Box<Self>) -> Result<(), BusError> {
        self.settle()
    }

    async fn reject(self: Box<Self>, reason: &str) -> Result<(), BusError> {
        let dead = dead_letter(&self.shared.what.topic, &self.message, reason);
        if let Err(not) = self.shared.kafka.publish(&[dead]).await {
            self.dropped();
            return Err(not.error);
        }
        self.settle()
    }

    async fn redeliver(self: Box<Self>, after: Duration) -> Result<(), BusError> {
        let shared = Arc::clone(&self.shared);
        shared.held.put(Instant::now() + shared.what.put_off(after), *self);
        Ok(())
    }

    /// The broker gives nothing again as long as the partition is ours.
    fn dropped(self: Box<Self>) {
        let shared = Arc::clone(&self.shared);
        shared.held.put(Instant::now() + shared.what.put_off(shared.what.ack_wait), *self);
    }
}

pub(super) struct Hearing {
    kafka: Arc<Inner>,
    consumer: Option<StreamConsumer<Seen>>,
}

impl ConsumerContext for Seen {}

impl Hearing {
    /// Reads from the end of every partition, as it is now.
    pub(super) async fn open(kafka: &Arc<Inner>, channel: &str) -> Result<Self, BusError> {
        kafka.make(channel, Some(KEEP_BROADCASTS)).await?;
        let partitions = kafka.partitions_of(Some(channel)).await?;
        let mut config = kafka.config.clone();
        config.set("group.id", "longhaul-listener"); // nothing is committed for it
        config.set("enable.auto.commit", "false");
        config.set("auto.offset.reset", "latest");
        config.set("queued.max.messages.kbytes", "4096");
        let (inner, channel) = (Arc::clone(kafka), channel.to_owned());
        let assigned = tokio::task::spawn_blocking(move || {
            let error = |error: KafkaError| inner.error(&error);
            let consumer: StreamConsumer<Seen> = config.create_with_context(inner.seen.clone()).map_err(error)?;
            let mut places = TopicPartitionList::new();
            for partition in partitions {
                let (_, end) =
                    consumer.fetch_watermarks(&channel, partition, crate::bus::TIMEOUT).map_err(error)?;
                places.add_partition_offset(&channel, partition, Offset::Offset(end)).map_err(error)?;
            }
            consumer.assign(&places).map_err(error)?;
            Ok::<_, BusError>(consumer)
        });
        let consumer = assigned.await.unwrap_or_else(|error| {
            Err(BusError::Failed { bus: kafka.name.clone(), why: format!("listening broke off: {error}") })
        })?;
        Ok(Self { kafka: Arc::clone(kafka), consumer: Some(consumer) })
    }
}

impl Drop for Hearing {
    fn drop(&mut self) {
        if let Some(consumer) = self.consumer.take() {
            close(consumer);
        }
    }
}

#[async_trait]
impl Listener for Hearing {
    async fn next(&mut self) -> Result<Bytes, BusError> {
        let Some(consumer) = &self.consumer else { std::future::pending().await };
        match receive(consumer).await {
            Ok(record) => Ok(Bytes::copy_from_slice(record.payload().unwrap_or_default())),
            Err(error) => Err(self.kafka.error(&error)),
        }
    }
}
