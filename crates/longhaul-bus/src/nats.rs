//! NATS with JetStream.
//!
//! A topic is a stream that covers the subjects `TOPIC` and `TOPIC.>`; one that somebody made with other
//! settings is used as it is. A log is kept for a time, a queue's messages go when they were acknowledged. A
//! group is a durable pull consumer. The id of a message goes as `Nats-Msg-Id`, by which the server drops what it
//! has had within its window. Broadcasts are plain NATS.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::pull::{Config as PullConfig, Stream as PullStream};
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy};
use async_nats::jetstream::context::{Context, ContextBuilder, PublishAckFuture, PublishErrorKind};
use async_nats::jetstream::message::{Acker, PublishMessage};
use async_nats::jetstream::stream::{Config as StreamConfig, RetentionPolicy, StorageType};
use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, HeaderMap, ServerAddr, Subscriber};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::address::{Address, KEEP_PARAM};
use crate::bus::{
    Bus, BusError, Consumer, Delivery, Kind, Listener, Message, NotPublished, Outgoing, Settle, Subscription,
    TIMEOUT, To, Topic, dead_letter, in_time,
};
use crate::opening::Opening;
use crate::outage::Outage;
use crate::tls;

const PARAMS: [&str; 4] = [KEEP_PARAM, "creds", "token", "replicas"];
/// How many publishes may wait for their acknowledgement at once.
const MOST_UNACKNOWLEDGED: usize = 10_000;
/// What the addresses begin with at which clients wait for one answer.
const INBOX: &str = "_INBOX.";
/// What a message may be bigger than its body, by its subject and headers.
const AROUND: usize = 16 * 1024;

/// NATS.
pub(crate) struct Nats(Arc<Inner>);

struct Inner {
    name: String,
    client: Client,
    context: Context,
    /// Counts lost connections: what was under way then is not acknowledged any more.
    losses: watch::Receiver<u64>,
    keep: Option<Duration>,
    replicas: usize,
    /// Streams by topic, once found or made.
    streams: Mutex<HashMap<Topic, Arc<str>>>,
}

impl Nats {
    /// Connects; `nats://` or, for TLS, `tls://`.
    pub(crate) async fn connect(url: &str) -> Result<Self, BusError> {
        let address = Address::parse(url, 4222, &PARAMS)?;
        let name = format!("NATS at {}", address.shown());
        let (losses, seen) = watch::channel(0);
        let client = options(&address, name.clone(), losses).await?;
        let servers: Vec<ServerAddr> = address
            .hosts
            .iter()
            .map(|(host, port)| {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                format!("nats://{host}:{port}").parse()
            })
            .collect::<Result<_, _>>()
            .map_err(|error| BusError::Invalid(format!("the URL of the bus has a host that is none: {error}")))?;
        let client = client.connect(servers).await.map_err(|error| {
            let why = with_sources(&error);
            match error.kind() {
                ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                    BusError::Denied { bus: name.clone(), why }
                }
                _ => BusError::Unreachable { bus: name.clone(), why },
            }
        })?;
        let context = ContextBuilder::new()
            .timeout(TIMEOUT)
            .ack_timeout(TIMEOUT)
            .max_ack_inflight(MOST_UNACKNOWLEDGED)
            .backpressure_on_inflight(true)
            .build(client.clone());
        let replicas = address.number("replicas")?.unwrap_or(1).into();
        let streams = Mutex::default();
        let inner = Inner { name, client, context, losses: seen, keep: address.keep()?, replicas, streams };
        Ok(Self(Arc::new(inner)))
    }
}

