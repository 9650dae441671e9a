//! Kafka, by librdkafka.
//!
//! A topic is a topic, made with the broker's defaults if it is not there; a log's is kept for the time that the URL
//! says. The key of a message is the record's key, so that messages of one task stay in one partition. The producer is
//! idempotent and waits for all replicas. A group is a consumer group; see `taking.rs`. Broadcasts go through a topic
//! that is kept for a minute, which every listener reads from its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rdkafka::ClientContext;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};
use rdkafka::producer::future_producer::DeliveryFuture;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use crate::address::{Address, KEEP_PARAM};
use crate::bus::{
    Bus, BusError, Consumer, Kind, Listener, Message, NotPublished, Outgoing, Subscription, TIMEOUT, To, Topic,
};

mod taking;

const PARAMS: [&str; 5] = [KEEP_PARAM, "sasl", "partitions", "replicas", "max_bytes"];
/// What a broker takes by default, less what is around a body.
const MAX_BYTES: usize = 1_000_000;
const AROUND: usize = 16 * 1024;
/// How long broadcasts are kept.
const KEEP_BROADCASTS: Duration = Duration::from_secs(60);

/// Kafka.
pub(crate) struct Kafka(Arc<Inner>);

struct Inner {
    name: String,
    config: ClientConfig,
    seen: Seen,
    /// Made anew when librdkafka says that it is of no use any more.
    producer: Mutex<FutureProducer<Seen>>,
    keep: Option<Duration>,
    partitions: Option<u16>,
    replicas: Option<u16>,
    max_bytes: usize,
    /// Topics that are there.
    topics: Mutex<std::collections::HashSet<String>>,
}

/// What librdkafka told in the background: the reason behind errors that have none.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Option<(bool, String)>>>);

impl Seen {
    fn note(&self, error: &KafkaError, reason: &str) {
        let denied = matches!(
            error.rdkafka_error_code(),
            Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SaslAuthenticationFailed)
        );
        // Those without meaning come after those with.
        if error.rdkafka_error_code() != Some(RDKafkaErrorCode::AllBrokersDown) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((denied, reason.to_owned()));
        }
    }

    fn take(&self) -> Option<(bool, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl ClientContext for Seen {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "Kafka");
        self.note(&error, reason);
    }

    fn log(&self, _: RDKafkaLogLevel, facility: &str, text: &str) {
        tracing::debug!(facility, text, "librdkafka");
    }
}

impl Kafka {
    /// Connects; `kafka://` or, for TLS, `kafka+tls://`.
    pub(crate) async fn connect(url: &str) -> Result<Self, BusError> {
        let address = Address::parse(url, 9092, &PARAMS)?;
        let (config, seen) = (config(&address)?, Seen::default());
        let name = format!("Kafka at {}", address.shown());
        let max_bytes = match address.param("max_bytes").map(str::parse) {
            None => MAX_BYTES,
            Some(Ok(bytes)) => bytes,
            Some(Err(_)) => {
                return Err(BusError::Invalid("'max_bytes' in the URL of the bus must be a number".to_owned()));
            }
        };
        let producer = producer(&config, max_bytes, &seen)
            .map_err(|error| BusError::Invalid(format!("the URL of the bus cannot be used: {error}")))?;
        let inner = Inner {
            name,
            config,
            seen,
            producer: Mutex::new(producer),
            keep: address.keep()?,
            partitions: address.number("partitions")?,
            replicas: address.number("replicas")?,
            max_bytes,
            topics: Mutex::default(),
        };
        let inner = Arc::new(inner);
        inner.partitions_of(None).await?;
        Ok(Self(inner))
    }
}

fn config(address: &Address) -> Result<ClientConfig, BusError> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", address.shown());
    config.set("client.id", "longhaul");
    config.set("socket.keepalive.enable", "true");
    config.set("reconnect.backoff.max.ms", "2000");
    // A connection that nothing is left of must not be told each time.
    config.set("log.connection.close", "false");
    let tls = address.scheme == "kafka+tls";
    let login = address.user.is_some();
    config.set(
        "security.protocol",
        match (tls, login) {
            (false, false) => "plaintext",
            (false, true) => "sasl_plaintext",
            (true, false) => "ssl",
            (true, true) => "sasl_ssl",
        },
    );
    if let Some(user) = &address.user {
        let mechanism = match address.param("sasl").unwrap_or("plain") {
            "plain" => "PLAIN",
            "scram-sha-256" => "SCRAM-SHA-256",
            "scram-sha-512" => "SCRAM-SHA-512",
            _ => {
                let why = "'sasl' in the URL of the bus must be plain, scram-sha-256 or scram-sha-512";
                return Err(BusError::Invalid(why.to_owned()));
            }
        };
        config.set("sasl.mechanism", mechanism);
        config.set("sasl.username", user);
        config.set("sasl.password", address.password.as_deref().unwrap_or_default());
    }
    if tls {
        let certificates = address.certificates()?;
        let pem = |name: &str, bytes: Vec<u8>| {
            String::from_utf8(bytes).map_err(|_| BusError::Invalid(format!("the file of '{name}' is no PEM")))
        };
        if let Some(ca) = certificates.ca {
            config.set("ssl.ca.pem", pem("ca", ca)?);
        }
        if let Some((certificate, key)) = certificates.client {
            config.set("ssl.certificate.pem", pem("cert", certificate)?);
            config.set("ssl.key.pem", pem("key", key)?);
        }
    }
    Ok(config)
}

