//! A submit as it comes from outside, as JSON: the same by HTTP, by MCP and by the bus.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::client::{Client, Error};
use crate::outbox::{ReplyTo, Webhook};
use crate::task::{Deadline, Invalid, NewTask};

mod read;
mod span;

pub use read::{BadRequest, read, read_value};
pub use span::Span;

/// A task to be run. Every field but what the handler needs is optional.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Submit {
    /// What runs it; without, the server's default or the only one there is.
    pub handler: Option<String>,
    /// Its argument, any JSON.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<serde_json::Value>))]
    pub input: Option<Box<RawValue>>,
    /// The input, when it is a string: the same under another name.
    pub user_input: Option<String>,
    /// The line it stands in, `default` without.
    pub queue: Option<String>,
    /// 0 to 9, larger first, 5 without.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i32>, minimum = 0, maximum = 9))]
    pub priority: Option<u8>,
    /// Not to be started before.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = "date-time"))]
    pub run_at: Option<Timestamp>,
    /// When it must be over.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = "date-time"))]
    pub deadline: Option<Timestamp>,
    /// How long it may take from now on, instead of `deadline`: `5m`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub timeout: Option<Span>,
    /// At most so many tasks with this key run at once as its limit says, one without a limit.
    pub concurrency_key: Option<String>,
    /// Where to tell how it ended.
    #[serde(default, deserialize_with = "read::object_or_nothing")]
    pub webhook: Option<WebhookBody>,
    /// Where its result goes when it has ended, by the bus.
    #[serde(default, deserialize_with = "read::object_or_nothing")]
    pub reply: Option<ReplyBody>,
    /// Free labels to filter by.
    pub tags: Option<BTreeMap<String, String>>,
    /// How many runs may end with the handler's error, 3 without.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i32>, minimum = 1, maximum = 1000))]
    pub max_attempts: Option<u32>,
    /// As the header `Idempotency-Key`: the same key and content is the same task.
    pub key: Option<String>,
    /// An equal submit within this time is the same task: `10s`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub dedupe_window: Option<Span>,
}

/// Where a task's events go.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WebhookBody {
    /// http or https.
    pub url: String,
    /// Which types: `task.completed`, `task.*`, `*`; the final ones without.
    #[serde(default)]
    pub events: Vec<String>,
}

/// Where a task's result goes.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReplyBody {
    /// The destination, as the broker calls it: a subject, a stream, a queue, a topic.
    pub to: String,
    /// What the receiver knows the request by.
    pub correlation_id: Option<String>,
}

impl Submit {
    /// The task that is asked for; `default_handler` says what runs one that does not.
    pub async fn into_task<E: From<Invalid>>(
        self,
        default_handler: impl AsyncFnOnce() -> Result<String, E>,
    ) -> Result<NewTask, E> {
        let input = match (self.input, self.user_input) {
            (Some(_), Some(_)) => {
                return Err(Invalid::new("user_input", "is another name of 'input'; give one of them").into());
            }
            (Some(input), None) => input,
            (None, Some(text)) => to_raw_value(&text)
                .map_err(|error| Invalid::new("user_input", format!("cannot be kept: {error}")))?,
            (None, None) if self.handler.is_none() => {
                let problem = "is missing, and so is 'handler'; say what is to be done";
                return Err(Invalid::new("input", problem).into());
            }
            (None, None) => RawValue::NULL.to_owned(),
        };
        let handler = match self.handler {
            Some(handler) => handler,
            None => default_handler().await?,
        };
        let mut task = NewTask::with_raw(handler, input);
        task.deadline = match (self.deadline, self.timeout) {
            (Some(_), Some(_)) => {
                return Err(Invalid::new("timeout", "and 'deadline' say the same; give one of them").into());
            }
            (Some(at), None) => Some(Deadline::At(at)),
            (None, timeout) => timeout.map(|timeout| Deadline::After(timeout.0)),
        };
        if let Some(queue) = self.queue {
            task.queue = queue;
        }
        if let Some(priority) = self.priority {
            task.priority = priority;
        }
        if let Some(max_attempts) = self.max_attempts {
            task.max_attempts = max_attempts;
        }
        task.key = self.key;
        task.run_at = self.run_at;
        task.concurrency_key = self.concurrency_key;
        task.tags = self.tags.unwrap_or_default();
        task.dedupe_window = self.dedupe_window.map(|window| window.0);
        task.webhook = self.webhook.map(|webhook| Webhook { url: webhook.url, events: webhook.events });
        task.reply = self.reply.map(|reply| ReplyTo { to: reply.to, correlation_id: reply.correlation_id });
        task.validate()?;
        Ok(task)
    }
}

/// Why a task that names no handler cannot have one.
#[derive(Debug, thiserror::Error)]
pub enum NoHandler {
    /// There is none at all.
    #[error("no worker has registered a handler; start one first")]
    Nobody,
    /// There are several.
    #[error("is missing, and there are several; say which")]
    Several,
    /// The store could not be asked.
    #[error(transparent)]
    Client(#[from] Error),
}

/// The handler of a task that names none: the only one there is.
pub async fn only_handler(client: &Client) -> Result<String, NoHandler> {
    let mut handlers = client.handlers().await?;
    match (handlers.pop(), handlers.len()) {
        (Some(only), 0) => Ok(only.name),
        (None, _) => Err(NoHandler::Nobody),
        _ => Err(NoHandler::Several),
    }
}
