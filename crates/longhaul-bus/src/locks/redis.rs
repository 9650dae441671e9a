//! Locks at Redis: a key that expires, with its owner as value. Any program can take part with
//! `SET longhaul/locks/TENANT/NAME OWNER NX PX …` and the usual script that deletes it only with its own owner.
//!
//! Those of us who wait are served in the order in which they came; a program that only tries `SET` may get in
//! between. Each of the three things to do is one script, so that nothing comes in between.
//!
//! One server, or one that is primary. When a replica takes over that had not seen a lock, the lock is lost, and
//! perhaps given twice: `docs/locks.md` says what helps.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use longhaul::lock::{LockClaim, LockService, LockServiceError, Take};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ErrorKind, FromRedisValue, RedisError, Script, ScriptInvocation};

use super::{Common, wrong_url};

/// How long Redis may take to let us in, and to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// After this time of silence one waits no longer. Who waits asks several times a second.
const SILENCE: Duration = Duration::from_secs(3);

/// Redis.
pub(super) struct Redis {
    client: Client,
    ttl: Duration,
    prefix: String,
    /// The connection that everyone shares; `None` after it was lost.
    current: Mutex<Option<MultiplexedConnection>>,
    take: Script,
    keep: Script,
    release: Script,
}

impl Redis {
    pub(super) async fn connect(url: &str) -> Result<Self, LockServiceError> {
        let Common { address, ttl, prefix } = Common::parse(url, 6379)?;
        let redis = Self {
            client: crate::redis::client(&address).map_err(wrong_url)?,
            ttl,
            prefix,
            current: Mutex::default(),
            take: Script::new(include_str!("take.lua")),
            keep: Script::new(include_str!("keep.lua")),
            release: Script::new(include_str!("release.lua")),
        };
        redis.connection().await?;
        Ok(redis)
    }

    async fn connection(&self) -> Result<MultiplexedConnection, LockServiceError> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(connection) = current {
            return Ok(connection);
        }
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(TIMEOUT)).set_response_timeout(Some(TIMEOUT));
        let connected = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let connection = connected.map_err(|error| error_of(&error))?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        Ok(connection)
    }

    async fn invoke<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T, LockServiceError> {
        let mut lost = Lost { redis: self, sure: true };
        let mut connection = self.connection().await?;
        let answer = script.invoke_async(&mut connection).await;
        let error = match answer {
            Ok(answer) => {
                lost.sure = false;
                return Ok(answer);
            }
            Err(error) => error,
        };
        let met = error_of(&error);
        lost.sure = matches!(met, LockServiceError::Unavailable { .. });
        Err(met)
    }

    fn keys<'a>(&self, script: &'a Script, claim: &LockClaim<'_>) -> ScriptInvocation<'a> {
        let mut invocation = script.key(format!("{}/{}", self.prefix, claim.name));
        for what in ["line", "seen"] {
            invocation.key(format!("{}:{what}/{}", self.prefix, claim.name));
        }
        invocation.arg(claim.owner);
        invocation
    }
}

/// Has the connection made anew when it did not answer, also when nobody waited long enough to see that.
struct Lost<'a> {
    redis: &'a Redis,
    sure: bool,
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        if self.sure {
            *self.redis.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

fn error_of(error: &RedisError) -> LockServiceError {
    let (service, why) = ("redis".to_owned(), error.to_string());
    // A server that is starting, or is no primary (any more): there will be another one at this address.
    let passing = matches!(error.code(), Some("LOADING" | "MASTERDOWN" | "READONLY" | "TRYAGAIN" | "CLUSTERDOWN"));
    let io = error.is_io_error() || error.is_timeout() || error.is_unrecoverable_error();
    if (io || passing) && error.kind() != ErrorKind::AuthenticationFailed {
        LockServiceError::Unavailable { service, why }
    } else {
        LockServiceError::Refused { service, why }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[async_trait]
impl LockService for Redis {
    fn name(&self) -> &str {
        "redis"
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }

    async fn take(&self, claim: &LockClaim<'_>) -> Result<Take, LockServiceError> {
        let mut script = self.keys(&self.take, claim);
        script.key(format!("{}:token", self.prefix)).arg(millis(claim.ttl));
        script.arg(claim.token.map_or_else(String::new, |token| token.to_string())).arg(millis(SILENCE));
        let answer: Vec<String> = self.invoke(&script).await?;
        match (answer.first().map(String::as_str), answer.get(1).and_then(|token| token.parse().ok())) {
            (Some("taken"), _) => Ok(Take::Taken),
            (Some("busy"), _) => Ok(Take::Busy),
            (Some("outdated"), Some(largest)) => Ok(Take::Outdated { largest }),
            _ => Err(LockServiceError::Refused {
                service: "redis".to_owned(),
                why: format!("the key '{}:token' is not a number; who else writes it?", self.prefix),
            }),
        }
    }

    async fn keep(&self, claim: &LockClaim<'_>) -> Result<bool, LockServiceError> {
        let mut script = self.keys(&self.keep, claim);
        script.arg(millis(claim.ttl));
        self.invoke(&script).await
    }

    async fn release(&self, claim: &LockClaim<'_>) -> Result<(), LockServiceError> {
        let script = self.keys(&self.release, claim);
        self.invoke::<bool>(&script).await.map(drop)
    }
}
