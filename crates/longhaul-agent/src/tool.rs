//! Tools: how a step reaches the world outside, by a command or an HTTP call.
//!
//! A tool is read from a manifest once and run with a [`Call`]. How a call ended is told apart as
//! a step needs it: a result; a known failure (tried again by the step's policy, or not when
//! trying cannot help); or an outcome in doubt ([`TaskError::in_doubt`]), when the effect may have
//! happened.
//!
//! A call has no timeout of its own: whoever runs it drops the future, and with it everything the
//! call started ends.

use std::sync::Arc;

use longhaul::{StepContext, TaskError};
use serde_json::{Value, json};

mod command;
mod group;
mod http;
mod watchdog;

pub use command::{Command, MAX_OUTPUT_BYTES};
pub(crate) use http::BadUrl;
pub use http::Http;

/// How much of what a tool says about its failure is kept.
const MAX_COMPLAINT_BYTES: usize = 4 * 1024;

/// Something that can be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Runs a program.
    Command(Command),
    /// Sends an HTTP request.
    Http(Http),
}

/// One call of a tool.
#[derive(Clone, Debug)]
pub struct Call {
    /// What placeholders refer to.
    pub values: Arc<Value>,
    /// A command's stdin, a request's body.
    pub body: Arc<Value>,
    /// Who calls; passed on, so that the other side can recognise a repeated or outdated call.
    pub context: StepContext,
}

impl Tool {
    /// Calls it and gives its result.
    pub async fn run(&self, call: &Call) -> Result<Value, TaskError> {
        match self {
            Self::Command(command) => command.run(call).await,
            Self::Http(http) => http.run(call).await,
        }
    }

    /// What a call would do, for a person who has to approve it. Headers are left out: they may
    /// carry secrets.
    pub fn describe(&self, values: &Value) -> Result<Value, TaskError> {
        Ok(match self {
            Self::Command(command) => json!({"command": command.argv(values)?}),
            Self::Http(http) => json!({"http": {"method": http.method(), "url": http.url(values)?.as_str()}}),
        })
    }
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
