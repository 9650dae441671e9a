//! What is asked of a task from outside, and what becomes of that. No I/O; `rules.rs` decides.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::LockToken;
use crate::record::Decision;
use crate::state::StatePatch;
use crate::task::{Invalid, State, TaskId};

/// A request to cancel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// Whether what was done is to be undone.
    pub undo: bool,
    /// Who asked.
    pub by: String,
    /// Why.
    pub reason: Option<String>,
}

/// Something asked of a task from outside.
#[derive(Clone, Debug)]
pub struct Control {
    /// Who owns the task; another tenant's task is not found.
    pub tenant: String,
    /// The task.
    pub task: TaskId,
    /// Who asks, for the audit.
    pub by: String,
    /// What.
    pub action: Action,
}

/// What can be asked of a task.
#[derive(Clone, Debug)]
pub enum Action {
    /// End it.
    Cancel {
        /// Undo what was done.
        undo: bool,
        /// Why.
        reason: Option<String>,
    },
    /// Open it again after it failed or was cancelled; nothing happens to any other.
    Resume,
    /// Change its priority; its place in line follows.
    Priority(u8),
    /// Say what became of a step in doubt.
    Decide {
        /// The step.
        step: String,
        /// What.
        decision: Decision,
        /// Why.
        reason: Option<String>,
    },
    /// Change its state.
    Patch {
        /// How.
        patch: StatePatch,
        /// Only when the version is still this one.
        version: Option<u64>,
        /// Only while this lock is held.
        under: Option<LockToken>,
    },
    /// Remove it; only after it ended.
    Delete,
    /// Send it a named message. One that nobody waits for yet is kept.
    Signal {
        /// The name.
        name: String,
        /// What it says.
        message: Box<RawValue>,
        /// Made by the sender: the same signal sent again, because its answer was lost, is one signal.
        id: Uuid,
        /// Whether it may have been sent before: then the log is searched for it.
        again: bool,
    },
    /// Answer a question.
    Answer {
        /// Which; the only open one when not said.
        id: Option<String>,
        /// What.
        answer: String,
    },
    /// Approve or deny.
    Approve {
        /// Which; the only open one when not said.
        id: Option<String>,
        /// Yes or no.
        approve: bool,
        /// Why.
        reason: Option<String>,
        /// What the one who decides saw; another digest than the request's is refused.
        digest: Option<String>,
    },
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Controlled {
    /// The task's state afterwards.
    pub state: State,
    /// Whether anything changed.
    pub changed: bool,
    /// The version of the task's state afterwards, for `Patch`.
    pub version: u64,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlRefused {
    /// There is no such task.
    #[error("there is no such task")]
    NotFound,
    /// The task's state does not allow it.
    #[error("{0}")]
    WrongState(String),
    /// The state was changed by someone else meanwhile.
    #[error("the state is at version {current} by now; read it again")]
    VersionConflict {
        /// The version it has.
        current: u64,
    },
    /// The lock under which it was asked is not held any more.
    #[error(
        "lock '{name}' is not held with token {token} any more; get it again, and look what changed meanwhile"
    )]
    LockLost {
        /// The lock.
        name: String,
        /// The token it was had with.
        token: u64,
    },
    /// The request itself is wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}
