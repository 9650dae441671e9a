//! Records: what a task's log keeps for replay. No I/O.
//!
//! Together the records of a task are its journal. They are read back in log order, and that
//! order is the order in which a handler is given results again (see `run/journal.rs`).

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::error::TaskError;
use crate::event::LogRow;
use crate::state::{AgentState, StateChange, StatePatch};
use crate::task::{State, TaskId};

/// What kind of effect a step has; decides whether it may be started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Changes nothing; may run any number of times.
    Read,
    /// May be started again with the same idempotency key.
    #[default]
    Idempotent,
    /// Must not happen twice unnoticed; can be undone.
    Compensable,
    /// Must not happen twice; cannot be undone.
    Irreversible,
}

impl Effect {
    /// Whether a start must be on record before the effect, because an unknown outcome may not
    /// simply be tried again.
    pub fn needs_intent(self) -> bool {
        matches!(self, Self::Compensable | Self::Irreversible)
    }
}

/// When what a task did is undone without a request. Always, by default: a task that fails for good,
/// misses its deadline or is cancelled undoes every completed step that says how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UndoOn {
    /// When it fails for good or misses its deadline.
    pub failed: bool,
    /// When it is cancelled. A cancel that asks for it undoes in any case.
    pub cancelled: bool,
}

impl Default for UndoOn {
    fn default() -> Self {
        Self { failed: true, cancelled: true }
    }
}

impl UndoOn {
    /// Whether a task that ends in `state` is undone; `asked`: by a request to cancel that says so.
    pub(crate) fn applies(self, state: State, asked: bool) -> bool {
        match state {
            State::Cancelled => self.cancelled || asked,
            _ => self.failed,
        }
    }

    /// As it stands in the store.
    pub(crate) fn code(self) -> i16 {
        i16::from(self.failed) + 2 * i16::from(self.cancelled)
    }

    /// From what stands in the store.
    pub(crate) fn from_code(code: i16) -> Self {
        Self { failed: code & 1 != 0, cancelled: code & 2 != 0 }
    }
}

/// What a person (or a tool that can tell) says about an effect whose outcome is unknown.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    /// It did not happen, or may happen again: run the step again.
    Retry,
    /// It happened, with this result.
    Done(Box<RawValue>),
    /// Give the step up.
    Fail,
}

impl Decision {
    /// The word used in the API.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Done(_) => "done",
            Self::Fail => "fail",
        }
    }
}

/// One thing replay needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Record {
    /// The task's input; in the first row of every log.
    Input(Box<RawValue>),
    /// An effect that must not happen twice is about to start.
    Intent {
        step: String,
        attempt: u32,
        /// As in `Done`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        undoable: bool,
    },
    /// A step ended well. `op` tells steps from other operations that share the name space.
    Done {
        step: String,
        op: Op,
        effect: Effect,
        attempt: u32,
        started: i64,
        result: Box<RawValue>,
        /// It can be undone, and is when the task fails or is cancelled.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        undoable: bool,
        /// Of a deferred one, whose result was given before it was written: the number of the newest
        /// event known then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        given_after: Option<u64>,
    },
    /// One try of a step failed; `last` means the step itself failed with it.
    Failed { step: String, effect: Effect, attempt: u32, started: i64, last: bool, error: TaskError },
    /// It is unknown whether the effect happened; a decision is needed.
    InDoubt { step: String, effect: Effect, attempt: u32, error: TaskError },
    /// What was decided about a step in doubt.
    Decided { step: String, decision: Decision, by: String, reason: Option<String> },
    /// The task's state changed; `version` is the one after the change.
    Patched { patch: StatePatch, version: u64 },
    /// The task's state began with this; `version` is the one after that.
    StateBegun { state: AgentState, version: u64 },
    /// A snapshot was taken. What follows is a new part of the journal, with names of its own.
    /// `kept` is what had arrived and was not given to the handler yet: address and message.
    Checkpoint {
        part: u32,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        kept: Vec<(String, Box<RawValue>)>,
    },
    /// A new attempt or a resume begins: failures recorded before this no longer count. After a
    /// resume, steps that were undone and approvals do not count either.
    Reopened {
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        resumed: bool,
    },
    /// A durable wait began. `until` is when it ends by itself, microseconds; `id` is what others
    /// call it by.
    Wait { step: String, op: Op, until: Option<i64>, id: Option<String> },
    /// Something came from outside for whoever waits at this address. It is given to the handler
    /// in the order of the log, like every other outcome.
    /// `id` is the sender's: what comes twice under one id is one message.
    Arrived {
        at: String,
        message: Box<RawValue>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<Uuid>,
    },
    /// The task will end so, and what was done is undone first; nothing new is begun from here on.
    Undoing { state: State, error: TaskError },
    /// What a step did was undone.
    Undone { part: u32, step: String },
    /// Everything before this is of another task, which this one undoes by request.
    UndoOf { task: TaskId },
    /// A question or an approval is no longer asked: the handler went on without it.
    Withdrawn { part: u32, step: String },
    /// A record of an earlier part of the journal than the newest: the handler was replayed from before a
    /// checkpoint, and got there to something that is not recorded any more.
    Earlier { part: u32, record: Box<Record> },
    /// Copied from the task this one was forked from: a step that is not repeated here, and not
    /// undone either.
    Inherited { part: u32, step: String, op: Op, result: Box<RawValue> },
}

