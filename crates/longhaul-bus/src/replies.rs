//! Results out: the result of a task goes to the address that its submit gave, as a line of the outbox, so that it is
//! tried again while the broker is away, shown with the task's deliveries, and never lost.
//!
//! A reply is a CloudEvent of the task's final event, with the task itself as its data.

use std::sync::Arc;

use async_trait::async_trait;
use longhaul::outbox::{Replies, Reply, ReplyError};

use crate::bus::{Bus, BusError, Outgoing, To};
use crate::cloud_event::{self, Mode};

/// Where replies may go unless something else is said: not everyone who may submit a task may write anywhere on the broker.
const ALLOWED: [&str; 5] =
    ["longhaul.replies", "longhaul.replies.*", "_INBOX.*", "amq.gen-*", "amq.rabbitmq.reply-to.*"];

/// Where replies may go.
#[derive(Clone, Debug)]
pub struct ReplyAddresses(Vec<String>);

impl Default for ReplyAddresses {
    /// What begins with `longhaul.replies`, and what brokers make for clients that wait.
    fn default() -> Self {
        Self(ALLOWED.map(str::to_owned).to_vec())
    }
}

impl ReplyAddresses {
    /// These; a `*` at the end stands for anything.
    pub fn new<S: Into<String>>(addresses: impl IntoIterator<Item = S>) -> Self {
        Self(addresses.into_iter().map(Into::into).collect())
    }

    /// Says what is wrong with an address, if something is.
    pub fn check(&self, address: &str) -> Result<(), String> {
        let wild = |c: char| matches!(c, '*' | '>') || c.is_whitespace() || c.is_control();
        if address.contains(wild) || address.split('.').any(str::is_empty) {
            return Err(format!(
                "goes to '{}', which is no address: that has no '*', no '>', no spaces, and something between its dots",
                address.escape_debug()
            ));
        }
        let allowed = self.0.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(beginning) => address.starts_with(beginning),
            None => address == allowed,
        });
        match allowed {
            true => Ok(()),
            false => Err(format!("goes to '{address}', which is not allowed; allowed are {}", self.0.join(", "))),
        }
    }
}

/// Sends replies by a bus; given to [`longhaul::OutboxSettings::replies`].
pub struct BusReplies {
    bus: Arc<dyn Bus>,
    addresses: ReplyAddresses,
    mode: Mode,
}

impl BusReplies {
    /// Replies to addresses that begin with `longhaul.replies`, and to those that brokers make for clients that wait.
    pub fn new(bus: Arc<dyn Bus>) -> Self {
        Self { bus, addresses: ReplyAddresses::default(), mode: Mode::default() }
    }

    /// Allows other addresses instead.
    pub fn allow(mut self, addresses: ReplyAddresses) -> Self {
        self.addresses = addresses;
        self
    }

    /// Sets the form of the CloudEvents.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }
}

#[async_trait]
impl Replies for BusReplies {
    async fn send(&self, reply: &Reply) -> Result<(), ReplyError> {
        self.addresses.check(&reply.to).map_err(|why| ReplyError::Refused(format!("the reply {why}")))?;
        let mut event = reply.event.clone();
        event.data = serde_json::to_value(&reply.task)
            .map_err(|error| ReplyError::Refused(format!("the task cannot be written as JSON: {error}")))?;
        let (prefix, max) = (self.bus.event_prefix(), self.bus.max_bytes());
        let mut message = cloud_event::message(&reply.tenant, &event, self.mode, prefix, max);
        message.id = Some(reply.id.to_string());
        message.correlation_id.clone_from(&reply.correlation_id);
        let outgoing = Outgoing { to: To::Address(reply.to.clone()), message };
        self.bus.publish(&[outgoing]).await.map_err(|not| match not.error {
            BusError::Invalid(why) => ReplyError::Refused(why),
            other => ReplyError::Failed(other.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_go_only_where_they_may() {
        let addresses = ReplyAddresses::default();
        let sound =
            ["longhaul.replies", "longhaul.replies.me", "_INBOX.x.1", "amq.gen-x", "amq.rabbitmq.reply-to.g1==.x"];
        for allowed in sound {
            assert_eq!(addresses.check(allowed), Ok(()), "{allowed}");
        }
        for not in ["longhaul.tasks", "longhaul.events", "$SYS.REQ", "orders", "longhaul.repliesX"] {
            let why = addresses.check(not).expect_err("it is not allowed");
            assert!(why.contains("not allowed") && why.contains("longhaul.replies.*"), "{why}");
        }
        let addresses = ReplyAddresses::new(["orders.*", "one"]);
        assert!(addresses.check("orders.1").is_ok() && addresses.check("one").is_ok());
        assert!(addresses.check("ones").is_err() && addresses.check("longhaul.replies").is_err());
    }

    #[test]
    fn a_wildcard_is_no_address() {
        let everything = ReplyAddresses::new(["*"]);
        for not in ["longhaul.replies.>", "longhaul.replies.*", "a b", "a..b", ".a", "a.", "", "a\n"] {
            let why = everything.check(not).expect_err("it is none");
            assert!(why.contains("no address"), "{why}");
        }
    }
}
