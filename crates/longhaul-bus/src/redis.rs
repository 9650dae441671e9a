//! Redis Streams.
//!
//! A topic is a stream under its name; what is published to a log also trims what is older than it is kept. A group
//! is a consumer group. What a consumer that died had taken is claimed by the others (XAUTOCLAIM) when it was idle
//! for as long as a message may stay unsettled. The fields of an entry are in `Fields`. Broadcasts are PUBLISH.
//!
//! Redis acknowledges what is in its memory; whether it is on disk by then is decided by its `appendfsync`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use redis::aio::{MultiplexedConnection, PubSubStream};
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ErrorKind, FromRedisValue,
    IntoConnectionInfo as _, RedisConnectionInfo, RedisError, TlsCertificates, Value,
};

use crate::address::{Address, KEEP_PARAM};
use crate::bus::{
    Bus, BusError, Consumer, Kind, Listener, Message, NotPublished, Outgoing, Subscription, TIMEOUT, To, in_time,
};
use crate::opening::Opening;

mod taking;

/// How many commands go out at once.
const PIPELINE: usize = 1_000;

/// Redis.
pub(crate) struct Redis(Arc<Inner>);

struct Inner {
    name: String,
    client: Client,
    keep: Option<Duration>,
    /// The connection for everything that does not block; `None` after it was lost.
    current: Mutex<Option<MultiplexedConnection>>,
}

impl Redis {
    /// Connects; `redis://` or, for TLS, `rediss://`. The path is the number of the database.
    pub(crate) async fn connect(url: &str) -> Result<Self, BusError> {
        let address = Address::parse(url, 6379, &[KEEP_PARAM])?;
        let name = format!("Redis at {}", address.shown());
        let inner = Inner { client: client(&address)?, keep: address.keep()?, current: Mutex::default(), name };
        inner.connection().await?;
        Ok(Self(Arc::new(inner)))
    }
}

pub(crate) fn client(address: &Address) -> Result<Client, BusError> {
    let wrong = |error: RedisError| BusError::Invalid(format!("the URL of the bus cannot be used: {error}"));
    let [(host, port)] = &address.hosts[..] else {
        return Err(BusError::Invalid("the URL of the bus names several hosts; Redis takes one".to_owned()));
    };
    let number = |path: &str| {
        let why = "the path of the URL of the bus must be the number of a database of Redis";
        path.parse().map_err(|_| BusError::Invalid(why.to_owned()))
    };
    let mut settings =
        RedisConnectionInfo::default().set_db(address.path.as_deref().map(number).transpose()?.unwrap_or(0));
    if let Some(user) = &address.user {
        settings = settings.set_username(user);
    }
    if let Some(password) = &address.password {
        settings = settings.set_password(password);
    }
    let tls = address.scheme == "rediss";
    let at = if tls {
        ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host.clone(), *port)
    };
    let info = at.into_connection_info().map_err(wrong)?.set_redis_settings(settings);
    if !tls {
        return Client::open(info).map_err(wrong);
    }
    let certificates = address.certificates()?;
    let client_tls =
        certificates.client.map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key });
    Client::build_with_tls(info, TlsCertificates { client_tls, root_cert: certificates.ca }).map_err(wrong)
}

impl Inner {
    fn error(&self, error: &RedisError) -> BusError {
        let (bus, why) = (self.name.clone(), error.to_string());
        let denied = matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM"))
            || error.kind() == ErrorKind::AuthenticationFailed;
        if denied {
            BusError::Denied { bus, why }
        } else if error.is_io_error() || matches!(error.code(), Some("LOADING" | "BUSYLOADING" | "MASTERDOWN")) {
            BusError::Unreachable { bus, why }
        } else {
            BusError::Failed { bus, why }
        }
    }

