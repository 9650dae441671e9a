//! How the program ends when something is wrong: one sentence on stderr, and a documented code.

use std::process::ExitCode;

use longhaul::store::{StoreError, SubmitRefused};

/// The codes, for the help and the man page.
pub(crate) const HELP: &str = "\
Exit codes:
  0    done
  1    the task failed or was cancelled (wait, watch, --wait, --follow), or check, doctor or
       demo found a fault
  2    wrong usage, or the server answered 400, 404, 409, 412, 413 or 422
  3    not reachable, or the server answered 5xx
  4    refused: 401, 403 or 429
  5    timed out waiting; the task goes on
  130  interrupted with Ctrl-C; the task goes on

Client commands talk to --server (LONGHAUL_SERVER) with the token in LONGHAUL_TOKEN or in the file
that LONGHAUL_TOKEN_FILE names. Data goes to stdout, everything else to stderr.";

/// Why a command did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    /// Empty when there is nothing more to say.
    message: String,
    code: u8,
}

impl Failure {
    /// A check of the program's own failed, or the task that was waited for.
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

    /// The server does not let us, now or at all.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 4 }
    }

    /// Nothing happened for as long as the user wanted to wait.
    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 5 }
    }

    /// Ctrl-C.
    pub(crate) fn interrupted(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 130 }
    }

    /// Whoever reads our output has had enough (`longhaul ps | head`), which is no fault.
    pub(crate) fn reader_gone() -> Self {
        Self { message: String::new(), code: 0 }
    }

    /// The code to end with.
    #[cfg(test)]
    pub(crate) fn code(&self) -> u8 {
        self.code
    }
}

impl From<longhaul::Error> for Failure {
    fn from(error: longhaul::Error) -> Self {
        let code = match &error {
            longhaul::Error::Store(StoreError::Url(_) | StoreError::Incompatible(_)) => 2,
            longhaul::Error::Store(_)
            | longhaul::Error::Refused(
                SubmitRefused::OutboxFull { .. } | SubmitRefused::SubscriberBehind { .. },
            ) => 3,
            longhaul::Error::Refused(SubmitRefused::QueueFull { .. }) => 4,
            longhaul::Error::TimedOut { .. } => 5,
            _ => 2,
        };
        Self { message: error.to_string(), code }
    }
}

/// Tells the user and gives the code to end with.
pub(crate) fn report(failure: &Failure) -> ExitCode {
    if !failure.message.is_empty() {
        eprintln!("longhaul: {failure}");
    }
    ExitCode::from(failure.code)
}
