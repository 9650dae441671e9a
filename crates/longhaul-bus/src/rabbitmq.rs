//! RabbitMQ, and what speaks AMQP 0-9-1 as it does.
//!
//! A queue is a durable quorum queue under the topic's name, whose dead letters go to the queue `TOPIC-dead`. A log is a
//! topic exchange, to which each group has a quorum queue `TOPIC.GROUP` bound; what nobody has bound a queue for is
//! not kept. What exists already is used as it is. Every message is persistent and confirmed by the broker.
//! Broadcasts go through a fanout exchange to queues that vanish with their listener.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionBuilder, ConnectionProperties, ErrorKind,
    ExchangeKind, PublisherConfirm,
};

use crate::address::{Address, KEEP_PARAM};
use crate::bus::{
    Bus, BusError, Consumer, Kind, Listener, Message, NotPublished, Outgoing, Subscription, To, Topic, in_time,
};

mod taking;

/// RabbitMQ.
pub(crate) struct RabbitMq(Arc<Inner>);

struct Inner {
    name: String,
    /// One for each host, tried in turn.
    uris: Vec<AMQPUri>,
    tls: OwnedTLSConfig,
    keep: Option<Duration>,
    /// `None` after it was lost.
    current: Mutex<Option<Arc<Link>>>,
}

/// A connection, and what is known of the broker as long as it lasts.
struct Link {
    connection: Connection,
    /// With confirms.
    publishing: Channel,
    /// Without.
    telling: Channel,
    declared: Mutex<HashSet<String>>,
}

impl RabbitMq {
    /// Connects; `amqp://` or, for TLS, `amqps://`. The path is the virtual host.
    pub(crate) async fn connect(url: &str) -> Result<Self, BusError> {
        let address = Address::parse(url, if url.starts_with("amqps") { 5671 } else { 5672 }, &[KEEP_PARAM])?;
        let certificates = address.certificates()?;
        let ca = certificates.ca.map(String::from_utf8).transpose();
        let ca = ca.map_err(|_| BusError::Invalid("the file of 'ca' is no PEM".to_owned()))?;
        let identity = certificates.client.map(|(pem, key)| OwnedIdentity::PKCS8 { pem, key });
        let inner = Inner {
            name: format!("RabbitMQ at {}", address.shown()),
            uris: address.hosts.iter().map(|(host, port)| uri(&address, host, *port)).collect(),
            tls: OwnedTLSConfig { identity, cert_chain: ca },
            keep: address.keep()?,
            current: Mutex::default(),
        };
        inner.link().await?;
        Ok(Self(Arc::new(inner)))
    }
}

fn uri(address: &Address, host: &str, port: u16) -> AMQPUri {
    let or_guest = |text: &Option<String>| text.clone().unwrap_or_else(|| "guest".to_owned());
    AMQPUri {
        scheme: if address.scheme == "amqps" { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo { username: or_guest(&address.user), password: or_guest(&address.password) },
            host: host.to_owned(),
            port,
        },
        vhost: address.path.clone().unwrap_or_else(|| "/".to_owned()),
        query: AMQPQueryString {
            heartbeat: Some(10),
            connection_timeout: Some(5_000),
            ..AMQPQueryString::default()
        },
    }
}

