//! How the program ends when something is wrong: one sentence on stderr, and a documented code.

use std::process::ExitCode;

use longhaul::store::{StoreError, SubmitRefused};

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// A check of the program's own failed.
    pub(crate) fn found(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }

    /// The command cannot be carried out as it was given.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 2 }
    }

    /// Something that was needed is not reachable, or broke.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 3 }
    }
}

impl From<longhaul::Error> for Failure {
    fn from(error: longhaul::Error) -> Self {
        let code = match &error {
            longhaul::Error::Store(StoreError::Url(_) | StoreError::Incompatible(_)) => 2,
            longhaul::Error::Store(_) => 3,
            longhaul::Error::Refused(SubmitRefused::QueueFull { .. }) => 4,
            longhaul::Error::TimedOut { .. } => 5,
            _ => 2,
        };
        Self { message: error.to_string(), code }
    }
}

/// Tells the user and gives the code to end with.
pub(crate) fn report(failure: &Failure) -> ExitCode {
    eprintln!("longhaul: {failure}");
    ExitCode::from(failure.code)
}
