//! The bus: what all brokers have in common, as narrow as it can be.
//!
//! Messages are published in batches and acknowledged by the broker; groups of consumers take them and
//! acknowledge, reject or put off each one. Beside that there are broadcasts, which may be lost and are
//! only ever hints. Everything is at least once: who consumes must recognise what it had already, by the
//! message's id.
//!
//! A broker that goes away is an error of the call that met it. Nothing needs to be opened again: the next
//! call connects by itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

/// How long a broker may take for one thing.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// A broker.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Which one, for people: `NATS at 127.0.0.1:4222`. Has no secrets in it.
    fn name(&self) -> &str;

    /// The largest body of a message that it takes.
    fn max_bytes(&self) -> usize;

    /// What the names of a CloudEvent's attributes begin with where they are headers.
    fn event_prefix(&self) -> &'static str;

    /// Publishes messages. When this returns, the broker has all of them as safely as its settings say. They
    /// are sent side by side: who needs one after the other publishes them one after the other.
    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished>;

    /// Begins to consume. What was published to the topic before anyone of the group consumed is seen too
    /// (on RabbitMQ: since somebody of the group first did).
    async fn consume(&self, what: &Subscription) -> Result<Box<dyn Consumer>, BusError>;

    /// Tells everyone who listens to `channel` now; may be lost.
    async fn broadcast(&self, channel: &str, body: Bytes) -> Result<(), BusError>;

    /// Listens to a channel, from now on.
    async fn listen(&self, channel: &str) -> Result<Box<dyn Listener>, BusError>;
}

/// Takes the messages of a topic, for its group. Dropped, it stops, and what it did not acknowledge is given to
/// others of its group.
#[async_trait]
pub trait Consumer: Send {
    /// The next message; waits for it. May be dropped while it waits, without a loss. After an error, calling
    /// it again connects again.
    async fn next(&mut self) -> Result<Delivery, BusError>;

    /// Ends it in order, when nothing of it is under way any more: leaves nothing at the broker that would be this
    /// consumer's alone. Merely dropped, it may.
    async fn close(self: Box<Self>) {}
}

/// Hears broadcasts.
#[async_trait]
pub trait Listener: Send {
    /// The next one; waits for it. After an error, calling it again connects again.
    async fn next(&mut self) -> Result<Bytes, BusError>;
}

/// What becomes of a delivery; see [`Delivery`].
#[async_trait]
pub(crate) trait Settle: Send + Sync {
    async fn ack(self: Box<Self>) -> Result<(), BusError>;
    async fn reject(self: Box<Self>, reason: &str) -> Result<(), BusError>;
    async fn redeliver(self: Box<Self>, after: Duration) -> Result<(), BusError>;

    /// Nobody settled it. Brokers that give it again by themselves need nothing done.
    fn dropped(self: Box<Self>) {}
}

/// A message that was taken and not settled yet. Dropped, it is given again, to this consumer or another of the
/// group, when the broker notices: at the latest after [`Subscription::ack_wait`].
pub struct Delivery {
    /// What was published.
    pub message: Message,
    /// Where the broker keeps it, if that is the same whenever it is delivered: an id for messages that came
    /// without one. Its last parts say how messages stand: `…:PARTITION:OFFSET` on Kafka, `…:TIME-NUMBER` on Redis,
    /// `…:NUMBER` on NATS.
    pub position: Option<String>,
    /// `None` once it is being settled.
    settle: Option<Box<dyn Settle>>,
}

impl Delivery {
    pub(crate) fn new(message: Message, position: Option<String>, settle: impl Settle + 'static) -> Self {
        Self { message, position, settle: Some(Box::new(settle)) }
    }

    /// It is done; the group does not see it again. (After an error it may.)
    pub async fn ack(mut self) -> Result<(), BusError> {
        match self.settle.take() {
            Some(settle) => settle.ack().await,
            None => Ok(()),
        }
    }

    /// It can never be done: it goes to the dead letters of its topic, with the reason.
    pub async fn reject(mut self, reason: &str) -> Result<(), BusError> {
        match self.settle.take() {
            Some(settle) => settle.reject(reason).await,
            None => Ok(()),
        }
    }