fn producer(config: &ClientConfig, max_bytes: usize, seen: &Seen) -> Result<FutureProducer<Seen>, KafkaError> {
    let mut config = config.clone();
    config.set("enable.idempotence", "true");
    config.set("acks", "all");
    config.set("linger.ms", "2");
    config.set("message.max.bytes", max_bytes.to_string());
    // What is not acknowledged by then is told, and tried again by who asked.
    config.set("message.timeout.ms", (TIMEOUT.as_millis() - 1_000).to_string());
    config.set("queue.buffering.max.messages", "100000");
    config.set("queue.buffering.max.kbytes", "262144");
    config.create_with_context(seen.clone())
}

impl Inner {
    fn error(&self, error: &KafkaError) -> BusError {
        use RDKafkaErrorCode as Code;
        let bus = self.name.clone();
        let why = |seen: Option<(bool, String)>| match seen {
            Some((_, reason)) => format!("{error}: {reason}"),
            None => error.to_string(),
        };
        match error.rdkafka_error_code() {
            Some(
                Code::TopicAuthorizationFailed
                | Code::GroupAuthorizationFailed
                | Code::ClusterAuthorizationFailed
                | Code::Authentication
                | Code::SaslAuthenticationFailed,
            ) => BusError::Denied { bus, why: why(None) },
            Some(
                Code::AllBrokersDown
                | Code::BrokerTransportFailure
                | Code::MessageTimedOut
                | Code::OperationTimedOut
                | Code::RequestTimedOut
                | Code::Resolve
                | Code::NetworkException,
            ) => match self.seen.take() {
                seen @ Some((true, _)) => BusError::Denied { bus, why: why(seen) },
                seen => BusError::Unreachable { bus, why: why(seen) },
            },
            _ => BusError::Failed { bus, why: why(None) },
        }
    }