async fn options(address: &Address, name: String, losses: watch::Sender<u64>) -> Result<ConnectOptions, BusError> {
    // The connection, and what the server complains of.
    let outages = Mutex::new((Outage::default(), Outage::default()));
    let mut options = ConnectOptions::new()
        .name("longhaul")
        .ping_interval(Duration::from_secs(10))
        .reconnect_delay_callback(|attempt| Duration::from_millis(50 << attempt.min(5)))
        .event_callback(move |event| {
            let (connection, complaints) = &mut *outages.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                Event::Disconnected => {
                    losses.send_modify(|count| *count += 1);
                    if connection.met() {
                        tracing::warn!("{name}: the connection was lost; connecting again");
                    }
                }
                Event::Connected => match connection.over() {
                    Some(after) => tracing::warn!(?after, "{name}: connected again"),
                    None => tracing::debug!("{name}: connected"),
                },
                // Each try to connect has one of these.
                Event::ClientError(error) if connection.met() => {
                    tracing::warn!(%error, "{name} does not answer; trying again");
                }
                Event::ClientError(error) => tracing::debug!(%error, "{name} does not answer"),
                other if complaints.met() => tracing::warn!(event = %other, "{name}"),
                other => tracing::debug!(event = %other, "{name}"),
            }
            std::future::ready(())
        });
    if let Some(path) = address.param("creds") {
        let wrong = |error| {
            BusError::Invalid(format!("the file '{path}' ('creds' in the URL of the bus) cannot be used: {error}"))
        };
        options = options.credentials_file(path).await.map_err(wrong)?;
    }
    if let Some(token) = address.param("token") {
        options = options.token(token.to_owned());
    }
    if let (Some(user), Some(password)) = (&address.user, &address.password) {
        options = options.user_and_password(user.clone(), password.clone());
    }
    if address.scheme == "tls" {
        options = options.require_tls(true).tls_client_config(tls::client_config(&address.certificates()?)?);
    }
    Ok(options)
}

/// What went wrong, with what is behind it.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let source_text = source.to_string();
        if !text.contains(&source_text) {
            text = format!("{text}: {source_text}");
        }
        next = source.source();
    }
    text
}

impl Inner {
    fn failed(&self, what: &str, error: &dyn std::error::Error) -> BusError {
        let why = format!("{what}: {}", with_sources(error));
        if why.to_ascii_lowercase().contains("permissions violation") {
            return BusError::Denied { bus: self.name.clone(), why };
        }
        BusError::Failed { bus: self.name.clone(), why }
    }

    fn check_connected(&self) -> Result<(), BusError> {
        if self.client.connection_state() == State::Connected {
            return Ok(());
        }
        Err(self.lost())
    }

    fn lost(&self) -> BusError {
        BusError::Unreachable { bus: self.name.clone(), why: "the connection was lost".to_owned() }
    }

    /// The stream of a topic: the one that covers its subject, else a new one.
    async fn stream(&self, topic: &Topic) -> Result<Arc<str>, BusError> {
        let known = self.streams.lock().unwrap_or_else(PoisonError::into_inner).get(topic).cloned();
        if let Some(stream) = known {
            return Ok(stream);
        }
        let stream: Arc<str> = match self.context.stream_by_subject(topic.name.to_string()).await {
            Ok(stream) => stream.into(),
            Err(_) => self.make_stream(topic).await?.into(),
        };
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.insert(topic.clone(), Arc::clone(&stream));
        Ok(stream)
    }

    async fn make_stream(&self, topic: &Topic) -> Result<String, BusError> {
        let name = topic.name.replace('.', "_").to_ascii_uppercase();
        let config = StreamConfig {
            name: name.clone(),
            subjects: vec![topic.name.to_string(), format!("{}.>", topic.name)],
            retention: match topic.kind {
                Kind::Log => RetentionPolicy::Limits,
                Kind::Queue => RetentionPolicy::WorkQueue,
            },
            max_age: match topic.kind {
                Kind::Log => self.keep.unwrap_or_default(),
                Kind::Queue => Duration::ZERO,
            },
            storage: StorageType::File,
            num_replicas: self.replicas,
            ..StreamConfig::default()
        };
        let made = self.context.get_or_create_stream(config).await;
        made.map(|_| name.clone()).map_err(|error| {
            let what =
                format!("the stream {name} for {topic} cannot be made; make it by hand or let the user do it");
            self.failed(&what, &error)
        })
    }

