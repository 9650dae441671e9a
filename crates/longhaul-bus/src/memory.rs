//! The bus within one process: for programs that embed Longhaul and for tests. Lives and ends with the process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::time::Instant;

use crate::bus::{
    Bus, BusError, Consumer, Delivery, Kind, Listener, Message, NotPublished, Outgoing, Settle, Subscription, To,
    Topic, dead_letter,
};
use crate::held::Held;

/// How many messages a topic holds. Beyond it nothing is published until some were taken.
const MOST: usize = 100_000;
/// How many broadcasts a listener can be behind before it loses the oldest.
const MOST_BROADCASTS: usize = 1_024;

/// A bus within this process; clones are the same one.
#[derive(Clone, Default)]
pub struct MemoryBus(Arc<Inner>);

struct Inner {
    /// Tells this bus from those of other processes, which count alike.
    id: uuid::Uuid,
    topics: Mutex<HashMap<Arc<str>, Messages>>,
    channels: Mutex<HashMap<String, broadcast::Sender<Bytes>>>,
}

impl Default for Inner {
    fn default() -> Self {
        Self { id: uuid::Uuid::now_v7(), topics: Mutex::default(), channels: Mutex::default() }
    }
}

/// What a topic has: one line for each group.
#[derive(Default)]
struct Messages {
    next: u64,
    groups: HashMap<String, Arc<Line>>,
    /// Of a log, for groups that come later; of a queue, until somebody consumes.
    kept: VecDeque<Kept>,
}

#[derive(Clone)]
struct Kept {
    number: u64,
    message: Message,
}

#[derive(Default)]
struct Line {
    waiting: Mutex<VecDeque<Kept>>,
    more: Notify,
}

impl Line {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts back what was not settled, in its place.
    fn put_back(&self, kept: Kept) {
        let mut waiting = self.waiting();
        let place = waiting.partition_point(|other| other.number < kept.number);
        waiting.insert(place, kept);
        drop(waiting);
        self.more.notify_one();
    }

    async fn take(&self) -> Kept {
        loop {
            let (taken, more) = {
                let mut waiting = self.waiting();
                (waiting.pop_front(), !waiting.is_empty())
            };
            if let Some(taken) = taken {
                if more {
                    self.more.notify_one();
                }
                return taken;
            }
            self.more.notified().await;
        }
    }
}

impl MemoryBus {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    fn topics(&self) -> MutexGuard<'_, HashMap<Arc<str>, Messages>> {
        self.0.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, outgoing: &Outgoing) -> Result<(), BusError> {
        let (name, kind) = match &outgoing.to {
            To::Topic { topic, .. } => (Arc::clone(&topic.name), topic.kind),
            To::Address(address) => (Topic::queue(address)?.name, Kind::Queue),
        };
        let mut topics = self.topics();
        let topic = topics.entry(name).or_default();
        let full = |waiting: usize| waiting >= MOST;
        if topic.groups.values().any(|line| full(line.waiting().len()))
            || (kind == Kind::Queue && full(topic.kept.len()))
        {
            let why = format!("a topic has {MOST} messages that nobody took; consume them");
            return Err(BusError::Failed { bus: self.name().to_owned(), why });
        }
        topic.next += 1;
        let kept = Kept { number: topic.next, message: outgoing.message.clone() };
        for line in topic.groups.values() {
            line.put_back(kept.clone());
        }
        if kind == Kind::Log || topic.groups.is_empty() {
            if topic.kept.len() >= MOST {
                topic.kept.pop_front();
            }
            topic.kept.push_back(kept);
        }
        Ok(())
    }

    /// The line of a group; the first group of a queue takes over what is there.
    fn line(&self, what: &Subscription) -> Arc<Line> {
        let mut topics = self.topics();
        let topic = topics.entry(Arc::clone(&what.topic.name)).or_default();
        if let Some(line) = topic.groups.get(&what.group) {
            return Arc::clone(line);
        }
        let kept = match what.topic.kind {
            Kind::Log => topic.kept.clone(),
            Kind::Queue => std::mem::take(&mut topic.kept),
        };
        let line = Arc::new(Line { waiting: Mutex::new(kept), more: Notify::new() });
        line.more.notify_one();
        topic.groups.insert(what.group.clone(), Arc::clone(&line));
        line
    }

    fn channel(&self, channel: &str) -> broadcast::Sender<Bytes> {
        let mut channels = self.0.channels.lock().unwrap_or_else(PoisonError::into_inner);
        channels.entry(channel.to_owned()).or_insert_with(|| broadcast::Sender::new(MOST_BROADCASTS)).clone()
    }
}

