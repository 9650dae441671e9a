//! Replies: where the result of a task goes beside webhooks, and who takes it there.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::webhook::Sent;
use crate::event::Event;
use crate::task::{Invalid, Task, TaskId};

/// The longest name of a destination, and of a correlation id.
const MAX_BYTES: usize = 512;
/// What the lanes of replies begin with; no host has a slash in it.
const LANES: &str = "reply/";
/// How many lanes replies have: each takes as many deliveries at once as one receiver of webhooks.
const SHARDS: u128 = 8;
/// What their URLs begin with.
const SCHEME: &str = "reply:";

/// Where a task's result goes when it has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplyTo {
    /// The destination, as who delivers replies understands it: a queue, a topic, a subject.
    pub to: String,
    /// What the receiver knows the request by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
}

impl ReplyTo {
    /// A destination without a correlation id.
    pub fn new(to: impl Into<String>) -> Self {
        Self { to: to.into(), correlation_id: None }
    }

    /// Sets what the receiver knows the request by.
    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.correlation_id = Some(id.into());
        self
    }

    /// Whether it can be kept.
    pub fn validate(&self) -> Result<(), Invalid> {
        let plain = |text: &str| !text.is_empty() && text.len() <= MAX_BYTES && !text.contains(char::is_control);
        if !plain(&self.to) {
            let problem =
                format!("has a destination that is not 1 to {MAX_BYTES} bytes without control characters");
            return Err(Invalid::new("reply", problem));
        }
        if !self.correlation_id.as_deref().is_none_or(plain) {
            let problem =
                format!("has a correlation id that is not 1 to {MAX_BYTES} bytes without control characters");
            return Err(Invalid::new("reply", problem));
        }
        Ok(())
    }

    /// The stored form: a webhook that nobody can call, and beside it what it stands for.
    pub(crate) fn to_json(&self) -> String {
        let Self { to, correlation_id } = self;
        serde_json::json!({"url": format!("{SCHEME}{to}"), "events": [], "to": to, "correlation_id": correlation_id})
            .to_string()
    }

    /// Reads it back.
    pub(crate) fn from_json(text: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Stored {
            to: String,
            #[serde(default)]
            correlation_id: Option<String>,
        }
        let Stored { to, correlation_id } = serde_json::from_str(text).ok()?;
        Some(Self { to, correlation_id })
    }
}

/// Says what is wrong with a destination, if something is; given to
/// [`Client::check_replies`](crate::Client::check_replies).
pub type ReplyRule = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// The lane of a task's reply.
pub(crate) fn lane(task: TaskId) -> String {
    format!("{LANES}{}", task.0.as_u128() % SHARDS)
}

/// Whether a lane is one of replies.
pub(crate) fn is_lane(lane: &str) -> bool {
    lane.starts_with(LANES)
}

/// The result of a task on its way.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Where to.
    pub to: String,
    /// What the receiver knows the request by.
    pub correlation_id: Option<String>,
    /// Names this reply: the same however often it is sent.
    pub id: Uuid,
    /// The task's owner.
    pub tenant: String,
    /// How the task ended: `task.completed`, `task.failed` or `task.cancelled`.
    pub event: Event,
    /// The task as it stands now.
    pub task: Task,
}

/// Takes replies to where they go, given to an outbox with
/// [`OutboxSettings::replies`](super::OutboxSettings).
#[async_trait]
pub trait Replies: Send + Sync + 'static {
    /// Delivers a reply; after it returns, the receiver has it. It is called again after an error, with
    /// longer and longer pauses, and after a crash: the id is then the same.
    async fn send(&self, reply: &Reply) -> Result<(), ReplyError>;
}

/// Why a reply was not delivered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// It is tried again.
    #[error("{0}")]
    Failed(String),
    /// Trying again cannot help; it is dead, and can be sent again by request.
    #[error("{0}")]
    Refused(String),
}

/// Delivers a reply within `timeout`.
pub(super) async fn send(replies: &dyn Replies, reply: &Reply, timeout: Duration) -> Sent {
    match tokio::time::timeout(timeout, replies.send(reply)).await {
        Ok(Ok(())) => Sent::Replied,
        Ok(Err(ReplyError::Refused(error))) => Sent::Refused(error),
        Ok(Err(ReplyError::Failed(error))) => Sent::Failed { status: None, error, after: None },
        Err(_) => Sent::Failed { status: None, error: "no answer in time".to_owned(), after: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::Webhook;

    #[test]
    fn a_destination_is_stored_and_read_back_and_looks_like_a_webhook() {
        let reply = ReplyTo::new("results.shop").correlation_id("42");
        let text = reply.to_json();
        assert_eq!(ReplyTo::from_json(&text), Some(reply.clone()));
        let webhook: Webhook = serde_json::from_str(&text).expect("as programs of the version before read it");
        assert_eq!(webhook.url, "reply:results.shop");
        assert!(webhook.finals_only() && webhook.parse().is_err());
    }

    #[test]
    fn destinations_that_nobody_could_keep_are_refused() {
        let good = ReplyTo::new("results");
        assert_eq!(good.validate(), Ok(()));
        for bad in [
            ReplyTo::new(""),
            ReplyTo::new("a\nb"),
            ReplyTo::new("x".repeat(513)),
            good.clone().correlation_id(""),
            good.clone().correlation_id("x".repeat(513)),
            good.correlation_id("nul\0"),
        ] {
            assert_eq!(bad.validate().expect_err("refused").field, "reply");
        }
    }
}