    async fn subject(&self, to: &To) -> Result<String, BusError> {
        match to {
            To::Address(address) => {
                // Without a stream, nobody would acknowledge it.
                self.context.stream_by_subject(address.clone()).await.map_err(|error| {
                    self.failed(
                        &format!("no stream has the subject '{address}'; make one, or listen to an inbox"),
                        &error,
                    )
                })?;
                Ok(address.clone())
            }
            To::Topic { topic, subject } => {
                self.stream(topic).await?;
                Ok(if subject.is_empty() { topic.name.to_string() } else { format!("{}.{subject}", topic.name) })
            }
        }
    }

    /// Hands a message to the connection; gives what its acknowledgement will be, if there will be one.
    async fn send(&self, outgoing: &Outgoing) -> Result<Option<PublishAckFuture>, BusError> {
        if let To::Address(inbox) = &outgoing.to
            && inbox.starts_with(INBOX)
        {
            return self.send_plain(inbox, &outgoing.message).await.map(|()| None);
        }
        let subject = self.subject(&outgoing.to).await?;
        let publish =
            PublishMessage::build().payload(outgoing.message.body.clone()).headers(headers(&outgoing.message));
        let sent = self.context.send_publish(subject, publish).await;
        sent.map(Some).map_err(|error| self.failed("publishing", &error))
    }

    /// Waits for the acknowledgement.
    async fn acknowledged(&self, outgoing: &Outgoing, ack: PublishAckFuture) -> Result<(), BusError> {
        let Err(error) = ack.await else { return Ok(()) };
        if let (PublishErrorKind::StreamNotFound, To::Topic { topic, .. }) = (error.kind(), &outgoing.to) {
            self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(topic);
            return Err(self.failed(&format!("the stream of {topic} is gone, or not ready yet"), &error));
        }
        Err(self.failed("publishing", &error))
    }

    /// An inbox of a client that waits belongs to no stream: plain NATS is all there is.
    async fn send_plain(&self, subject: &str, message: &Message) -> Result<(), BusError> {
        let sent = self.client.publish_with_headers(subject.to_owned(), headers(message), message.body.clone());
        sent.await.map_err(|error| self.failed("publishing", &error))?;
        self.client.flush().await.map_err(|error| self.failed("publishing", &error))
    }

    /// Listens to a subject: what is told after this returns is heard. The server takes what a connection sends in its order,
    /// so it has the subscription when it gives back what was sent after it.
    async fn hear(&self, subject: &str) -> Result<Subscriber, BusError> {
        let listening = self.client.subscribe(subject.to_owned()).await;
        let listening = listening.map_err(|error| self.failed("listening", &error))?;
        let probe = self.client.new_inbox();
        let echo = self.client.subscribe(probe.clone()).await;
        let mut echo = echo.map_err(|error| self.failed("listening", &error))?;
        let sent = self.client.publish(probe, Bytes::new()).await;
        sent.map_err(|error| self.failed("listening", &error))?;
        echo.next().await.map(|_| listening).ok_or_else(|| self.lost())
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        let mut losses = self.losses.clone();
        losses.mark_unchanged();
        if let Err(error) = self.check_connected() {
            return Err(NotPublished::all(messages.len(), error));
        }
        let mut sent = Vec::with_capacity(messages.len());
        for outgoing in messages {
            sent.push(self.send(outgoing).await);
        }
        let lost = async {
            // The sender lives as long as the client.
            if losses.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::pin!(lost);
        let mut results = Vec::with_capacity(messages.len());
        for (outgoing, sent) in messages.iter().zip(sent) {
            results.push(match sent {
                Err(error) => Err(error),
                Ok(None) => Ok(()),
                Ok(Some(ack)) => tokio::select! {
                    biased;
                    done = self.acknowledged(outgoing, ack) => done,
                    () = &mut lost => {
                        // Once is enough: from now on nothing that was sent before is answered.
                        let rest = messages.len() - results.len();
                        results.extend((0..rest).map(|_| Err(self.lost())));
                        break;
                    }
                },
            });
        }
        NotPublished::from_results(results)
    }
}

fn headers(message: &Message) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut put = |name: &str, value: &str| {
        // Headers are lines: what would end one is left out.
        let value: String = value.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
        headers.insert(name, value);
    };
    for (name, value) in &message.headers {
        put(name, value);
    }
    let own = [
        ("Nats-Msg-Id", &message.id),
        ("Content-Type", &message.content_type),
        ("Reply-To", &message.reply_to),
        ("Correlation-Id", &message.correlation_id),
        ("Longhaul-Key", &message.key),
    ];
    for (name, value) in own {
        if let Some(value) = value {
            put(name, value);
        }
    }
    headers
}

