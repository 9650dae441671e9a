//! Subscribers as the stores keep them: a named place in the log of all tasks, and who reads from there now.
//!
//! A subscriber has one holder at a time, for as long as its lease is; every holder has a fence of its own, and
//! nothing is written under an older one. What a subscriber has not passed stays: retention removes no task
//! whose newest event is at or after the place of some subscriber.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;

use super::feed::Place;
use super::{StoreError, SubmitRefused};
use crate::task::Invalid;

/// How many subscribers a store may have.
pub(crate) const MAX_SUBSCRIBERS: usize = 256;
/// How many rows are counted that a subscriber has not passed.
pub(crate) const MAX_COUNTED: usize = 100_000;
/// How many of those are looked at to find the oldest, when a submit asks.
pub(crate) const LOOKED_AT: usize = 1_000;
/// How many subscribers are looked at, when a submit asks.
pub(crate) const LATE_AT_ONCE: usize = 16;
/// How soon a submit that was refused because of a subscriber may be tried again.
pub(crate) const RETRY_SUBMIT: Duration = Duration::from_secs(5);

/// The part of a store that keeps subscribers.
#[async_trait]
pub trait SubscriberStore: Send + Sync {
    /// Makes a subscriber known, with its first place; one that is known stays where it is. Refused when
    /// the name is taken by one of another tenant.
    async fn begin_subscriber(&self, new: &NewSubscriber) -> Result<Result<(), Invalid>, StoreError>;

    /// Gives the subscriber to this holder, if nobody has it.
    async fn take_subscriber(&self, ask: &TakeSubscriber) -> Result<Take, StoreError>;

    /// Notes what its holder has passed, and extends its lease or ends it. `false` when it is another's by
    /// now, or gone; nothing was written then.
    async fn move_subscriber(&self, step: &MoveSubscriber) -> Result<bool, StoreError>;

    /// All subscribers, by name.
    async fn subscribers(&self) -> Result<Vec<SubscriberInfo>, StoreError>;

    /// Removes a subscriber; what it has not passed is kept for it no longer. Says whether there was one.
    async fn remove_subscriber(&self, name: &str) -> Result<bool, StoreError>;
}

/// A subscriber on its way into the store.
#[derive(Clone, Debug)]
pub struct NewSubscriber {
    /// Its name, unique in the store.
    pub name: String,
    /// Whose events; of all tenants when `None`.
    pub tenant: Option<String>,
    /// Where it begins.
    pub at: Place,
    /// How long it may be behind before submits are refused; for ever when `None`.
    pub max_behind: Option<Duration>,
}

/// A request to read for a subscriber.
#[derive(Clone, Debug)]
pub struct TakeSubscriber {
    /// Which.
    pub name: String,
    /// Who asks, for people.
    pub held_by: String,
    /// For how long, without a word.
    pub lease: Duration,
}

/// The answer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Take {
    /// It is this holder's.
    Taken(Held),
    /// It is another's, for this long at least.
    Busy(Duration),
    /// There is none of this name.
    Gone,
}

/// A subscriber that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Grows with every holder.
    pub fence: u64,
    /// Where to go on.
    pub at: Position,
    /// Up to when everything was passed, microseconds, as far as is known.
    pub passed_at: i64,
}

/// How far a subscriber has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The first row it has not passed.
    pub place: Place,
    /// The last event of that row that it has.
    pub given: u64,
}

/// What a holder has passed.
#[derive(Clone, Debug)]
pub struct MoveSubscriber {
    /// Which.
    pub name: String,
    /// The holder's fence.
    pub fence: u64,
    /// How far it has come, if that changed.
    pub to: Option<Position>,
    /// Everything up to this time was passed, microseconds.
    pub passed_at: Option<i64>,
    /// For how long it goes on; it lets go when `None`.
    pub lease: Option<Duration>,
}

/// A subscriber as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SubscriberInfo {
    /// Its name.
    pub name: String,
    /// Whose events it is given; those of all tenants when `None`.
    pub tenant: Option<String>,
    /// The process that runs it, as `HOST:PID`; `None` when none does.
    pub held_by: Option<String>,
    /// How many rows of the log (each what one transaction told of a task) it has not passed; at most
    /// 100,000 are counted.
    pub rows_behind: u64,
    /// When the oldest of them was written.
    pub oldest: Option<Timestamp>,
    /// How long it may be behind before submits are refused, in seconds; for ever when `None`.
    pub max_behind_seconds: Option<u64>,
}

/// A subscriber that is behind for longer than it may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Late {
    pub(crate) name: String,
    pub(crate) behind: Duration,
}

impl Late {
    /// Why a submit is refused then.
    pub(crate) fn refused(&self) -> SubmitRefused {
        let Self { name, behind } = self;
        SubmitRefused::SubscriberBehind { subscriber: name.clone(), behind: *behind, retry_after: RETRY_SUBMIT }
    }
}

/// What was noted of a subscriber that may be late, and what was found.
pub(crate) struct Suspect {
    pub(crate) name: String,
    pub(crate) place: Place,
    pub(crate) passed_at: i64,
    pub(crate) max_behind: i64,
    pub(crate) created_at: i64,
}

impl Suspect {
    /// Whether it is late at `now`, when the oldest row that it has not passed is of this time. Else, what is
    /// to be noted instead of what was.
    pub(crate) fn judge(&self, oldest: Option<i64>, now: i64) -> Result<Late, i64> {
        // It could not have passed anything before it was there.
        let since = oldest.unwrap_or(now).max(self.created_at);
        if since < now - self.max_behind {
            let behind = Duration::from_micros((now - since).unsigned_abs());
            return Ok(Late { name: self.name.clone(), behind });
        }
        Err(since)
    }
}

/// Why there is no room for another subscriber, or not for this one.
pub(crate) fn refuse(known: Option<Option<&str>>, new: &NewSubscriber, others: usize) -> Result<(), Invalid> {
    let of = |tenant: Option<&str>| tenant.map_or("all tenants".to_owned(), |name| format!("tenant '{name}'"));
    match known {
        Some(tenant) if tenant != new.tenant.as_deref() => {
            let problem =
                format!("belongs to a subscriber of {}; use another name, or remove that one", of(tenant));
            Err(Invalid::new("name", problem))
        }
        None if others >= MAX_SUBSCRIBERS => {
            let problem =
                format!("is one too many: a store has at most {MAX_SUBSCRIBERS} subscribers; remove some");
            Err(Invalid::new("name", problem))
        }
        _ => Ok(()),
    }
}
