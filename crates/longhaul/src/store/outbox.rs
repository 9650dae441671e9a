//! The outbox as the stores keep it: which events of which tasks are to be sent where, and what
//! became of it.
//!
//! A task that has destinations has one line for each. Whoever writes an event makes the task's
//! lines due in the same transaction (a trigger does), so no event can be forgotten. A deliverer
//! takes due lines for a while, reads the task's log after what was sent, sends, and settles.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::StoreError;
use super::clock::micros;
use crate::outbox::reply;
use crate::outbox::{Endpoint, ReplyTo, Webhook};
use crate::task::{Invalid, TaskId};

/// The destination that is the task's own webhook.
pub(crate) const OWN: &str = "webhook";
/// The destination that is the task's reply.
pub(crate) const REPLY: &str = "reply";
/// How many deliveries a list gives at most.
pub(crate) const MAX_LISTED: usize = 1_000;
/// Lines that may be due before submits with a destination are refused, unless set otherwise.
pub(crate) const DEFAULT_MAX_DUE: u64 = 100_000;
/// How many repetitions by request one taking gives.
pub(crate) const REPEATS_AT_ONCE: usize = 8;
/// How soon a submit that met a full outbox may be tried again.
pub(crate) const RETRY_SUBMIT: Duration = Duration::from_secs(5);
/// Where the bound on due lines stands in the settings.
pub(crate) const MAX_DUE: &str = "outbox_max_due";

/// The part of a store that keeps what is to be sent.
#[async_trait]
pub trait OutboxStore: Send + Sync + 'static {
    /// Adds an endpoint, or changes the one of this name. Tasks submitted from now on have a line to
    /// it; those that have one already use the changed URL and events from now on.
    async fn save_endpoint(
        &self,
        tenant: &str,
        name: &str,
        webhook: &Webhook,
    ) -> Result<Result<Endpoint, Invalid>, StoreError>;

    /// Removes an endpoint; nothing more is sent to it. Says whether there was one.
    async fn remove_endpoint(&self, tenant: &str, name: &str) -> Result<bool, StoreError>;

    /// The endpoints of `tenant`, by name.
    async fn endpoints(&self, tenant: &str) -> Result<Vec<Endpoint>, StoreError>;

    /// Takes lines and repetitions that are due, for `ask.lease`; nobody else gets them in that
    /// time. Lanes take turns, so that one with many due lines does not keep others waiting.
    async fn take_due(&self, ask: &TakeDue) -> Result<Taken, StoreError>;

    /// Writes what came of what was taken. The answer is whether it was still this taker's; if not,
    /// nothing was written for that entry.
    async fn settle(&self, batch: &[Settle]) -> Result<Vec<bool>, StoreError>;

    /// Microseconds until something is due; 0 when something is already.
    async fn next_due(&self) -> Result<Option<i64>, StoreError>;

    /// The newest deliveries of a task of `tenant`, newest first, at most 1,000.
    async fn deliveries(&self, tenant: &str, task: TaskId) -> Result<Vec<Delivery>, StoreError>;

    /// The newest dead deliveries of `tenant`, newest first.
    async fn dead_deliveries(&self, tenant: &str, limit: usize) -> Result<Vec<Delivery>, StoreError>;

    /// Makes one delivery of a task of `tenant` due again, as if it had never been tried. One that
    /// is to be tried again anyway is tried at once. `false` when there is none.
    async fn redeliver(&self, tenant: &str, task: TaskId, delivery: Uuid) -> Result<bool, StoreError>;

    /// How much is to be sent, and how much was given up.
    async fn outbox_stats(&self) -> Result<OutboxStats, StoreError>;

    /// Sets how many lines may be due before submits with a destination are refused.
    async fn bound_outbox(&self, max_due: u64) -> Result<(), StoreError>;

    /// The secret of this name kept in the store; `fresh` becomes it when there is none. Everyone gets the
    /// same.
    async fn kept_secret(&self, name: &str, fresh: &str) -> Result<String, StoreError>;
}

/// A deliverer's request for work.
#[derive(Clone, Debug)]
pub struct TakeDue {
    /// Names this taking; what is settled must name it too.
    pub owner: Uuid,
    /// For how long it may hold what it gets.
    pub lease: Duration,
    /// How much it has room for.
    pub max: usize,
    /// How much of one lane it has room for.
    pub per_lane: usize,
    /// What it has room for in lanes it is busy with.
    pub busy: Vec<(String, usize)>,
    /// Go on with the lanes after this one.
    pub after_lane: String,
    /// Whether it can deliver replies; they are left to others else.
    pub replies: bool,
}

impl TakeDue {
    /// How much of this lane may be taken.
    pub(crate) fn room(&self, lane: &str) -> usize {
        if !self.replies && reply::is_lane(lane) {
            return 0;
        }
        let busy = self.busy.iter().find(|(name, _)| name == lane);
        busy.map_or(self.per_lane, |(_, room)| (*room).min(self.per_lane))
    }
}

/// How many lanes one taking looks at.
pub(crate) const LANES_AT_ONCE: usize = 256;