fn message(headers: Option<&HeaderMap>, body: Bytes) -> Message {
    let mut message = Message { body, ..Message::default() };
    for (name, values) in headers.iter().flat_map(|headers| headers.iter()) {
        let Some(value) = values.first() else { continue };
        let (name, value) = (name.to_string(), value.to_string());
        match name.to_ascii_lowercase().as_str() {
            "nats-msg-id" => message.id = Some(value),
            "content-type" => message.content_type = Some(value),
            "reply-to" => message.reply_to = Some(value),
            "correlation-id" => message.correlation_id = Some(value),
            "longhaul-key" => message.key = Some(value),
            _ => message.headers.push((name, value)),
        }
    }
    message
}

#[async_trait]
impl Bus for Nats {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn max_bytes(&self) -> usize {
        self.0.client.server_info().max_payload.saturating_sub(AROUND)
    }

    fn event_prefix(&self) -> &'static str {
        "ce-"
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        self.0.publish(messages).await
    }

    async fn consume(&self, what: &Subscription) -> Result<Box<dyn Consumer>, BusError> {
        Ok(Box::new(Taking {
            nats: Arc::clone(&self.0),
            what: what.clone(),
            stream: Some(open(Arc::clone(&self.0), what.clone()).await?),
            opening: Opening::new(),
            // As many are on their way here as are being worked on.
            room: Arc::new(Semaphore::new(what.in_flight.div_ceil(2))),
        }))
    }

    async fn broadcast(&self, channel: &str, body: Bytes) -> Result<(), BusError> {
        self.0.check_connected()?;
        let sent = self.0.client.publish(channel.to_owned(), body);
        in_time(&self.0.name, "telling others", async {
            sent.await.map_err(|error| self.0.failed("telling others", &error))
        })
        .await
    }

    async fn listen(&self, channel: &str) -> Result<Box<dyn Listener>, BusError> {
        self.0.check_connected()?;
        let listening = in_time(&self.0.name, "listening", self.0.hear(channel)).await?;
        Ok(Box::new(Hearing { nats: Arc::clone(&self.0), listening, channel: channel.to_owned() }))
    }
}

struct Taking {
    nats: Arc<Inner>,
    what: Subscription,
    /// `None` after an error.
    stream: Option<PullStream>,
    opening: Opening<PullStream>,
    room: Arc<Semaphore>,
}