impl Inner {
    fn error(&self, error: &lapin::Error) -> BusError {
        let (bus, why) = (self.name.clone(), error.to_string());
        match error.kind() {
            ErrorKind::ProtocolError(error) => match error.kind() {
                AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED)
                | AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => BusError::Denied { bus, why },
                AMQPErrorKind::Hard(AMQPHardError::CONNECTIONFORCED) => BusError::Unreachable { bus, why },
                _ => BusError::Failed { bus, why },
            },
            ErrorKind::AuthProviderError(_) => BusError::Denied { bus, why },
            _ => BusError::Unreachable { bus, why },
        }
    }

    /// The connection that everyone shares.
    async fn link(&self) -> Result<Arc<Link>, BusError> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(link) = current
            && link.is_whole()
        {
            return Ok(link);
        }
        let link = Arc::new(in_time(&self.name, "connecting", self.connect()).await?);
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&link));
        Ok(link)
    }

    async fn connect(&self) -> Result<Link, BusError> {
        let mut last = None;
        for uri in &self.uris {
            match self.connect_to(uri).await {
                Ok(link) => return Ok(link),
                Err(error) => last = Some(self.error(&error)),
            }
        }
        Err(last.unwrap_or_else(|| BusError::Invalid("the URL of the bus has no host".to_owned())))
    }

    async fn connect_to(&self, uri: &AMQPUri) -> Result<Link, lapin::Error> {
        let properties = ConnectionProperties::default().with_connection_name("longhaul".into());
        let builder = ConnectionBuilder::new()?
            .with_uri(uri.clone())
            .with_properties(properties)
            .with_tls_config(self.tls.clone());
        let connection = builder.connect().await?;
        let publishing = connection.create_channel().await?;
        publishing.confirm_select(ConfirmSelectOptions::default()).await?;
        let telling = connection.create_channel().await?;
        Ok(Link { connection, publishing, telling, declared: Mutex::default() })
    }

    /// Where a message goes: an exchange and a routing key.
    async fn place(&self, link: &Link, to: &To) -> Result<(ShortString, ShortString), BusError> {
        match to {
            To::Address(queue) => Ok((ShortString::default(), self.short(queue)?)),
            To::Topic { topic, subject } => {
                self.make(link, topic).await?;
                let name = self.short(&topic.name)?;
                match topic.kind {
                    Kind::Queue => Ok((ShortString::default(), name)),
                    // A routing key is bounded too; who listens for one that long has its beginning.
                    Kind::Log => Ok((name, self.short(&subject.chars().take(255).collect::<String>())?)),
                }
            }
        }
    }

    /// Names, ids and addresses have at most 255 bytes here.
    fn short(&self, text: &str) -> Result<ShortString, BusError> {
        ShortString::try_new(text).map_err(|_| {
            BusError::Invalid(format!(
                "'{}…' is too long for {}",
                text.chars().take(40).collect::<String>(),
                self.name
            ))
        })
    }

    /// Makes the queue or the exchange of a topic.
    async fn make(&self, link: &Link, topic: &Topic) -> Result<(), BusError> {
        match topic.kind {
            Kind::Queue => {
                let dead = topic.dead_letters().name;
                let mut arguments = quorum();
                if !topic.name.ends_with("-dead") {
                    self.make_queue(link, &dead, quorum()).await?;
                    arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("".into()));
                    arguments.insert("x-dead-letter-routing-key".into(), AMQPValue::LongString((&*dead).into()));
                }
                self.make_queue(link, &topic.name, arguments).await
            }
            Kind::Log => self.make_exchange(link, &topic.name, ExchangeKind::Topic, true).await,
        }
    }

    async fn make_queue(&self, link: &Link, name: &str, arguments: FieldTable) -> Result<(), BusError> {
        if link.knows(&format!("queue {name}")) {
            return Ok(());
        }
        let short = self.short(name)?;
        self.declare(link, &format!("queue {name}"), async |channel| {
            channel.queue_declare(short, QueueDeclareOptions::durable(), arguments).await.map(drop)
        })
        .await
    }

    async fn make_exchange(
        &self,
        link: &Link,
        name: &str,
        kind: ExchangeKind,
        durable: bool,
    ) -> Result<(), BusError> {
        if link.knows(&format!("exchange {name}")) {
            return Ok(());
        }
        let short = self.short(name)?;
        let options = ExchangeDeclareOptions { durable, ..ExchangeDeclareOptions::default() };
        self.declare(link, &format!("exchange {name}"), async |channel| {
            channel.exchange_declare(short, kind, options, FieldTable::default()).await
        })
        .await
    }

    /// Declares something on a channel of its own: when it is there with other settings, the broker closes that.
    async fn declare(
        &self,
        link: &Link,
        what: &str,
        declare: impl AsyncFnOnce(&Channel) -> Result<(), lapin::Error>,
    ) -> Result<(), BusError> {
        let channel = link.connection.create_channel().await.map_err(|error| self.error(&error))?;
        match declare(&channel).await {
            Ok(()) => {}
            Err(error) if is_other_settings(&error) => {
                tracing::debug!(%error, what, "it is there with other settings and used as it is");
            }
            Err(error) => return Err(self.error(&error)),
        }
        link.declared.lock().unwrap_or_else(PoisonError::into_inner).insert(what.to_owned());
        Ok(())
    }

    /// The queue of a group.
    async fn make_group(&self, link: &Link, what: &Subscription) -> Result<String, BusError> {
        self.make(link, &what.topic).await?;
        if what.topic.kind == Kind::Queue {
            return Ok(what.topic.name.to_string());
        }
        let queue = format!("{}.{}", what.topic.name, what.group);
        let mut arguments = quorum();
        if let Some(keep) = self.keep {
            let keep = i64::try_from(keep.as_millis()).unwrap_or(i64::MAX);
            arguments.insert("x-message-ttl".into(), AMQPValue::LongLongInt(keep));
        }
        self.make_queue(link, &queue, arguments).await?;
        let (short, exchange) = (self.short(&queue)?, self.short(&what.topic.name)?);
        let bound = link.telling.queue_bind(
            short,
            exchange,
            "#".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        bound.await.map_err(|error| self.error(&error))?;
        Ok(queue)
    }

    async fn send(&self, link: &Link, outgoing: &Outgoing) -> Result<PublisherConfirm, BusError> {
        let (exchange, key) = self.place(link, &outgoing.to).await?;
        // A queue must be there; an exchange may have nobody behind it.
        let options = BasicPublishOptions { mandatory: exchange.as_str().is_empty(), ..Default::default() };
        let properties = self.properties(&outgoing.message)?;
        let sent = link.publishing.basic_publish(exchange, key, options, &outgoing.message.body, properties);
        sent.await.map_err(|error| self.error(&error))
    }

    async fn confirmed(&self, confirm: PublisherConfirm) -> Result<(), BusError> {
        let failed = |why: &str| Err(BusError::Failed { bus: self.name.clone(), why: why.to_owned() });
        match confirm.await.map_err(|error| self.error(&error))? {
            Confirmation::Ack(None) => Ok(()),
            Confirmation::Ack(Some(_)) => failed("there is no such queue; declare it before it is written to"),
            Confirmation::Nack(_) => failed("the broker could not keep the message; look at its log"),
            Confirmation::NotRequested => failed("the broker does not confirm messages"),
        }
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        let all = |error| NotPublished::all(messages.len(), error);
        let link = self.link().await.map_err(all)?;
        let published = async {
            let mut sent = Vec::with_capacity(messages.len());
            for outgoing in messages {
                sent.push(self.send(&link, outgoing).await);
            }
            let mut results = Vec::with_capacity(messages.len());
            for sent in sent {
                results.push(match sent {
                    Ok(confirm) => self.confirmed(confirm).await,
                    Err(error) => Err(error),
                });
            }
            Ok(results)
        };
        match in_time(&self.name, "publishing", published).await {
            Ok(results) => NotPublished::from_results(results),
            Err(error) => {
                // What is still under way on this link is of no use any more.
                *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Err(all(error))
            }
        }
    }

    fn properties(&self, message: &Message) -> Result<BasicProperties, BusError> {
        let mut headers = FieldTable::default();
        for (name, value) in &message.headers {
            headers.insert(self.short(name)?, AMQPValue::LongString(value.as_str().into()));
        }
        if let Some(key) = &message.key {
            headers.insert("longhaul-key".into(), AMQPValue::LongString(key.as_str().into()));
        }
        let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
        if let Some(id) = &message.id {
            properties = properties.with_message_id(self.short(id)?);
        }
        if let Some(content_type) = &message.content_type {
            properties = properties.with_content_type(self.short(content_type)?);
        }
        if let Some(reply_to) = &message.reply_to {
            properties = properties.with_reply_to(self.short(reply_to)?);
        }
        if let Some(correlation_id) = &message.correlation_id {
            properties = properties.with_correlation_id(self.short(correlation_id)?);
        }
        Ok(properties)
    }
}

