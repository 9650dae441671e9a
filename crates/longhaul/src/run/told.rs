//! What a run tells others: progress for people, events of its own, text as it comes, what it has used.

use serde::Serialize;
use serde_json::json;

use super::desk::Asking;
use super::{Run, StepContext};
use crate::error::TaskError;
use crate::event::{NewEvent, Progress};
use crate::live::LiveText;
use crate::record::Op;
use crate::task::{Invalid, timestamp};

/// Events that only the engine tells.
const RESERVED: [&str; 9] =
    ["task.", "step.", "saga.", "state.", "checkpoint.", "approval.", "question.", "lock.", "log."];

impl Run {
    /// Tells people what the task is doing; `total` is 0 when unknown. Not waited for: it is
    /// written within a moment, or with the next step. What was told before a crash is not told
    /// again in the replay.
    pub fn progress(&self, status: &str, step: u32, total: u32, message: &str) {
        self.progress_with_tool(status, step, total, None, message);
    }

    /// As [`Run::progress`], with the tool in use.
    pub fn progress_with_tool(&self, status: &str, step: u32, total: u32, tool: Option<&str>, message: &str) {
        let event = self.progress_event(status, step, total, tool, message);
        self.desk().progress(event);
        self.wake_driver();
    }

    pub(super) fn progress_event(
        &self,
        status: &str,
        step: u32,
        total: u32,
        tool: Option<&str>,
        message: &str,
    ) -> NewEvent {
        let progress = Progress {
            task_id: self.id(),
            step,
            total_step: total,
            status: status.to_owned(),
            tool: tool.map(str::to_owned),
            message: message.to_owned(),
            time: timestamp(self.now_micros()),
        };
        NewEvent::new("progress", json!(progress))
    }

    /// Text as it comes, of the step whose context this is, for who watches now; never stored. `attempt`
    /// is the try it belongs to, which may be one within the step's own; `after` is how many characters of
    /// that try were told before.
    pub fn live(&self, context: &StepContext, attempt: u32, after: u64, text: &str) {
        self.inner.engine.lives.tell(self.tenant(), self.id(), || LiveText {
            run: self.fence(),
            step: context.step.clone(),
            attempt,
            after,
            text: text.to_owned(),
        });
    }

    /// What the task has used so far, shown as `usage` of the task; written with the run's next commit.
    pub fn usage(&self, usage: &impl Serialize) {
        match serde_json::to_string(usage) {
            Ok(usage) => self.desk().used(usage),
            Err(error) => {
                tracing::error!(task = %self.id(), %error, "what was used cannot be written as JSON");
            }
        }
    }

    /// Publishes an event of one's own, exactly once in the task's history.
    pub async fn publish(&self, kind: &str, payload: &impl Serialize) -> Result<(), TaskError> {
        check_event_type(kind)?;
        let data = serde_json::to_value(payload)?;
        let operation = self.take_place(Asking::plain(&format!("publish {kind}"), Op::Publish))?;
        operation.once(|| [NewEvent::new(kind, data)]).await
    }
}

/// Whether a handler may tell an event of this type.
pub(super) fn check_event_type(kind: &str) -> Result<(), TaskError> {
    let well_formed = !kind.is_empty()
        && kind.len() <= 128
        && kind.contains('.')
        && kind.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if well_formed && !RESERVED.iter().any(|own| kind.starts_with(own)) {
        return Ok(());
    }
    let problem = format!("must look like 'disk.cleaned' and not begin with {}", RESERVED.join(", "));
    Err(TaskError::fatal("bad_event_type", Invalid::new("type", problem).to_string()))
}