    /// It cannot be done now: it is given again after about this time, to this consumer or another. At most
    /// half of [`Subscription::ack_wait`] is waited.
    pub async fn redeliver(mut self, after: Duration) -> Result<(), BusError> {
        match self.settle.take() {
            Some(settle) => settle.redeliver(after).await,
            None => Ok(()),
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if let Some(settle) = self.settle.take() {
            settle.dropped();
        }
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("message", &self.message).field("position", &self.position).finish()
    }
}

/// What travels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Its id, the same whenever it is published again.
    pub id: Option<String>,
    /// What it belongs to: messages of one key keep their order.
    pub key: Option<String>,
    /// What the body is.
    pub content_type: Option<String>,
    /// Where an answer is wanted: an address as [`To::Address`].
    pub reply_to: Option<String>,
    /// What an answer repeats.
    pub correlation_id: Option<String>,
    /// More about it. A name is there once.
    pub headers: Vec<(String, String)>,
    /// The content.
    pub body: Bytes,
}

impl Message {
    /// The header of this name, in any case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(has, _)| has.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// A message on its way out.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Where to.
    pub to: To,
    /// What.
    pub message: Message,
}

/// Where a message goes.
#[derive(Clone, Debug)]
pub enum To {
    /// A topic, made if it is not there.
    Topic {
        /// Which.
        topic: Topic,
        /// A finer address within it, in words with dots between them, for brokers that can tell by it who
        /// wants the message; may be empty.
        subject: String,
    },
    /// An address in the broker's own words, which must be there: a subject of NATS, a stream of Redis, a queue
    /// of RabbitMQ, a topic of Kafka.
    Address(String),
}

/// A topic of the broker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topic {
    /// Its name: letters, digits, dots and dashes.
    pub name: Arc<str>,
    /// What it is for.
    pub kind: Kind,
}

/// What a topic is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Kept for a time, and read by any number of groups, each on its own: events.
    Log,
    /// Every message is for one group, and gone when it was acknowledged: tasks, dead letters.
    Queue,
}

impl Topic {
    /// A topic whose messages are kept for a time.
    pub fn log(name: &str) -> Result<Self, BusError> {
        Self::new(name, Kind::Log)
    }

    /// A topic whose messages are gone when they were acknowledged.
    pub fn queue(name: &str) -> Result<Self, BusError> {
        Self::new(name, Kind::Queue)
    }

    fn new(name: &str, kind: Kind) -> Result<Self, BusError> {
        let sound = |word: &str| {
            !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        };
        if name.len() > 128 || !name.split('.').all(sound) {
            return Err(BusError::Invalid(format!(
                "the topic '{}' must be words of letters, digits and dashes with dots between them, like longhaul.tasks",
                name.escape_debug()
            )));
        }
        Ok(Self { name: name.into(), kind })
    }

    /// Where what was rejected goes.
    pub fn dead_letters(&self) -> Self {
        Self { name: format!("{}-dead", self.name).into(), kind: Kind::Queue }
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

/// What is consumed, and how.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// The topic, made if it is not there.
    pub topic: Topic,
    /// Consumers of one group share the work; each group sees everything.
    pub group: String,
    /// How many messages may be taken and not settled. No more are in memory.
    pub in_flight: usize,
    /// How long a message may stay unsettled before it is given to another.
    pub ack_wait: Duration,
}

impl Subscription {
    /// A topic for a group, everything else by default.
    pub fn new(topic: Topic, group: impl Into<String>) -> Self {
        Self { topic, group: group.into(), in_flight: 256, ack_wait: Duration::from_secs(60) }
    }

    /// The longest time that a message can be put off.
    pub(crate) fn put_off(&self, after: Duration) -> Duration {
        after.min(self.ack_wait / 2)
    }
}

/// What a rejected message is as a dead letter: itself, with where it was and why it is here.
pub(crate) fn dead_letter(topic: &Topic, message: &Message, reason: &str) -> Outgoing {
    let mut message = message.clone();
    message.headers.retain(|(name, _)| !name.starts_with("longhaul-"));
    // Headers are one line everywhere, and brokers bound them.
    let reason: String = reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1_000).collect();
    message.headers.push(("longhaul-topic".to_owned(), topic.name.to_string()));
    message.headers.push(("longhaul-reason".to_owned(), reason));
    Outgoing { to: To::Topic { topic: topic.dead_letters(), subject: String::new() }, message }
}