    /// A connection of one's own.
    async fn connect(&self, response_timeout: Option<Duration>) -> Result<MultiplexedConnection, BusError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(5)))
            .set_response_timeout(response_timeout);
        let connected = self.client.get_multiplexed_async_connection_with_config(&config);
        in_time(&self.name, "connecting", async { connected.await.map_err(|error| self.error(&error)) }).await
    }

    /// The connection that everyone shares.
    async fn connection(&self) -> Result<MultiplexedConnection, BusError> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(connection) = current {
            return Ok(connection);
        }
        let connection = self.connect(Some(TIMEOUT)).await?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        Ok(connection)
    }

    /// What went wrong; when it was the connection, the next call makes a new one.
    fn met(&self, error: &RedisError) -> BusError {
        let met = self.error(error);
        if matches!(met, BusError::Unreachable { .. }) || error.is_unrecoverable_error() {
            *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        met
    }

    async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, BusError> {
        let mut connection = self.connection().await?;
        command.query_async(&mut connection).await.map_err(|error| self.met(&error))
    }

    /// The command that adds a message to a stream.
    fn add(&self, outgoing: &Outgoing) -> Cmd {
        let mut command = redis::cmd("XADD");
        let subject = match &outgoing.to {
            To::Address(address) => {
                command.arg(address);
                ""
            }
            To::Topic { topic, subject } => {
                command.arg(&*topic.name);
                if let (Kind::Log, Some(keep)) = (topic.kind, self.keep) {
                    let keep = i64::try_from(keep.as_millis()).unwrap_or(i64::MAX);
                    let oldest = jiff::Timestamp::now().as_millisecond().saturating_sub(keep).max(0);
                    command.arg("MINID").arg("~").arg(oldest);
                }
                subject
            }
        };
        command.arg("*");
        let message = &outgoing.message;
        let mut put = |name: &str, value: &[u8]| {
            command.arg(name).arg(value);
        };
        for (name, value) in &message.headers {
            put(name, value.as_bytes());
        }
        for (name, value) in [
            (Fields::ID, message.id.as_deref()),
            (Fields::KEY, message.key.as_deref()),
            (Fields::SUBJECT, (!subject.is_empty()).then_some(subject)),
            (Fields::CONTENT_TYPE, message.content_type.as_deref()),
            (Fields::REPLY_TO, message.reply_to.as_deref()),
            (Fields::CORRELATION_ID, message.correlation_id.as_deref()),
        ] {
            if let Some(value) = value {
                put(name, value.as_bytes());
            }
        }
        put(Fields::DATA, &message.body);
        command
    }

    async fn publish_some(&self, messages: &[Outgoing]) -> Result<Vec<Result<(), BusError>>, BusError> {
        let mut connection = self.connection().await?;
        let mut pipe = redis::pipe();
        pipe.ignore_errors();
        for outgoing in messages {
            pipe.add_command(self.add(outgoing));
        }
        let answers: Vec<Result<Value, RedisError>> =
            pipe.query_async(&mut connection).await.map_err(|error| self.met(&error))?;
        Ok(answers.into_iter().map(|answer| answer.map(drop).map_err(|error| self.met(&error))).collect())
    }

    async fn publish(&self, messages: &[Outgoing]) -> Result<(), NotPublished> {
        let mut results = Vec::with_capacity(messages.len());
        for some in messages.chunks(PIPELINE) {
            match self.publish_some(some).await {
                Ok(answers) => results.extend(answers),
                Err(error) => {
                    results.resize_with(messages.len(), || Err(error.clone()));
                    break;
                }
            }
        }
        NotPublished::from_results(results)
    }
}

/// The fields of an entry that are no headers.
struct Fields;

impl Fields {
    const ID: &str = "id";
    const KEY: &str = "key";
    const SUBJECT: &str = "subject";
    const CONTENT_TYPE: &str = "content-type";
    const REPLY_TO: &str = "reply-to";
    const CORRELATION_ID: &str = "correlation-id";
    const DATA: &str = "data";
}

/// An entry as a message.
fn message(fields: impl IntoIterator<Item = (String, Value)>) -> Message {
    let mut message = Message::default();
    for (name, value) in fields {
        let bytes = match value {
            Value::BulkString(bytes) => bytes,
            Value::SimpleString(text) => text.into_bytes(),
            Value::Int(number) => number.to_string().into_bytes(),
            _ => continue,
        };
        if name == Fields::DATA {
            message.body = bytes.into();
            continue;
        }
        let Ok(text) = String::from_utf8(bytes) else { continue };
        match name.as_str() {
            Fields::ID => message.id = Some(text),
            Fields::KEY => message.key = Some(text),
            Fields::CONTENT_TYPE => message.content_type = Some(text),
            Fields::REPLY_TO => message.reply_to = Some(text),
            Fields::CORRELATION_ID => message.correlation_id = Some(text),
            Fields::SUBJECT => {}
            _ => message.headers.push((name, text)),
        }
    }
    message
}

#[async_trait]
impl Bus for Redis {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn max_bytes(&self) -> usize {
        64 * 1024 * 1024
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
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(channel).arg(&body[..]);
        self.0.ask::<Value>(&publish).await.map(drop)
    }

    async fn listen(&self, channel: &str) -> Result<Box<dyn Listener>, BusError> {
        let heard = Some(hear(Arc::clone(&self.0), channel.to_owned()).await?);
        let (redis, channel) = (Arc::clone(&self.0), channel.to_owned());
        Ok(Box::new(Hearing { redis, channel, heard, opening: Opening::new() }))
    }
}

struct Hearing {
    redis: Arc<Inner>,
    channel: String,
    /// `None` after the connection was lost.
    heard: Option<PubSubStream>,
    opening: Opening<PubSubStream>,
}

async fn hear(redis: Arc<Inner>, channel: String) -> Result<PubSubStream, BusError> {
    let opened = async {
        let error = |error| redis.error(&error);
        let mut listening = redis.client.get_async_pubsub().await.map_err(error)?;
        listening.subscribe(&channel).await.map_err(error)?;
        Ok(listening.into_on_message())
    };
    in_time(&redis.name, "listening", opened).await
}

#[async_trait]
impl Listener for Hearing {
    async fn next(&mut self) -> Result<Bytes, BusError> {
        let heard = match &mut self.heard {
            Some(heard) => heard,
            None => {
                let (redis, channel) = (Arc::clone(&self.redis), self.channel.clone());
                self.heard.insert(self.opening.wait(&self.redis.name, || hear(redis, channel)).await?)
            }
        };
        let heard = heard.next().await;
        match heard {
            Some(heard) => Ok(Bytes::copy_from_slice(heard.get_payload_bytes())),
            None => {
                self.heard = None;
                let why = "the connection was lost".to_owned();
                Err(BusError::Unreachable { bus: self.redis.name.clone(), why })
            }
        }
    }
}