    fn producer(&self) -> FutureProducer<Seen> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((code, why)) = producer.client().fatal_error() {
            tracing::warn!(%code, why, "Kafka's producer is of no use any more; making another");
            // Its settings were taken before.
            if let Ok(other) = self::producer(&self.config, self.max_bytes, &self.seen) {
                *producer = other;
            }
        }
        producer.clone()
    }

    /// The partitions of a topic; with no topic, only whether the broker answers.
    async fn partitions_of(self: &Arc<Self>, topic: Option<&str>) -> Result<Vec<i32>, BusError> {
        let (inner, topic) = (Arc::clone(self), topic.map(str::to_owned));
        let asked = tokio::task::spawn_blocking(move || {
            let producer = inner.producer();
            let metadata = producer.client().fetch_metadata(topic.as_deref(), Duration::from_secs(5));
            let metadata = metadata.map_err(|error| inner.error(&error))?;
            let of = |name: String| {
                metadata
                    .topics()
                    .iter()
                    .find(|topic| topic.name() == name)
                    .map(|topic| topic.partitions().iter().map(|partition| partition.id()).collect())
            };
            Ok(topic.and_then(of).unwrap_or_default())
        });
        asked.await.unwrap_or_else(|error| {
            Err(BusError::Failed { bus: self.name.clone(), why: format!("asking broke off: {error}") })
        })
    }

    /// Makes a topic if it is not there.
    async fn make(self: &Arc<Self>, name: &str, keep: Option<Duration>) -> Result<(), BusError> {
        if self.topics.lock().unwrap_or_else(PoisonError::into_inner).contains(name) {
            return Ok(());
        }
        if self.partitions_of(Some(name)).await?.is_empty() {
            self.create(name, keep).await?;
        }
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        Ok(())
    }

    async fn create(&self, name: &str, keep: Option<Duration>) -> Result<(), BusError> {
        let admin: AdminClient<Seen> =
            self.config.create_with_context(self.seen.clone()).map_err(|error| self.error(&error))?;
        let or_default = |number: Option<u16>| number.map_or(-1, i32::from);
        let keep = keep.map(|keep| keep.as_millis().to_string());
        let replication = TopicReplication::Fixed(or_default(self.replicas));
        let mut topic = NewTopic::new(name, or_default(self.partitions), replication);
        if let Some(keep) = &keep {
            topic = topic.set("retention.ms", keep);
        }
        let options = AdminOptions::new().request_timeout(Some(TIMEOUT)).operation_timeout(Some(TIMEOUT));
        let created = admin.create_topics([&topic], &options).await.map_err(|error| self.error(&error))?;
        match created.into_iter().next() {
            None | Some(Ok(_)) | Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(()),
            Some(Err((_, code))) => {
                let why =
                    format!("the topic {name} cannot be made; make it by hand or let the user do it: {code}");
                match code {
                    RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed => {
                        Err(BusError::Denied { bus: self.name.clone(), why })
                    }
                    _ => Err(BusError::Failed { bus: self.name.clone(), why }),
                }
            }
        }
    }

    fn keep_of(&self, topic: &Topic) -> Option<Duration> {
        match topic.kind {
            Kind::Log => self.keep,
            Kind::Queue => None,
        }
    }

    async fn send(
        self: &Arc<Self>,
        producer: &FutureProducer<Seen>,
        outgoing: &Outgoing,
    ) -> Result<DeliveryFuture, BusError> {
        let topic = match &outgoing.to {
            To::Address(address) => address.as_str(),
            To::Topic { topic, .. } => {
                self.make(&topic.name, self.keep_of(topic)).await?;
                &topic.name
            }
        };
        let mut record = FutureRecord::<str, [u8]>::to(topic)
            .payload(&outgoing.message.body)
            .headers(headers(&outgoing.message));
        if let Some(key) = &outgoing.message.key {
            record = record.key(key);
        }
        producer.send_result(record).map_err(|(error, _)| self.error(&error))
    }

    async fn publish(self: &Arc<Self>, messages: &[Outgoing]) -> Result<(), NotPublished> {
        let producer = self.producer();
        let mut sent = Vec::with_capacity(messages.len());
        for outgoing in messages {
            sent.push(self.send(&producer, outgoing).await);
        }
        let mut results = Vec::with_capacity(messages.len());
        for sent in sent {
            results.push(match sent {
                Err(error) => Err(error),
                Ok(delivery) => match delivery.await {
                    Ok(Ok(_)) => Ok(()),
                    Ok(Err((error, _))) => Err(self.error(&error)),
                    Err(_) => Err(BusError::Failed {
                        bus: self.name.clone(),
                        why: "the producer ended before the message was acknowledged".to_owned(),
                    }),
                },
            });
        }
        NotPublished::from_results(results)
    }
}

fn headers(message: &Message) -> OwnedHeaders {
    let mut headers = OwnedHeaders::new();
    for (key, value) in &message.headers {
        headers = headers.insert(Header { key, value: Some(value) });
    }
    for (key, value) in [
        ("message-id", &message.id),
        ("content-type", &message.content_type),
        ("reply-to", &message.reply_to),
        ("correlation-id", &message.correlation_id),
    ] {
        if value.is_some() {
            headers = headers.insert(Header { key, value: value.as_ref() });
        }
    }
    headers
}

/// A record as a message.
fn message(record: &BorrowedMessage<'_>) -> Message {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut message = Message {
        key: record.key().map(text),
        body: Bytes::copy_from_slice(record.payload().unwrap_or_default()),
        ..Message::default()
    };
    for header in record.headers().iter().flat_map(|headers| headers.iter()) {
        let Some(value) = header.value.map(text) else { continue };
        match header.key.to_ascii_lowercase().as_str() {
            "message-id" => message.id = Some(value),
            "content-type" => message.content_type = Some(value),
            "reply-to" => message.reply_to = Some(value),
            "correlation-id" => message.correlation_id = Some(value),
            _ => message.headers.push((header.key.to_owned(), value)),
        }
    }
    message
}

#[async_trait]
impl Bus for Kafka {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn max_bytes(&self) -> usize {
        self.0.max_bytes.saturating_sub(AROUND)
    }

    fn event_prefix(&self) -> &'static str {
        "ce_"
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        self.0.publish(messages).await
    }

    async fn consume(&self, what: &Subscription) -> Result<Box<dyn Consumer>, BusError> {
        Ok(Box::new(taking::Taking::open(&self.0, what).await?))
    }

    async fn broadcast(&self, channel: &str, body: Bytes) -> Result<(), BusError> {
        self.0.make(channel, Some(KEEP_BROADCASTS)).await?;
        let record = FutureRecord::<str, [u8]>::to(channel).payload(&body);
        // Nobody waits for it to arrive: it may be lost.
        self.0.producer().send_result(record).map(drop).map_err(|(error, _)| self.0.error(&error))
    }

    async fn listen(&self, channel: &str) -> Result<Box<dyn Listener>, BusError> {
        Ok(Box::new(taking::Hearing::open(&self.0, channel).await?))
    }
}
