//! What the tests of the bus share: a bed on every broker, and ways to wait.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use longhaul_bus::{Bus, BusError, Consumer, Delivery, Message, Outgoing, Subscription, To, Topic};

pub mod engine;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long a message may stay unsettled in these tests. Not less: members of a group of Kafka that are silent
/// for as long are thrown out.
pub const ACK_WAIT: Duration = Duration::from_secs(3);

/// A broker, and names that no other test uses.
pub struct Bed {
    pub bus: Arc<dyn Bus>,
    pub url: String,
    /// `LONGHAUL_TEST_NAME…` are its variables.
    pub name: &'static str,
    unique: String,
}

impl Bed {
    pub async fn memory() -> Option<Self> {
        Some(Self::of("MEMORY", "memory:".to_owned()).await)
    }

    pub async fn nats() -> Option<Self> {
        Self::of_variable("NATS").await
    }

    pub async fn redis() -> Option<Self> {
        Self::of_variable("REDIS").await
    }

    pub async fn rabbitmq() -> Option<Self> {
        Self::of_variable("RABBITMQ").await
    }

    /// The real one, else librdkafka's own stand-in.
    #[cfg(feature = "kafka")]
    pub async fn kafka() -> Option<Self> {
        if std::env::var("LONGHAUL_TEST_KAFKA").is_ok() {
            return Self::of_variable("KAFKA").await;
        }
        eprintln!("Kafka is not here (LONGHAUL_TEST_KAFKA); librdkafka's mock cluster stands in");
        Some(Self::of("KAFKA", format!("kafka://{}", mock_cluster())).await)
    }

    async fn of_variable(name: &'static str) -> Option<Self> {
        let url = variable(name, "")?;
        Some(Self::of(name, url).await)
    }

    async fn of(name: &'static str, url: String) -> Self {
        let bus = longhaul_bus::connect(&url).await.expect("the broker answers");
        Self { bus, url, name, unique: uuid::Uuid::now_v7().simple().to_string() }
    }

    /// The same broker, used with this parameter.
    pub fn with(mut self, parameter: &str) -> Self {
        self.url = format!("{}?{parameter}", self.url);
        self
    }

    /// Another process would see the broker like this.
    pub async fn another(&self) -> Arc<dyn Bus> {
        match self.name {
            "MEMORY" => Arc::clone(&self.bus),
            _ => longhaul_bus::connect(&self.url).await.expect("the broker answers"),
        }
    }

    pub fn queue(&self) -> Topic {
        Topic::queue(&format!("test.queue{}", self.unique)).expect("a name")
    }

    pub fn log(&self) -> Topic {
        Topic::log(&format!("test.log{}", self.unique)).expect("a name")
    }

    pub fn channel(&self) -> String {
        format!("test.channel{}", self.unique)
    }

    /// Does something to the broker itself; `false` when it is none that tests may touch.
    pub fn control(&self, what: &str) -> bool {
        let Ok(script) = std::env::var(format!("LONGHAUL_TEST_{}_CTL", self.name)) else { return false };
        let status =
            Command::new(PathBuf::from(script)).arg(what).status().expect("the script of the broker runs");
        assert!(status.success(), "{} did not {what}", self.name);
        true
    }
}

impl Bed {
    /// Before a broker is killed that has new queues: RabbitMQ writes the register of its quorum queues to disk minutes after one
    /// was made (seen with 3.10), or when it is stopped. Killed before, it does not find the queue again.
    pub fn remember_queues(&self) {
        if self.name == "RABBITMQ" && self.control("stop") {
            assert!(self.control("start"));
        }
    }
}

/// The URL that `LONGHAUL_TEST_NAME…` has; without it one line says so.
pub fn variable(name: &str, more: &str) -> Option<String> {
    let name = format!("LONGHAUL_TEST_{name}{more}");
    let url = std::env::var(&name).ok();
    if url.is_none() {
        eprintln!("skipped: needs a broker; set {name} or use ./dev test");
    }
    url
}

#[cfg(feature = "kafka")]
fn mock_cluster() -> &'static str {
    use rdkafka::mocking::MockCluster;
    use std::sync::OnceLock;
    static SERVERS: OnceLock<String> = OnceLock::new();
    SERVERS.get_or_init(|| {
        let cluster = MockCluster::new(1).expect("a mock cluster");
        let servers = cluster.bootstrap_servers();
        std::mem::forget(cluster); // lives as long as the tests
        servers
    })
}

pub fn subscription(topic: Topic, group: &str) -> Subscription {
    Subscription { ack_wait: ACK_WAIT, ..Subscription::new(topic, group) }
}

