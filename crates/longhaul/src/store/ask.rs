//! What is asked of people: questions and approvals, and the decision whether an answer counts. No
//! I/O; the stores keep a row of each.

use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use super::rules::{Change, Head, MAX_MESSAGE_BYTES, arrive};
use super::{Action, Control, ControlRefused};
use crate::event::NewEvent;
use crate::faults::{self, Mutant};
use crate::run::wait::{Answered, DecidedApproval};
use crate::task::{Invalid, Phase, TaskId, timestamp};

/// What a run does with a question or an approval.
#[derive(Clone, Debug)]
pub enum AskChange {
    /// It is put to people.
    Open(NewAsk),
    /// What was approved is used: once, and not after its time
    /// ([`CommitRefused::ApprovalExpired`](super::CommitRefused::ApprovalExpired)).
    Use {
        /// Which.
        id: String,
        /// The operation that uses it.
        step: String,
    },
    /// It is no longer open: its time is up, or the task has moved on. What was decided before counts,
    /// unless its time is up.
    Expire {
        /// Which.
        id: String,
    },
}

impl AskChange {
    /// The approval that it uses.
    pub(crate) fn used(&self) -> Option<&str> {
        match self {
            Self::Use { id, .. } => Some(id),
            _ => None,
        }
    }
}

/// A question or an approval on its way to people.
#[derive(Clone, Debug)]
pub struct NewAsk {
    /// Unique in the task, and never used again.
    pub id: String,
    /// What kind.
    pub kind: AskKind,
    /// The operation that waits for it.
    pub step: String,
    /// What is asked.
    pub text: String,
    /// What an approval is for, JSON: the arguments and the risk.
    pub subject: String,
    /// Names exactly what is approved.
    pub digest: String,
    /// No answer is accepted from then on, microseconds.
    pub expires_at: Option<i64>,
}

/// What is asked of people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(i16)]
pub enum AskKind {
    /// A question with an answer.
    Question = 0,
    /// An approval or a denial.
    Approval = 1,
}

/// Where a question or an approval stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(i16)]
pub enum AskStatus {
    /// It waits for a person.
    Pending = 0,
    /// A question was answered.
    Answered = 1,
    /// Approved, and not used yet.
    Approved = 2,
    /// Denied.
    Denied = 3,
    /// Nobody decided in time.
    Expired = 4,
    /// Approved, and what was approved was begun.
    Used = 5,
}

impl AskStatus {
    pub(crate) const ALL: [Self; 6] =
        [Self::Pending, Self::Answered, Self::Approved, Self::Denied, Self::Expired, Self::Used];

    /// The word used in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Answered => "answered",
            Self::Approved => "approved",
            Self::Denied => "denied",
            Self::Expired => "expired",
            Self::Used => "used",
        }
    }

    pub(crate) fn from_code(code: i16) -> Option<Self> {
        Self::ALL.into_iter().find(|status| *status as i16 == code)
    }
}

/// A question or an approval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ask {
    /// Unique in the task.
    pub id: String,
    /// Whose it is.
    pub task_id: TaskId,
    /// What kind.
    pub kind: AskKind,
    /// Where it stands.
    pub status: AskStatus,
    /// The operation that waits for it.
    pub step: String,
    /// What is asked.
    pub text: String,
    /// What an approval is for: the arguments and the risk.
    pub subject: serde_json::Value,
    /// Names exactly what is approved.
    pub digest: String,
    /// When it was asked, microseconds.
    pub requested_at: i64,
    /// No answer is accepted from then on, microseconds.
    pub expires_at: Option<i64>,
    /// Who answered or decided.
    pub decided_by: Option<String>,
    /// When, microseconds.
    pub decided_at: Option<i64>,
    /// The answer, or why.
    pub reason: Option<String>,
}

/// What an answer makes of a question or an approval.
pub(crate) struct AskDecided {
    pub(crate) id: String,
    pub(crate) status: AskStatus,
    pub(crate) reason: Option<String>,
}