#[async_trait]
impl Bus for MemoryBus {
    fn name(&self) -> &str {
        "the bus of this process"
    }

    fn max_bytes(&self) -> usize {
        64 * 1024 * 1024
    }

    fn event_prefix(&self) -> &'static str {
        "ce-"
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        NotPublished::from_results(messages.iter().map(|message| self.put(message)))
    }

    async fn consume(&self, what: &Subscription) -> Result<Box<dyn Consumer>, BusError> {
        Ok(Box::new(Taking {
            bus: self.clone(),
            line: self.line(what),
            what: what.clone(),
            room: Arc::new(Semaphore::new(what.in_flight.max(1))),
            held: Held::new(),
        }))
    }

    async fn broadcast(&self, channel: &str, body: Bytes) -> Result<(), BusError> {
        // Nobody may be listening.
        let _ = self.channel(channel).send(body);
        Ok(())
    }

    async fn listen(&self, channel: &str) -> Result<Box<dyn Listener>, BusError> {
        Ok(Box::new(Hearing(self.channel(channel).subscribe())))
    }
}

struct Taking {
    bus: MemoryBus,
    line: Arc<Line>,
    what: Subscription,
    room: Arc<Semaphore>,
    held: Held<Taken>,
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.held.close();
    }
}

/// A message under way; dropped, it goes back.
struct Taken {
    line: Arc<Line>,
    kept: Option<Kept>,
    _room: OwnedSemaphorePermit,
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(kept) = self.kept.take() {
            self.line.put_back(kept);
        }
    }
}

#[async_trait]
impl Consumer for Taking {
    async fn next(&mut self) -> Result<Delivery, BusError> {
        let fresh = async {
            // The semaphore is never closed; when it were, there would be nothing to wait for.
            let Ok(room) = Arc::clone(&self.room).acquire_owned().await else { std::future::pending().await };
            let kept = self.line.take().await;
            Taken { line: Arc::clone(&self.line), kept: Some(kept), _room: room }
        };
        let taken = tokio::select! {
            biased;
            taken = self.held.due() => taken,
            taken = fresh => taken,
        };
        let message = taken.kept.as_ref().map(|kept| kept.message.clone()).unwrap_or_default();
        let number = taken.kept.as_ref().map(|kept| kept.number);
        let settle = Settling { bus: self.bus.clone(), what: self.what.clone(), held: self.held.clone(), taken };
        let position = number.map(|number| format!("memory:{}:{}:{number}", self.bus.0.id, self.what.topic));
        Ok(Delivery::new(message, position, settle))
    }
}

struct Settling {
    bus: MemoryBus,
    what: Subscription,
    held: Held<Taken>,
    taken: Taken,
}

#[async_trait]
impl Settle for Settling {
    async fn ack(mut self: Box<Self>) -> Result<(), BusError> {
        self.taken.kept = None;
        Ok(())
    }

    async fn reject(mut self: Box<Self>, reason: &str) -> Result<(), BusError> {
        if let Some(kept) = &self.taken.kept {
            self.bus.put(&dead_letter(&self.what.topic, &kept.message, reason))?;
        }
        self.taken.kept = None;
        Ok(())
    }

    async fn redeliver(self: Box<Self>, after: Duration) -> Result<(), BusError> {
        self.held.put(Instant::now() + self.what.put_off(after), self.taken);
        Ok(())
    }
}

struct Hearing(broadcast::Receiver<Bytes>);

#[async_trait]
impl Listener for Hearing {
    async fn next(&mut self) -> Result<Bytes, BusError> {
        loop {
            match self.0.recv().await {
                Ok(body) => return Ok(body),
                // Broadcasts may be lost.
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                // The bus holds the sender; when it is gone there is nothing to hear.
                Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            }
        }
    }
}
