//! Lock services: exclusion by something outside that others use too.
//!
//! The store keeps locks between the tasks of one store ([`Run::lock`](crate::Run::lock)). A lock service
//! (Redis, etcd; the crate `longhaul-bus` has both) extends that to other stores and other programs. The
//! line, the token and everything that a task sees stay the store's; the service is asked once the task
//! is next, and is asked again and again to keep what it gave. `docs/locks.md` says what holds then.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::task::Invalid;

/// The shortest time a service may keep a session without being asked to.
pub const MIN_TTL: Duration = Duration::from_secs(1);
/// The longest.
pub const MAX_TTL: Duration = Duration::from_secs(60);
/// What it is unless something else is said.
pub const DEFAULT_TTL: Duration = Duration::from_secs(10);

/// Exclusion by a service outside. Locks there have owners, not connections: any process that knows the
/// owner can keep a lock or give it back.
///
/// What must hold: of all owners of one name at most one has it, until it gives it back, or until its `ttl`
/// has passed since it took or kept it last. Every call ends by itself, soon; whoever calls gives up
/// waiting after a part of the `ttl`.
#[async_trait]
pub trait LockService: Send + Sync + 'static {
    /// What kind of service it is, in a word: `redis`, `etcd`. Processes that share a store and use the
    /// same service must say the same here.
    fn name(&self) -> &str;

    /// How long a lock is kept without being asked to, from [`MIN_TTL`] to [`MAX_TTL`].
    fn ttl(&self) -> Duration {
        DEFAULT_TTL
    }

    /// Tries to take a lock for an owner, without waiting for it. Whoever is told [`Take::Busy`] is in line
    /// and asks again, several times a second; who stops asking loses its place. An owner that has the
    /// lock already keeps it.
    async fn take(&self, claim: &LockClaim<'_>) -> Result<Take, LockServiceError>;

    /// Keeps what an owner took for another `ttl`; `false` when it is not its any more.
    async fn keep(&self, claim: &LockClaim<'_>) -> Result<bool, LockServiceError>;

    /// Gives back what an owner took, and its place in line; nothing happens when it has neither.
    async fn release(&self, claim: &LockClaim<'_>) -> Result<(), LockServiceError>;
}

/// Who wants which lock.
#[derive(Clone, Copy, Debug)]
pub struct LockClaim<'a> {
    /// The lock: words with slashes between them.
    pub name: &'a str,
    /// Who; never used for another hold.
    pub owner: &'a str,
    /// The fencing token that the holder will have. A service remembers the largest it was given and refuses
    /// one that is not larger ([`Take::Outdated`]), so that tokens of several stores grow together. `None`
    /// for what has no token.
    pub token: Option<u64>,
    /// For how long without being kept.
    pub ttl: Duration,
}

/// What came of trying to take a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// The owner has it.
    Taken,
    /// Someone else has it, or comes first.
    Busy,
    /// It is free, but a token as large as this was given out before: come back with a larger one.
    Outdated {
        /// The largest token the service knows.
        largest: u64,
    },
}

/// Why a lock service did not do what it was asked. What it was asked may have happened.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LockServiceError {
    /// It cannot be reached or did not answer.
    #[error("{service} is not reachable ({why})")]
    Unavailable {
        /// The service's name.
        service: String,
        /// What went wrong.
        why: String,
    },
    /// It refused: credentials, rights, or something else it does not like.
    #[error("{service} refused: {why}")]
    Refused {
        /// The service's name.
        service: String,
        /// What it said.
        why: String,
    },
    /// The address is not one of a lock service.
    #[error("{0}")]
    Url(String),
}

/// A service with a `ttl` that can be worked with.
pub(crate) fn checked(service: Arc<dyn LockService>) -> Result<Arc<dyn LockService>, Invalid> {
    let (name, ttl) = (service.name(), service.ttl());
    crate::task::check_name("lock service", name)?;
    if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
        return Err(Invalid::new("ttl", format!("of a lock service is from 1 s to 60 s, not {ttl:?}")));
    }
    Ok(service)
}