/// What an answer or a decision of a person does. `asks` are those of the task.
pub(crate) fn answer(
    head: &Head,
    control: &Control,
    asks: &[Ask],
    now: i64,
) -> Result<(Change, AskDecided), ControlRefused> {
    let (kind, id) = match &control.action {
        Action::Answer { id, .. } => (AskKind::Question, id),
        Action::Approve { id, .. } => (AskKind::Approval, id),
        _ => return Err(ControlRefused::NotFound),
    };
    let ask = find_ask(asks, kind, id.as_deref())?;
    let refuse = |why: String| Err(ControlRefused::WrongState(why));
    if ask.status != AskStatus::Pending {
        let by = ask.decided_by.as_ref().map_or_else(String::new, |by| format!(" by {by}"));
        let what = match ask.status {
            AskStatus::Used => format!("approved{by} and used"),
            other => format!("{}{by}", other.name()),
        };
        return refuse(format!("it was {what} already; an answer counts once"));
    }
    if let Some(expired) = ask.expires_at.filter(|&at| at <= now) {
        return refuse(format!("it expired at {}", timestamp(expired)));
    }
    if head.state.is_final() {
        return refuse(format!("the task is {} already", head.state));
    }
    if head.phase == Phase::Compensating {
        return refuse("the task does not go on any more: what it did is being undone".to_owned());
    }
    let by = control.by.clone();
    let id = ask.id.clone();
    let (status, reason, message, event) = match &control.action {
        Action::Approve { approve, reason, digest, .. } => {
            if reason.as_ref().is_some_and(|reason| reason.contains('\0')) {
                return Err(Invalid::new("reason", "must have no NUL").into());
            }
            let other = digest.as_ref().is_some_and(|digest| *digest != ask.digest);
            if other && !faults::is(Mutant::ApprovalUnbound) {
                return refuse(format!(
                    "it was asked for something else (digest {}); look at it again and decide about that",
                    ask.digest
                ));
            }
            let status = if *approve { AskStatus::Approved } else { AskStatus::Denied };
            let event = NewEvent::new(
                "approval.decided",
                json!({"id": id, "decision": status.name(), "by": by, "reason": reason, "digest": ask.digest}),
            );
            let message = DecidedApproval {
                id: id.clone(),
                approve: *approve,
                by,
                reason: reason.clone(),
                settled: false,
                digest: Some(ask.digest.clone()),
            };
            (status, reason.clone(), to_raw_value(&message), event)
        }
        Action::Answer { answer, .. } => {
            if answer.contains('\0') {
                return Err(Invalid::new("answer", "must have no NUL").into());
            }
            if answer.len() > MAX_MESSAGE_BYTES {
                let problem = format!("has {} bytes; at most {MAX_MESSAGE_BYTES} are accepted", answer.len());
                return Err(Invalid::new("answer", problem).into());
            }
            let event = NewEvent::new("question.answered", json!({"id": id, "by": by, "answer": answer}));
            let message = Answered { id: id.clone(), answer: answer.clone(), by };
            (AskStatus::Answered, Some(answer.clone()), to_raw_value(&message), event)
        }
        _ => return Err(ControlRefused::NotFound),
    };
    // Strings and a flag always serialise.
    let message = message.unwrap_or_else(|_| RawValue::NULL.to_owned());
    Ok((arrive(head, ask.step.clone(), message, event, now), AskDecided { id, status, reason }))
}

/// The one that is meant: by its id, or the only open one.
fn find_ask<'a>(asks: &'a [Ask], kind: AskKind, id: Option<&str>) -> Result<&'a Ask, ControlRefused> {
    let what = if kind == AskKind::Approval { "approval" } else { "question" };
    let none = |why: String| Err(ControlRefused::WrongState(why));
    let mut known = asks.iter().filter(|ask| ask.kind == kind);
    if let Some(id) = id {
        return known.find(|ask| ask.id == id).map_or_else(|| none(format!("it has no {what} {id}")), Ok);
    }
    let open: Vec<&Ask> = known.filter(|ask| ask.status == AskStatus::Pending).collect();
    match open.as_slice() {
        [only] => Ok(only),
        [] => none(format!("it waits for no {what}")),
        several => {
            let ids: Vec<&str> = several.iter().map(|ask| ask.id.as_str()).collect();
            none(format!("it waits for {} {what}s; say which: {}", ids.len(), ids.join(", ")))
        }
    }
}