/// What can go wrong with a broker. Says what to do, and has no secrets in it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BusError {
    /// What was asked for is wrong, and stays wrong.
    #[error("{0}")]
    Invalid(String),
    /// The broker does not let us in, or not do this.
    #[error(
        "{bus} refuses: {why}; check the user and the password in the URL of the bus, and what the broker lets them do"
    )]
    Denied {
        /// Which broker.
        bus: String,
        /// What it says.
        why: String,
    },
    /// The broker does not answer.
    #[error("{bus} cannot be reached: {why}; check the URL of the bus, and that the broker runs")]
    Unreachable {
        /// Which broker.
        bus: String,
        /// What was met.
        why: String,
    },
    /// The broker answered that it cannot do it.
    #[error("{bus}: {why}")]
    Failed {
        /// Which broker.
        bus: String,
        /// What it says.
        why: String,
    },
}

/// Some messages, or all, were not acknowledged by the broker; each of them may have been taken all the same.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{} of {of} messages were not acknowledged: {error}", .which.len())]
pub struct NotPublished {
    /// Their places in the batch, ascending.
    pub which: Vec<usize>,
    /// How many the batch had.
    pub of: usize,
    /// Why the first of them was not.
    pub error: BusError,
}

impl NotPublished {
    /// None of the batch was.
    pub(crate) fn all(of: usize, error: BusError) -> Self {
        Self { which: (0..of).collect(), of, error }
    }

    /// What became of each.
    pub(crate) fn from_results(results: impl IntoIterator<Item = Result<(), BusError>>) -> Result<(), Self> {
        let (mut which, mut of, mut first) = (Vec::new(), 0, None);
        for result in results {
            if let Err(error) = result {
                which.push(of);
                first.get_or_insert(error);
            }
            of += 1;
        }
        first.map_or(Ok(()), |error| Err(Self { which, of, error }))
    }
}

/// Waits for what a broker does, at most [`TIMEOUT`].
pub(crate) async fn in_time<T>(
    bus: &str,
    what: &str,
    work: impl Future<Output = Result<T, BusError>>,
) -> Result<T, BusError> {
    match tokio::time::timeout(TIMEOUT, work).await {
        Ok(done) => done,
        Err(_) => Err(BusError::Unreachable {
            bus: bus.to_owned(),
            why: format!("{what} took longer than {} s", TIMEOUT.as_secs()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_is_a_name_that_every_broker_takes() {
        for sound in ["longhaul.tasks", "tasks", "a-b.c_d.9"] {
            assert!(Topic::queue(sound).is_ok(), "{sound}");
        }
        for wrong in ["", ".", "a..b", "a b", "tasks.>", "*", "a/b", "ä", &"x".repeat(129)] {
            let error = Topic::queue(wrong).expect_err("must be refused").to_string();
            assert!(error.contains("longhaul.tasks"), "{error}");
        }
    }

    #[test]
    fn a_dead_letter_says_once_why_and_from_where() {
        let topic = Topic::queue("tasks").expect("a name");
        let message = Message { body: "x".into(), ..Message::default() };
        let first = dead_letter(&topic, &message, "not\nJSON");
        let again = dead_letter(&topic, &first.message, "still not");
        assert_eq!(first.message.header("longhaul-reason"), Some("not JSON"));
        assert_eq!(again.message.header("Longhaul-Reason"), Some("still not"));
        assert_eq!(again.message.headers.len(), 2);
    }

    #[test]
    fn what_was_not_published_is_named_by_its_place() {
        let failed = || Err(BusError::Invalid("no".to_owned()));
        let error = NotPublished::from_results([Ok(()), failed(), Ok(()), failed()]).expect_err("two failed");
        assert_eq!(error.which, [1, 3]);
        assert_eq!(error.to_string(), "2 of 4 messages were not acknowledged: no");
        assert!(NotPublished::from_results([Ok(())]).is_ok());
    }
}