/// The answer to [`OutboxStore::take_due`].
#[derive(Debug, Default)]
pub struct Taken {
    /// What is this deliverer's now.
    pub due: Vec<Due>,
    /// Where the next taking goes on; empty: from the beginning.
    pub next_lane: String,
}

/// Something to be sent.
#[derive(Clone, Debug)]
pub struct Due {
    /// The task.
    pub task: TaskId,
    /// Which of its destinations.
    pub destination: String,
    /// The task's owner.
    pub tenant: String,
    /// Where to, and of which events.
    pub webhook: Webhook,
    /// The destination of a reply, if it is one.
    pub reply: Option<ReplyTo>,
    /// The receiver, as a name.
    pub lane: String,
    /// Which event.
    pub which: Which,
    /// How often that was tried.
    pub attempts: u32,
    /// When it failed first, microseconds.
    pub first_at: Option<i64>,
}

/// Which event of a task is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those that are wanted after this number, in order.
    After(u64),
    /// This one, by request.
    Again(u64),
}

/// What came of something taken.
#[derive(Clone, Debug)]
pub struct Settle {
    /// The task.
    pub task: TaskId,
    /// Which of its destinations.
    pub destination: String,
    /// Who took it.
    pub owner: Uuid,
    /// The event that was tried and what came of it; none when all that was read was not wanted.
    pub attempt: Option<Attempt>,
    /// Whether this is about one event by request; `sent` says nothing then.
    pub again: bool,
    /// Nothing up to this number has to be looked at any more.
    pub sent: u64,
    /// Failures of what is at the front now.
    pub attempts: u32,
    /// The first of them, microseconds.
    pub first_at: Option<i64>,
    /// What is next.
    pub then: Then,
}

/// What happens to a line after it was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Its taker goes on with it, for this long.
    GoOn(Duration),
    /// It is let go, and due at once if there is more.
    LetGo,
    /// It is let go, and due after this time.
    Retry(Duration),
    /// Nothing is sent there any more.
    End,
}

impl Then {
    /// Its number in the stores' statements, and the time it speaks of, microseconds.
    pub(crate) fn parts(self) -> (i16, Option<i64>) {
        match self {
            Self::GoOn(lease) => (0, Some(micros(lease))),
            Self::LetGo => (1, None),
            Self::Retry(pause) => (2, Some(micros(pause))),
            Self::End => (3, None),
        }
    }
}

/// One attempt to deliver an event.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The event's number.
    pub seq: u64,
    /// Its type.
    pub event: String,
    /// The task's owner.
    pub tenant: String,
    /// Where it went.
    pub webhook: Webhook,
    /// How it stands now.
    pub status: DeliveryStatus,
    /// Which attempt it was, from 1.
    pub number: u32,
    /// What the receiver answered.
    pub http_status: Option<u16>,
    /// Why it failed.
    pub error: Option<String>,
}

/// How a delivery stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(i16)]
pub enum DeliveryStatus {
    /// To be sent, by request.
    Pending = 0,
    /// The receiver took it.
    Delivered = 1,
    /// It failed and is tried again.
    Failed = 2,
    /// It was given up; it can be sent again by request.
    Dead = 3,
}

impl DeliveryStatus {
    pub(crate) fn code(self) -> i16 {
        self as i16
    }

    pub(crate) fn from_code(code: i16) -> Self {
        match code {
            1 => Self::Delivered,
            2 => Self::Failed,
            3 => Self::Dead,
            _ => Self::Pending,
        }
    }
}

/// What became of an event for one destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Delivery {
    /// Its id; the receiver sees it in `webhook-id`.
    pub id: Uuid,
    /// The task.
    pub task_id: TaskId,
    /// `webhook`, `reply`, or `endpoint:NAME`.
    pub destination: String,
    /// The event's number.
    pub seq: u64,
    /// The event's type.
    #[serde(rename = "type")]
    pub event: String,
    /// Where it went; `reply:DESTINATION` for a reply.
    pub url: String,
    /// How it stands.
    pub status: DeliveryStatus,
    /// How often it was tried, since it was last asked for.
    pub attempts: u32,
    /// What the receiver answered last.
    pub http_status: Option<u16>,
    /// Why it failed last.
    pub error: Option<String>,
    /// When it is tried next.
    pub next_at: Option<Timestamp>,
    /// When it was tried first.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// The id of a delivery: the same whoever sends it and however often.
pub(crate) fn delivery_id(task: TaskId, destination: &str, seq: u64) -> Uuid {
    let digest = Sha256::new()
        .chain_update(task.0.as_bytes())
        .chain_update(seq.to_be_bytes())
        .chain_update(destination)
        .finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

/// How much is to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OutboxStats {
    /// Lines and repetitions with something to send, those that wait for another try included.
    pub due: u64,
    /// Since when the oldest of those that could be sent now waits.
    pub oldest_due: Option<Timestamp>,
    /// Deliveries that were given up, at most 100,000 are counted.
    pub dead: u64,
}

/// The bound on due lines as it stands in the settings.
pub(crate) fn read_max_due(stored: Option<&str>) -> u64 {
    stored.and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_MAX_DUE)
}