impl Record {
    /// The step it is about.
    pub(crate) fn step(&self) -> Option<&str> {
        match self {
            Self::Intent { step, .. }
            | Self::Done { step, .. }
            | Self::Failed { step, .. }
            | Self::InDoubt { step, .. }
            | Self::Decided { step, .. }
            | Self::Wait { step, .. }
            | Self::Undone { step, .. }
            | Self::Withdrawn { step, .. }
            | Self::Inherited { step, .. } => Some(step),
            Self::Earlier { record, .. } => record.step(),
            Self::Input(_)
            | Self::Patched { .. }
            | Self::StateBegun { .. }
            | Self::Checkpoint { .. }
            | Self::Reopened { .. }
            | Self::Arrived { .. }
            | Self::Undoing { .. }
            | Self::UndoOf { .. } => None,
        }
    }

    /// The record itself, whichever part of the journal it is of.
    pub(crate) fn plain(&self) -> &Self {
        match self {
            Self::Earlier { record, .. } => record.plain(),
            plain => plain,
        }
    }

    /// Of a deferred one: the number of the newest event known when its result was given.
    pub(crate) fn given_after(&self) -> Option<u64> {
        match self {
            Self::Done { given_after, .. } => *given_after,
            _ => None,
        }
    }

    /// What it changes of the task's state.
    pub(crate) fn state_change(&self) -> Option<StateChange> {
        match self {
            Self::Patched { patch, .. } => Some(StateChange::Patch(patch.clone())),
            Self::StateBegun { state, .. } => Some(StateChange::Begin(state.clone())),
            _ => None,
        }
    }

    /// The record of a change that makes this version of the state.
    pub(crate) fn of_state(change: StateChange, version: u64) -> Self {
        match change {
            StateChange::Patch(patch) => Self::Patched { patch, version },
            StateChange::Begin(state) => Self::StateBegun { state, version },
        }
    }
}

/// What a recorded name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// `run.step`
    Step,
    /// `run.publish`
    Publish,
    /// `run.patch`
    Patch,
    /// `run.sleep`
    Sleep,
    /// `run.signal`
    Signal,
    /// `run.ask`
    Question,
    /// `run.approve`
    Approval,
    /// `child.join`
    Join,
    /// `run.lock`
    Lock,
    /// The undo of a step.
    Undo,
}

impl Op {
    /// The word used in errors and in the API.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Publish => "publish",
            Self::Patch => "patch",
            Self::Sleep => "sleep",
            Self::Signal => "signal",
            Self::Question => "question",
            Self::Approval => "approval",
            Self::Join => "join",
            Self::Lock => "lock",
            Self::Undo => "undo",
        }
    }
}

/// The error of a step in doubt when it was decided that it failed.
pub(crate) fn decided_to_have_failed(step: &str, reason: Option<&str>) -> TaskError {
    let why = reason.map_or_else(String::new, |reason| format!(": {reason}"));
    TaskError::fatal("in_doubt", format!("it was decided that step '{step}' failed{why}"))
}

/// The records of one row. An unreadable row is an error: replaying around it could run a
/// recorded step again.
pub(crate) fn records_of(row: &LogRow) -> Result<Vec<Record>, serde_json::Error> {
    row.records.as_deref().map_or(Ok(Vec::new()), serde_json::from_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_replayed_byte_for_byte() {
        let text = r#"{"b": 1,   "a":1.50, "n":12345678901234567890}"#;
        let result = RawValue::from_string(text.to_owned()).expect("test input is JSON");
        let record = Record::Done {
            step: "s".into(),
            op: Op::Step,
            effect: Effect::Read,
            attempt: 1,
            started: 0,
            result,
            undoable: false,
            given_after: None,
        };
        let stored = serde_json::to_string(&[record]).expect("records serialise");
        let read: Vec<Record> = serde_json::from_str(&stored).expect("and parse");
        let Record::Done { result, .. } = &read[0] else { panic!("another record came back") };
        assert_eq!(result.get(), text);
    }
}