/// A message with an id, for a topic.
pub fn numbered(topic: &Topic, key: &str, number: usize) -> Outgoing {
    let message = Message {
        id: Some(format!("{key}/{number}")),
        key: Some(key.to_owned()),
        body: format!("{key} {number}").into(),
        ..Message::default()
    };
    Outgoing { to: To::Topic { topic: topic.clone(), subject: String::new() }, message }
}

/// Key and number of one of those.
pub fn number(message: &Message) -> (String, usize) {
    let body = std::str::from_utf8(&message.body).expect("text");
    let (key, number) = body.split_once(' ').expect("a key and a number");
    (key.to_owned(), number.parse().expect("a number"))
}

/// The next delivery; errors on the way are those of a broker that was away.
pub async fn next(consumer: &mut dyn Consumer) -> Delivery {
    let taken = tokio::time::timeout(PATIENCE, async {
        loop {
            match consumer.next().await {
                Ok(delivery) => return delivery,
                Err(error) => {
                    eprintln!("consuming: {error}");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    });
    taken.await.expect("a message comes in time")
}

/// Takes and acknowledges so many; what came twice counts once.
pub async fn take(consumer: &mut dyn Consumer, count: usize) -> Vec<Message> {
    let mut taken: Vec<Message> = Vec::new();
    while taken.len() < count {
        let delivery = next(consumer).await;
        let message = delivery.message.clone();
        delivery.ack().await.expect("an acknowledgement");
        if !taken.iter().any(|other| other.body == message.body) {
            taken.push(message);
        }
    }
    taken
}

/// Nothing comes for a while.
pub async fn nothing(consumer: &mut dyn Consumer, time: Duration) {
    if let Ok(taken) = tokio::time::timeout(time, consumer.next()).await {
        panic!("nothing should come, but this did: {taken:?}");
    }
}

/// Where a message stands at the broker. Those of a key are all in one partition (of brokers that have none: 0), and one that is
/// given again stands where it stood.
pub type Standing = (u64, u64, u64);

/// Reads it from the end of a position: `…:PARTITION:OFFSET` of Kafka, `…:TIME-NUMBER` of Redis, `…:NUMBER` elsewhere. RabbitMQ says
/// nothing.
pub fn standing(delivery: &Delivery) -> Option<Standing> {
    let position = delivery.position.as_deref()?;
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("no number at the end of {position}"));
    let (before, last) = position.rsplit_once(':').expect("several parts");
    Some(match (position.split_once(':').map(|(broker, _)| broker), last.split_once('-')) {
        (Some("kafka"), _) => {
            let partition = before.rsplit_once(':').map(|(_, partition)| number(partition));
            (partition.expect("a partition"), number(last), 0)
        }
        (_, Some((time, of_time))) => (0, number(time), number(of_time)),
        (_, None) => (0, number(last), 0),
    })
}

/// The messages of each key, by the first time each was seen, must be in order and without a gap.
pub fn assert_in_order<'a>(messages: impl IntoIterator<Item = &'a Message>, per_key: usize) {
    let mut seen: HashMap<String, Vec<usize>> = HashMap::new();
    for message in messages {
        let (key, number) = number(message);
        let seen = seen.entry(key).or_default();
        if !seen.contains(&number) {
            seen.push(number);
        }
    }
    for (key, seen) in seen {
        assert_eq!(seen, (0..per_key).collect::<Vec<_>>(), "the messages of {key}");
    }
}

/// Publishes, again and again until the broker has all of it.
pub async fn publish(bus: &dyn Bus, messages: &[Outgoing]) {
    let mut left: Vec<Outgoing> = messages.to_vec();
    let published = tokio::time::timeout(PATIENCE * 2, async {
        while let Err(not) = bus.publish(&left).await {
            eprintln!("publishing: {not}");
            assert!(!matches!(not.error, BusError::Invalid(_)), "{not}");
            left = not.which.iter().map(|&place| left[place].clone()).collect();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    published.await.expect("the broker takes it in time");
}

/// Makes each of these async functions over a [`Bed`] a test on every bus.
#[macro_export]
macro_rules! on_every_bus {
    ($($name:ident),* $(,)?) => {
        $crate::on_every_bus!(@bus memory $($name)*);
        $crate::on_every_bus!(@bus nats $($name)*);
        $crate::on_every_bus!(@bus redis $($name)*);
        $crate::on_every_bus!(@bus rabbitmq $($name)*);
        #[cfg(feature = "kafka")]
        $crate::on_every_bus!(@bus kafka $($name)*);
    };
    (@bus $bus:ident $($name:ident)*) => {
        mod $bus {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if let Some(bed) = $crate::common::Bed::$bus().await {
                        super::$name(bed).await;
                    }
                }
            )*
        }
    };
}
