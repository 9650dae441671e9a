//! The error a step or a task ends with: data that is stored, replayed and shown.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Why a step or a task failed.
///
/// Any `std::error::Error` becomes one with `?` (code `error`, retryable). It does not implement
/// `std::error::Error` itself, which is what makes that conversion possible.
///
/// ```
/// use longhaul::TaskError;
///
/// fn parse(text: &str) -> Result<u16, TaskError> {
///     let port: u16 = text.parse()?;
///     if port == 0 {
///         return Err(TaskError::fatal("bad_port", "port 0 cannot be listened on"));
///     }
///     Ok(port)
/// }
/// assert!(parse("x").unwrap_err().retryable);
/// assert!(!parse("0").unwrap_err().retryable);
/// ```
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskError {
    /// A short stable name for programs: `deadline_exceeded`, `poison`, `panic`, …
    pub code: String,
    /// One sentence for people.
    pub message: String,
    /// Whether trying again may help.
    pub retryable: bool,
    /// More for programs: the step, the attempts made.
    #[serde(default)]
    pub details: Value,
    /// What caused it.
    #[serde(default)]
    pub cause: Option<Box<TaskError>>,
    /// The effect may have happened or not; see [`TaskError::in_doubt`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) doubt: bool,
}

impl TaskError {
    /// An error after which trying again may help.
    pub fn retryable(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            message: message.into(),
            retryable: true,
            details: Value::Null,
            cause: None,
            doubt: false,
        }
    }

    /// An error that trying again cannot mend.
    pub fn fatal(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { retryable: false, ..Self::retryable(code, message) }
    }

    /// An error that leaves open whether the effect happened: the connection was lost after
    /// sending, the child was killed by a signal, the service answered 5xx. A step whose effect
    /// must not happen twice then waits for a decision instead of being tried again.
    pub fn in_doubt(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { doubt: true, ..Self::retryable(code, message) }
    }

    /// Whether it is unknown if the effect happened.
    pub fn is_in_doubt(&self) -> bool {
        self.doubt
    }

    /// Adds one value to `details`.
    pub fn detail(mut self, name: &str, value: impl Into<Value>) -> Self {
        match &mut self.details {
            Value::Object(fields) => {
                fields.insert(name.to_owned(), value.into());
            }
            other => *other = Value::Object([(name.to_owned(), value.into())].into_iter().collect()),
        }
        self
    }

    /// Sets what caused it.
    pub fn caused_by(mut self, cause: TaskError) -> Self {
        self.cause = Some(Box::new(cause));
        self
    }
}

impl<E: std::error::Error> From<E> for TaskError {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self::retryable("error", message)
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.message, self.code)?;
        if let Some(cause) = &self.cause {
            write!(f, ": {cause}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_stored_and_read_back_whole() {
        let error = TaskError::fatal("step_failed", "create_dns failed")
            .detail("step", "create_dns")
            .caused_by(TaskError::in_doubt("timeout", "no answer"));
        let text = serde_json::to_string(&error).expect("errors serialise");
        assert_eq!(serde_json::from_str::<TaskError>(&text).expect("and parse"), error);
        assert!(error.cause.expect("kept").is_in_doubt());
    }

    #[test]
    fn the_sources_of_a_foreign_error_are_in_the_message() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot save")]
        struct NotSaved(#[source] std::io::Error);
        let error = NotSaved(std::io::Error::other("disk gone"));
        assert_eq!(TaskError::from(error).message, "cannot save: disk gone");
    }
}