/// Makes the consumer of a group, or takes the one that is there, and begins to ask it for messages.
async fn open(nats: Arc<Inner>, what: Subscription) -> Result<PullStream, BusError> {
    nats.check_connected()?;
    let opened = async {
        let stream = nats.stream(&what.topic).await?;
        // What goes on in the names of consumers is narrower than in ours.
        let sound = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' };
        let group: String = what.group.chars().map(sound).collect();
        let config = PullConfig {
            durable_name: Some(group),
            deliver_policy: DeliverPolicy::All,
            ack_policy: AckPolicy::Explicit,
            ack_wait: what.ack_wait,
            max_ack_pending: -1,
            filter_subjects: vec![what.topic.name.to_string(), format!("{}.>", what.topic.name)],
            ..PullConfig::default()
        };
        let consumer = nats.context.create_consumer_on_stream(config, stream.to_string()).await;
        let consumer = consumer.map_err(|error| {
            // The stream may be gone.
            nats.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&what.topic);
            nats.failed("the consumer cannot be made", &error)
        })?;
        let messages = consumer
            .stream()
            .max_messages_per_batch(what.in_flight.div_ceil(2))
            .expires(Duration::from_secs(30))
            .heartbeat(Duration::from_secs(2))
            .messages();
        messages.await.map_err(|error| nats.failed("messages cannot be asked for", &error))
    };
    in_time(&nats.name, "opening the consumer", opened).await
}

#[async_trait]
impl Consumer for Taking {
    async fn next(&mut self) -> Result<Delivery, BusError> {
        // The semaphore is never closed.
        let Ok(room) = Arc::clone(&self.room).acquire_owned().await else { std::future::pending().await };
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => {
                let (nats, what) = (Arc::clone(&self.nats), self.what.clone());
                self.stream.insert(self.opening.wait(&self.nats.name, || open(nats, what)).await?)
            }
        };
        let next = stream.next().await;
        let taken = match next {
            Some(Ok(taken)) => taken,
            Some(Err(error)) => {
                self.stream = None;
                return Err(BusError::Unreachable { bus: self.nats.name.clone(), why: with_sources(&error) });
            }
            None => {
                self.stream = None;
                return Err(self.nats.lost());
            }
        };
        // A stream that was deleted and made again counts from 1 again: the time tells its messages from those before.
        let position = taken.info().ok().map(|info| {
            format!("nats:{}:{}:{}", info.stream, info.published.unix_timestamp_nanos(), info.stream_sequence)
        });
        let (taken, acker) = taken.split();
        let message = message(taken.headers.as_ref(), taken.payload);
        let settle = Settling {
            nats: Arc::clone(&self.nats),
            what: self.what.clone(),
            message: message.clone(),
            acker,
            _room: room,
        };
        Ok(Delivery::new(message, position, settle))
    }
}

struct Settling {
    nats: Arc<Inner>,
    what: Subscription,
    message: Message,
    acker: Acker,
    _room: OwnedSemaphorePermit,
}

impl Settling {
    async fn tell(&self, kind: AckKind) -> Result<(), BusError> {
        let told = self.acker.ack_with(kind).await;
        told.map_err(|error| self.nats.failed("acknowledging", &*error))
    }
}

#[async_trait]
impl Settle for Settling {
    async fn ack(self: Box<Self>) -> Result<(), BusError> {
        self.tell(AckKind::Ack).await
    }

    async fn reject(self: Box<Self>, reason: &str) -> Result<(), BusError> {
        let dead = dead_letter(&self.what.topic, &self.message, reason);
        self.nats.publish(&[dead]).await.map_err(|not| not.error)?;
        self.tell(AckKind::Ack).await
    }

    async fn redeliver(self: Box<Self>, after: Duration) -> Result<(), BusError> {
        self.tell(AckKind::Nak(Some(self.what.put_off(after)))).await
    }
}

struct Hearing {
    nats: Arc<Inner>,
    listening: Subscriber,
    channel: String,
}

#[async_trait]
impl Listener for Hearing {
    async fn next(&mut self) -> Result<Bytes, BusError> {
        if let Some(heard) = self.listening.next().await {
            return Ok(heard.payload);
        }
        // It ends only when the client was told to, which nobody does; a new one costs nothing.
        let listening = self.nats.client.subscribe(self.channel.clone()).await;
        self.listening = listening.map_err(|error| self.nats.failed("listening", &error))?;
        Err(self.nats.lost())
    }
}