impl Link {
    fn is_whole(&self) -> bool {
        self.connection.status().connected()
            && self.publishing.status().connected()
            && self.telling.status().connected()
    }

    fn knows(&self, what: &str) -> bool {
        self.declared.lock().unwrap_or_else(PoisonError::into_inner).contains(what)
    }
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments
}

fn is_other_settings(error: &lapin::Error) -> bool {
    match error.kind() {
        ErrorKind::ProtocolError(error) => *error.kind() == AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED),
        _ => false,
    }
}

/// A message as it came.
fn message(properties: &BasicProperties, body: Vec<u8>) -> Message {
    let text = |text: &Option<ShortString>| text.as_ref().map(|text| text.as_str().to_owned());
    let mut message = Message {
        id: text(properties.message_id()),
        key: None,
        content_type: text(properties.content_type()),
        reply_to: text(properties.reply_to()),
        correlation_id: text(properties.correlation_id()),
        headers: Vec::new(),
        body: body.into(),
    };
    for (name, value) in properties.headers().iter().flat_map(|headers| headers.inner()) {
        let value = match value {
            AMQPValue::LongString(text) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
            AMQPValue::ShortString(text) => text.as_str().to_owned(),
            AMQPValue::Boolean(flag) => flag.to_string(),
            AMQPValue::LongInt(number) => number.to_string(),
            AMQPValue::LongLongInt(number) => number.to_string(),
            _ => continue,
        };
        if name.as_str() == "longhaul-key" {
            message.key = Some(value);
        } else {
            message.headers.push((name.as_str().to_owned(), value));
        }
    }
    message
}

#[async_trait]
impl Bus for RabbitMq {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn max_bytes(&self) -> usize {
        15 * 1024 * 1024
    }

    fn event_prefix(&self) -> &'static str {
        "cloudEvents_"
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        self.0.publish(messages).await
    }

    async fn consume(&self, what: &Subscription) -> Result<Box<dyn Consumer>, BusError> {
        Ok(Box::new(taking::Taking::open(&self.0, what).await?))
    }

    async fn broadcast(&self, channel: &str, body: Bytes) -> Result<(), BusError> {
        let link = self.0.link().await?;
        let told = async {
            self.0.make_exchange(&link, channel, ExchangeKind::Fanout, false).await?;
            let exchange = self.0.short(channel)?;
            let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
            let sent = link.telling.basic_publish(exchange, ShortString::default(), options, &body, properties);
            sent.await.map(drop).map_err(|error| self.0.error(&error))
        };
        in_time(&self.0.name, "telling others", told).await
    }

    async fn listen(&self, channel: &str) -> Result<Box<dyn Listener>, BusError> {
        Ok(Box::new(taking::Hearing::open(&self.0, channel).await?))
    }
}
