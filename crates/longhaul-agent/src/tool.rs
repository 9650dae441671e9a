//! Tools: how a step reaches the world outside, by a command, an HTTP call, a function or an MCP
//! server.
//!
//! A tool is read from a manifest once and run with a [`Call`]. How a call ended is told apart as
//! a step needs it: a result; a known failure (tried again by the step's policy, or not when
//! trying cannot help); or an outcome in doubt ([`TaskError::in_doubt`]), when the effect may have
//! happened.
//!
//! A call has no timeout of its own: whoever runs it drops the future, and with it everything the
//! call started ends.
//!
//! What a tool may see of the environment is hidden in whatever it says (see `mask.rs`).
//!
//! An [`AgentTool`] is a tool with what a model is told of it and the rules for calling it; a
//! [`Toolbox`] has all tools of an agent, those of its MCP servers included.

use std::sync::Arc;

use longhaul::{StepContext, TaskError};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::artifact::{Artifacts, Stored};

mod agent;
mod collect;
mod command;
mod function;
mod group;
mod http;
mod mcp;
mod progress;
mod sandbox;
pub(crate) mod schema;
mod toolbox;
mod watchdog;

pub use agent::{AgentTool, BUILT_IN, BadTool, DEFAULT_ATTEMPTS, DEFAULT_TIMEOUT};
pub(crate) use agent::{MAX_NAME_BYTES, check_name, default_effect};
use collect::Keep;
pub use collect::MAX_STORED_BYTES;
pub use command::Command;
pub use function::Function;
pub(crate) use http::BadUrl;
pub use http::Http;
pub use mcp::Remote;
pub use progress::{HowFar, Tell};
pub use sandbox::Sandbox;
pub use toolbox::Toolbox;

/// The most that a tool may give when all of it is kept in memory.
pub const MAX_OUTPUT_BYTES: usize = 1024 * 1024;
/// How much of what a tool says about its failure is kept.
const MAX_COMPLAINT_BYTES: usize = 4 * 1024;

/// Something that can be called.
#[derive(Clone, Debug)]
pub enum Tool {
    /// Runs a program.
    Command(Command),
    /// Sends an HTTP request.
    Http(Http),
    /// Calls a Rust function.
    Function(Function),
    /// Calls a tool of an MCP server.
    Mcp(Remote),
}

/// One call of a tool.
#[derive(Clone, Debug)]
pub struct Call {
    /// What placeholders refer to.
    pub values: Arc<Value>,
    /// A command's stdin, a request's body, the arguments of a function or an MCP tool.
    pub body: Arc<Value>,
    /// Who calls; passed on, so that the other side can recognise a repeated or outdated call.
    pub context: StepContext,
    /// Who is told how far it is, while it is under way.
    pub progress: Option<Tell>,
}

/// What a tool gave.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// All of it.
    Value(Value),
    /// So much that it was stored.
    Stored(Stored),
}

impl Tool {
    /// Calls it and gives its result, which may have [`MAX_OUTPUT_BYTES`].
    pub async fn run(&self, call: &Call) -> Result<Value, TaskError> {
        match self.perform(call, Keep::in_memory()).await? {
            Output::Value(value) => Ok(value),
            // Nothing is stored where no storage was given.
            Output::Stored(stored) => Err(TaskError::fatal("output_stored", stored.summary)),
        }
    }

    /// Calls it. A result of more than `inline` bytes goes to `overflow` while it comes, as an
    /// artifact of the tenant; at most [`MAX_STORED_BYTES`] do.
    pub async fn run_long(
        &self,
        call: &Call,
        inline: usize,
        overflow: &Artifacts,
        tenant: &str,
    ) -> Result<Output, TaskError> {
        self.perform(call, Keep::overflowing(inline, overflow, tenant)).await
    }

    async fn perform(&self, call: &Call, keep: Keep<'_>) -> Result<Output, TaskError> {
        match self {
            Self::Command(command) => command.run(call, keep).await,
            Self::Http(http) => http.run(call, keep).await,
            Self::Function(function) => keep.value(function.run(call).await?).await,
            Self::Mcp(remote) => remote.run(call, keep).await,
        }
    }

    /// What a call would do, for a person who has to approve it. Headers are left out: they may
    /// carry secrets.
    pub fn describe(&self, values: &Value) -> Result<Value, TaskError> {
        Ok(match self {
            Self::Command(command) => json!({"command": command.argv(values)?}),
            Self::Http(http) => json!({"http": {"method": http.method(), "url": http.url(values)?.as_str()}}),
            Self::Function(_) | Self::Mcp(_) => self.definition(),
        })
    }

    /// A digest of what it is, without any value filled in. Nothing secret is in it.
    pub fn digest(&self) -> String {
        digest(&self.definition())
    }

    /// What it is, without any value filled in; the same for the same definition.
    fn definition(&self) -> Value {
        match self {
            Self::Command(command) => json!({"command": command.definition()}),
            Self::Http(http) => json!({"http": http.definition()}),
            Self::Function(function) => json!({"function": function.name()}),
            Self::Mcp(remote) => json!({"mcp": {"server": remote.server(), "tool": remote.tool()}}),
        }
    }
}

/// Names a definition exactly.
fn digest(definition: &Value) -> String {
    let digest = Sha256::digest(definition.to_string());
    digest.iter().fold("sha256-".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// What a tool answered: JSON when it is JSON, else the text without its last line break, null
/// when there is nothing.
fn answer(output: &[u8]) -> Value {
    if output.iter().all(u8::is_ascii_whitespace) {
        return Value::Null;
    }
    serde_json::from_slice(output).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(output);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        Value::String(text.strip_suffix('\r').unwrap_or(text).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_json_when_it_is_json_and_text_otherwise() {
        assert_eq!(answer(b"{\"id\": 7}\n"), json!({"id": 7}));
        assert_eq!(answer(b"created\r\n"), json!("created"));
        assert_eq!(answer(b"two\nlines\n\n"), json!("two\nlines\n"));
        assert_eq!(answer(b" \n"), Value::Null);
        assert_eq!(answer(b""), Value::Null);
        assert_eq!(answer(b"\xff"), json!("\u{fffd}"));
    }
}
