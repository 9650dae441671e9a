//! Lock services: what excludes others than the tasks of one store, and who leads.
//!
//! [`connect`] gives one for a URL; `Client::use_lock_service` takes it. What a service does for a task's
//! lock, and what it cannot do, is in `docs/locks.md`.

use std::sync::Arc;
use std::time::Duration;

use longhaul::lock::{DEFAULT_TTL, LockService, LockServiceError, MAX_TTL, MIN_TTL};

use crate::address::Address;
use crate::bus::BusError;

mod etcd;
mod redis;

/// What begins the names of everything that is kept at a service, unless the URL says otherwise.
const PREFIX: &str = "longhaul";

/// The lock service that the URL names: `redis://` or `rediss://`, `etcd://` or `etcds://` (several hosts with
/// commas between them), or `store:` for none beside the store, which is `None`. Reaches the service once, so
/// that what is wrong with the URL is found at the start.
///
/// `SCHEME://USER:PASSWORD@HOST:PORT?NAME=VALUE`, with the parameters `ttl` (how long a lock is kept without
/// being asked to: `10s`), `prefix`, and `ca`, `cert` and `key` for TLS.
pub async fn connect(url: &str) -> Result<Option<Arc<dyn LockService>>, LockServiceError> {
    if url == "store:" {
        return Ok(None);
    }
    match url.split_once("://").map(|(scheme, _)| scheme) {
        Some("redis" | "rediss") => Ok(Some(Arc::new(redis::Redis::connect(url).await?))),
        Some("etcd" | "etcds") => Ok(Some(Arc::new(etcd::Etcd::connect(url).await?))),
        _ => Err(LockServiceError::Url(
            "the URL of the lock service must begin with redis://, rediss://, etcd:// or etcds://, or be store:"
                .to_owned(),
        )),
    }
}

/// What the URLs of all services say.
struct Common {
    address: Address,
    ttl: Duration,
    prefix: String,
}

impl Common {
    fn parse(url: &str, default_port: u16) -> Result<Self, LockServiceError> {
        let address = Address::parse(url, default_port, &["ttl", "prefix"]).map_err(wrong_url)?;
        let ttl = address.param("ttl").map_or(Ok(DEFAULT_TTL), |text| {
            let span = text.parse::<jiff::SignedDuration>().ok().and_then(|span| Duration::try_from(span).ok());
            span.filter(|span| (MIN_TTL..=MAX_TTL).contains(span)).ok_or_else(|| {
                LockServiceError::Url(
                    "'ttl' in the URL of the lock service must be a time from 1s to 60s".to_owned(),
                )
            })
        })?;
        let prefix = address.param("prefix").unwrap_or(PREFIX).to_owned();
        if prefix.is_empty() || prefix.contains(char::is_control) {
            let why = "'prefix' in the URL of the lock service must have a character, and no control characters";
            return Err(LockServiceError::Url(why.to_owned()));
        }
        Ok(Self { address, ttl, prefix })
    }
}

/// A URL is read in one way for buses and lock services; what is wrong with it is said of the right one.
fn wrong_url(error: BusError) -> LockServiceError {
    LockServiceError::Url(error.to_string().replace("URL of the bus", "URL of the lock service"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_nothing_to_locks_is_refused() {
        for url in ["redis://h?keep=7d", "etcd://h?keep=7d&ttl=5s", "redis://h?replicas=3"] {
            let Err(LockServiceError::Url(why)) = Common::parse(url, 1).map(|_| ()) else {
                panic!("{url} is taken")
            };
            assert!(why.contains("URL of the lock service") && why.contains("known are"), "{why}");
        }
        assert!(Common::parse("redis://h?ttl=5s&prefix=x&ca=/y", 1).is_ok());
    }
}
