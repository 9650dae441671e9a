//! The task: what a client submits, the states it goes through, and how it looks from outside.
//!
//! No I/O here. The table of allowed transitions exists once, in [`State::TRANSITIONS`]; the
//! stores ask it through [`State::may_become`] before they change a row.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::error::TaskError;
use crate::event::{LogEntry, NewEvent, Progress};
use crate::faults;
use crate::outbox::{ReplyTo, Webhook};
use crate::record::Record;
use crate::store::clock::micros;

/// Identifies a task. Made by the caller (UUID version 7, so ids sort by time), which makes a
/// repeated submit harmless.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskId(pub Uuid);

impl TaskId {
    /// A new id, larger than every id this process made before.
    #[allow(clippy::new_without_default, reason = "every call gives another value")]
    pub fn new() -> Self {
        Self(faults::now_v7())
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for TaskId {
    type Err = uuid::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Uuid::from_str(text).map(Self)
    }
}

/// Where a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(i16)]
pub enum State {
    /// In the queue: ready, or ready later (`run_at`, a retry's back-off, a limit).
    Pending = 0,
    /// Leased by a worker.
    Running = 1,
    /// Suspended until something happens; holds no worker.
    Waiting = 2,
    /// Ended well; never opened again.
    Completed = 3,
    /// Ended with an error; `resume` opens it again.
    Failed = 4,
    /// Ended by request; `resume` opens it again.
    Cancelled = 5,
}

impl State {
    /// All states, in the order of their stored numbers.
    pub const ALL: [State; 6] =
        [Self::Pending, Self::Running, Self::Waiting, Self::Completed, Self::Failed, Self::Cancelled];

    /// Every allowed change of state and what causes it. Nothing else may happen to a task.
    pub const TRANSITIONS: &'static [(State, State, &'static str)] = &[
        (Self::Pending, Self::Running, "claimed by a worker"),
        (Self::Pending, Self::Cancelled, "cancelled in the queue"),
        (Self::Pending, Self::Failed, "deadline passed in the queue"),
        (Self::Running, Self::Completed, "the handler returned a result"),
        (Self::Running, Self::Failed, "the handler gave up, the deadline passed, or it kept killing its worker"),
        (Self::Running, Self::Cancelled, "cancelled while running"),
        (Self::Running, Self::Waiting, "suspended until something happens"),
        (Self::Running, Self::Pending, "to be retried, handed back, or its lease was lost"),
        (Self::Waiting, Self::Pending, "what it waited for happened"),
        (Self::Waiting, Self::Cancelled, "cancelled while waiting"),
        (Self::Waiting, Self::Failed, "deadline passed while waiting"),
        (Self::Failed, Self::Pending, "resumed by request"),
        (Self::Cancelled, Self::Pending, "resumed by request"),
    ];

    /// Whether a task in this state may go to `next`.
    pub fn may_become(self, next: State) -> bool {
        Self::TRANSITIONS.iter().any(|&(from, to, _)| from == self && to == next)
    }

    /// Whether the task is over (a `resume` can still open a failed or cancelled one).
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// The number stored for this state.
    pub(crate) fn code(self) -> i16 {
        self as i16
    }

    /// The state stored as `code`; `None` for a number this version does not know.
    pub(crate) fn from_code(code: i16) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.code() == code)
    }

    /// The name used in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which way a run goes: forward, or undoing what was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(i16)]
pub enum Phase {
    /// Doing the work.
    #[default]
    Forward = 0,
    /// Undoing what was done.
    Compensating = 1,
}

/// How urgent a task is: 0 to 9, larger first, 5 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Priority(u8);

impl Priority {
    /// The largest priority.
    pub const MAX: Priority = Priority(9);

    /// A priority from 0 to 9; `None` outside of that.
    pub fn new(value: u8) -> Option<Self> {
        (value <= Self::MAX.0).then_some(Self(value))
    }

    /// The number.
    pub fn get(self) -> u8 {
        self.0
    }

    /// The place in line of a task enqueued at `enqueued` (microseconds): each step of priority
    /// is worth `ageing` of waiting, so a hotfix passes everything of the last days and nothing
    /// starves for ever.
    pub(crate) fn rank(self, enqueued: i64, ageing: Duration) -> i64 {
        let step = i64::try_from(ageing.as_micros()).unwrap_or(i64::MAX / 16);
        enqueued.saturating_sub(step.saturating_mul(i64::from(self.0)))
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(5)
    }
}

impl TryFrom<u8> for Priority {
    type Error = Invalid;
    fn try_from(value: u8) -> Result<Self, Invalid> {
        Self::new(value).ok_or_else(|| Invalid::new("priority", format!("is {value}; it must be 0 to 9")))
    }
}

impl From<Priority> for u8 {
    fn from(priority: Priority) -> u8 {
        priority.0
    }
}

/// When a task must be over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Deadline {
    /// At this moment.
    At(Timestamp),
    /// This long after it was accepted.
    After(Duration),
}

/// A request to run a handler, not yet accepted. Schedules store it: a field that is added later must
/// have a default for reading.
///
/// ```
/// use longhaul::NewTask;
/// use std::time::Duration;
///
/// let task = NewTask::new("deploy", &serde_json::json!({"app": "shop"}))
///     .priority(9)
///     .timeout(Duration::from_secs(300))
///     .key("deploy-shop-42");
/// assert_eq!(task.queue, "default");
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NewTask {
    /// The id the task will have.
    pub id: TaskId,
    /// Who owns it.
    pub tenant: String,
    /// What runs it.
    pub handler: String,
    /// The handler's argument, any JSON.
    pub input: Box<RawValue>,
    /// The line it stands in.
    pub queue: String,
    /// How urgent it is, 0 to 9; checked at submit.
    pub priority: u8,
    /// Not to be started before this moment.
    pub run_at: Option<Timestamp>,
    /// When it must be over.
    pub deadline: Option<Deadline>,
    /// The same key from the same tenant is the same task.
    pub key: Option<String>,
    /// An equal submit within this time is the same task.
    pub dedupe_window: Option<Duration>,
    /// At most so many tasks with this key run at once (one, unless a limit says otherwise).
    pub concurrency_key: Option<String>,
    /// How many runs may end with the handler's error before the task fails.
    pub max_attempts: u32,
    /// Free labels to filter by.
    pub tags: BTreeMap<String, String>,
    /// The W3C `traceparent` under which its runs are traced; its children inherit it. No part of what
    /// makes two submits equal.
    #[serde(default)]
    pub traceparent: Option<String>,
    /// Who else hears of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook: Option<Webhook>,
    /// Where its result goes beside that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply: Option<ReplyTo>,
    /// Why the input could not be written as JSON.
    #[serde(skip)]
    not_json: Option<String>,
    /// The task whose run made this one.
    #[serde(skip)]
    pub(crate) parent: Option<TaskId>,
    /// The task whose recorded prefix this one shares, and that prefix.
    #[serde(skip)]
    pub(crate) fork: Option<(TaskId, Vec<Record>)>,
    /// What it undoes, by request, instead of going forward.
    #[serde(skip)]
    pub(crate) undo: Option<UndoOf>,
}

/// An undo by request.
#[derive(Clone, Debug)]
pub(crate) struct UndoOf {
    /// The task that is undone.
    pub(crate) task: TaskId,
    /// When that had ended, microseconds: one that was opened again since is not undone.
    pub(crate) finished_at: i64,
    /// The undo that failed before, if any; nobody else may have begun another since.
    pub(crate) before: Option<TaskId>,
    /// What was recorded so far, to replay the handler from, and that it is undone now.
    pub(crate) records: Vec<Record>,
}

impl NewTask {
    /// A task for `handler` with `input`, everything else by default.
    ///
    /// An input that cannot be written as JSON is refused at submit; use [`NewTask::with_raw`] for
    /// input that is JSON already.
    pub fn new(handler: impl Into<String>, input: &impl Serialize) -> Self {
        match to_raw_value(input) {
            Ok(input) => Self::with_raw(handler, input),
            Err(error) => {
                let nothing = Self::with_raw(handler, RawValue::NULL.to_owned());
                Self { not_json: Some(error.to_string()), ..nothing }
            }
        }
    }

    /// A task whose input is JSON already.
    pub fn with_raw(handler: impl Into<String>, input: Box<RawValue>) -> Self {
        Self {
            id: TaskId::new(),
            tenant: DEFAULT_TENANT.to_owned(),
            handler: handler.into(),
            input,
            queue: "default".to_owned(),
            priority: Priority::default().get(),
            run_at: None,
            deadline: None,
            key: None,
            dedupe_window: None,
            concurrency_key: None,
            max_attempts: 3,
            tags: BTreeMap::new(),
            traceparent: None,
            webhook: None,
            reply: None,
            not_json: None,
            parent: None,
            fork: None,
            undo: None,
        }
    }

    /// Sets the owner.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// Sets the queue.
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = queue.into();
        self
    }

    /// Sets the priority, 0 to 9.
    pub fn priority(mut self, priority: u8) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the moment before which it does not start.
    pub fn run_at(mut self, at: Timestamp) -> Self {
        self.run_at = Some(at);
        self
    }

    /// Sets the moment at which it must be over.
    pub fn deadline(mut self, at: Timestamp) -> Self {
        self.deadline = Some(Deadline::At(at));
        self
    }

    /// Sets how long it may take, counted from its acceptance.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.deadline = Some(Deadline::After(timeout));
        self
    }

    /// Sets the idempotency key.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Makes an equal submit within `window` the same task.
    pub fn dedupe_window(mut self, window: Duration) -> Self {
        self.dedupe_window = Some(window);
        self
    }

    /// Sets the concurrency key.
    pub fn concurrency_key(mut self, key: impl Into<String>) -> Self {
        self.concurrency_key = Some(key.into());
        self
    }

    /// Sets how many runs may end with an error.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// Adds a label.
    pub fn tag(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.tags.insert(name.into(), value.into());
        self
    }

    /// Sets the trace that its runs belong to.
    pub fn traceparent(mut self, traceparent: impl Into<String>) -> Self {
        self.traceparent = Some(traceparent.into());
        self
    }

    /// Tells this URL how the task ended; [`Webhook`] says how to hear of more.
    pub fn webhook(mut self, url: impl Into<String>) -> Self {
        self.webhook = Some(Webhook::new(url));
        self
    }

    /// Sends how the task ended to this destination, by whoever delivers replies
    /// ([`OutboxSettings::replies`](crate::OutboxSettings::replies)).
    pub fn reply(mut self, to: ReplyTo) -> Self {
        self.reply = Some(to);
        self
    }

    /// Decides, before anything is stored and the same for every store, whether this may be
    /// accepted at all.
    pub fn validate(&self) -> Result<(), Invalid> {
        if let Some(why) = &self.not_json {
            return Err(Invalid::new("input", format!("cannot be written as JSON: {why}")));
        }
        name("tenant", &self.tenant, 128)?;
        name("handler", &self.handler, 128)?;
        name("queue", &self.queue, 128)?;
        Priority::try_from(self.priority)?;
        if let Some(key) = &self.key {
            text("key", key, 255)?;
        }
        if let Some(key) = &self.concurrency_key {
            text("concurrency_key", key, 255)?;
        }
        if self.max_attempts == 0 || self.max_attempts > 1_000 {
            return Err(Invalid::new("max_attempts", format!("is {}; it must be 1 to 1000", self.max_attempts)));
        }
        if self.input.get().len() > MAX_INPUT_BYTES {
            return Err(Invalid::new(
                "input",
                format!("has {} bytes; at most {MAX_INPUT_BYTES} are accepted", self.input.get().len()),
            ));
        }
        if self.tags.len() > 32 {
            return Err(Invalid::new("tags", format!("has {} entries; at most 32 are accepted", self.tags.len())));
        }
        if let Some(trace) = &self.traceparent
            && (trace.is_empty() || trace.len() > 128 || !trace.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            return Err(Invalid::new("traceparent", "must have 1 to 128 visible ASCII characters"));
        }
        for (tag, value) in &self.tags {
            name("tags", tag, 64)?;
            if value.len() > 255 || value.contains('\0') {
                return Err(Invalid::new("tags", format!("'{tag}' must have at most 255 bytes and no NUL")));
            }
        }
        self.reply.as_ref().map_or(Ok(()), ReplyTo::validate)?;
        self.webhook.as_ref().map_or(Ok(()), Webhook::validate)
    }

    /// The first row of the task's log.
    pub(crate) fn first_entry(&self) -> LogEntry {
        let mut data = serde_json::json!({"handler": self.handler, "queue": self.queue});
        let mut records = vec![Record::Input(self.input.clone())];
        if let Some(parent) = self.parent {
            data["parent_id"] = serde_json::json!(parent);
        }
        if let Some((of, _)) = &self.fork {
            data["fork_of"] = serde_json::json!(of);
        }
        if let Some(undo) = &self.undo {
            data["undo_of"] = serde_json::json!(undo.task);
        }
        records.extend(self.inherited().cloned());
        LogEntry::new(&[NewEvent::new("task.submitted", data)], &records)
    }

    /// What it takes over of what another task recorded.
    pub(crate) fn inherited(&self) -> impl Iterator<Item = &Record> {
        let forked = self.fork.iter().flat_map(|(_, prefix)| prefix);
        forked.chain(self.undo.iter().flat_map(|undo| &undo.records))
    }

    /// A digest of what is asked for, defaults filled in and independent of spelling: two
    /// submits with the same digest are the same request. The task's own id and the key are not
    /// part of it.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut input = String::with_capacity(self.input.get().len());
        canonical(&self.input, 0, &mut input);
        let mut request = serde_json::json!({
            "tenant": self.tenant, "handler": self.handler, "queue": self.queue, "priority": self.priority,
            "run_at": self.run_at, "deadline": self.deadline, "dedupe_window": self.dedupe_window,
            "concurrency_key": self.concurrency_key, "max_attempts": self.max_attempts, "tags": self.tags,
        });
        // Not there at all without one, as in digests that were stored before there were any.
        if let Some(webhook) = &self.webhook {
            request["webhook"] = serde_json::json!(webhook);
        }
        if let Some(reply) = &self.reply {
            request["reply"] = serde_json::json!(reply);
        }
        Sha256::new().chain_update(request.to_string()).chain_update(input).finalize().into()
    }
}

/// Writes JSON without its spelling: members sorted, no white space, strings in one form. Numbers
/// stay as they are written, because no number type holds all of them.
fn canonical(json: &RawValue, depth: usize, out: &mut String) {
    /// Deeper than this, text counts as it is written.
    const MAX_DEPTH: usize = 100;
    let text = json.get();
    if depth < MAX_DEPTH {
        if let Ok(members) = serde_json::from_str::<BTreeMap<String, &RawValue>>(text) {
            out.push('{');
            for (name, value) in members {
                out.push_str(&serde_json::Value::String(name).to_string());
                out.push(':');
                canonical(value, depth + 1, out);
                out.push(',');
            }
            return out.push('}');
        }
        if let Ok(elements) = serde_json::from_str::<Vec<&RawValue>>(text) {
            out.push('[');
            for element in elements {
                canonical(element, depth + 1, out);
                out.push(',');
            }
            return out.push(']');
        }
        if let Ok(string) = serde_json::from_str::<String>(text) {
            return out.push_str(&serde_json::Value::String(string).to_string());
        }
    }
    out.push_str(text.trim());
}

/// Who owns what nobody else does. Its tasks are not in `tasks_tenant`, so that those who have no tenants
/// pay nothing for the index.
pub(crate) const DEFAULT_TENANT: &str = "default";

/// The largest input a task may carry; larger data belongs in an artifact.
pub const MAX_INPUT_BYTES: usize = 4 * 1024 * 1024;

/// Something in a request that can never be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct Invalid {
    /// Which field.
    pub field: &'static str,
    /// What is wrong with it and what would be right.
    pub problem: String,
}

impl Invalid {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }
}

fn text(field: &'static str, value: &str, max: usize) -> Result<(), Invalid> {
    if value.is_empty() || value.len() > max || value.contains('\0') {
        return Err(Invalid::new(field, format!("must have 1 to {max} bytes and no NUL")));
    }
    Ok(())
}

/// Whether something may be called so.
pub(crate) fn check_name(field: &'static str, value: &str) -> Result<(), Invalid> {
    name(field, value, 128)
}

/// A name that appears in URLs, limits and file names.
fn name(field: &'static str, value: &str, max: usize) -> Result<(), Invalid> {
    text(field, value, max)?;
    if value.chars().any(|c| c.is_control() || c.is_whitespace() || c == '/') {
        return Err(Invalid::new(
            field,
            format!("'{}' must have no spaces, slashes or control characters", value.escape_debug()),
        ));
    }
    Ok(())
}

/// What a suspended task waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// `in_doubt`, `approval`, `question`, `signal`, `timer`, `child` or `lock`.
    pub kind: String,
    /// Which one: the step's name, the signal's name, …
    pub id: String,
    /// Since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Until when at the latest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

impl Waiting {
    /// The kinds, those that a person has to do something about first.
    pub const KINDS: [&'static str; 7] = ["in_doubt", "approval", "question", "signal", "child", "lock", "timer"];
}

/// A task as seen from outside.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// The same id under the name the first clients used.
    pub task_id: TaskId,
    /// Its owner.
    #[serde(skip_serializing, default)]
    pub tenant: String,
    /// What runs it.
    pub handler: String,
    /// The line it stands in.
    pub queue: String,
    /// Where it stands.
    pub state: State,
    /// Forward, or undoing.
    pub phase: Phase,
    /// What it waits for, while it waits.
    pub waiting_for: Option<Waiting>,
    /// How urgent it is.
    pub priority: Priority,
    /// The handler's argument.
    pub input: Box<RawValue>,
    /// The input once more, when it is a string.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_input: Option<String>,
    /// What the handler returned.
    pub result: Option<Box<RawValue>>,
    /// Why it failed, was cancelled, or is being retried.
    pub error: Option<TaskError>,
    /// Runs that ended with the handler's error.
    pub attempts: u32,
    /// Leases lost since the last recorded step.
    pub crashes: u32,
    /// What it said last about its progress.
    pub progress: Option<Progress>,
    /// What it used: tokens, cost.
    pub usage: Option<serde_json::Value>,
    /// Free labels.
    pub tags: BTreeMap<String, String>,
    /// The task that spawned it.
    pub parent_id: Option<TaskId>,
    /// The task it was forked from.
    pub fork_of: Option<TaskId>,
    /// The task it undoes.
    pub undo_of: Option<TaskId>,
    /// The task that undoes it, by request.
    #[serde(default)]
    pub undone_by: Option<TaskId>,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// When it must be over.
    pub deadline: Option<Timestamp>,
    /// The number of its newest event.
    pub last_seq: u64,
    /// The fence of its newest run; each run's is larger than all before it.
    pub fence: u64,
    /// At most so many tasks with this key run at once.
    #[serde(skip_serializing, default)]
    pub concurrency_key: Option<String>,
    /// How many runs may end with the handler's error before it fails.
    #[serde(skip_serializing, default)]
    pub max_attempts: u32,
    /// Where its result goes, beside webhooks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply: Option<ReplyTo>,
}

impl Task {
    /// A task that was accepted a moment ago, as it stands then; saves reading it back.
    pub fn accepted(asked: NewTask, accepted: &crate::store::Accepted) -> Self {
        let created_at = timestamp(accepted.created_at);
        let deadline = asked.deadline.map(|deadline| match deadline {
            Deadline::At(at) => at,
            Deadline::After(timeout) => timestamp(accepted.created_at.saturating_add(micros(timeout))),
        });
        Self {
            id: accepted.id,
            task_id: accepted.id,
            tenant: asked.tenant,
            handler: asked.handler,
            queue: asked.queue,
            state: State::Pending,
            phase: Phase::Forward,
            waiting_for: None,
            priority: Priority::new(asked.priority).unwrap_or_default(),
            user_input: serde_json::from_str(asked.input.get()).ok(),
            input: asked.input,
            result: None,
            error: None,
            attempts: 0,
            crashes: 0,
            progress: None,
            usage: None,
            tags: asked.tags,
            parent_id: asked.parent,
            fork_of: asked.fork.map(|(of, _)| of),
            undo_of: asked.undo.map(|undo| undo.task),
            created_at,
            updated_at: created_at,
            finished_at: None,
            deadline,
            last_seq: 1,
            fence: 0,
            concurrency_key: asked.concurrency_key,
            max_attempts: asked.max_attempts,
            undone_by: None,
            reply: asked.reply,
        }
    }
}

/// A moment from stored microseconds; out-of-range values are clamped, so damage in one row
/// cannot make it unreadable.
pub(crate) fn timestamp(micros: i64) -> Timestamp {
    Timestamp::from_microsecond(micros).unwrap_or(if micros < 0 { Timestamp::MIN } else { Timestamp::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completed_task_never_changes_state_again() {
        assert!(State::ALL.iter().all(|&next| !State::Completed.may_become(next)));
    }

    #[test]
    fn every_state_but_the_first_is_reached_from_another() {
        for state in State::ALL {
            assert!(State::ALL.iter().any(|from| from.may_become(state)), "{state} cannot be reached");
        }
    }

    #[test]
    fn stored_numbers_of_states_are_read_back() {
        for state in State::ALL {
            assert_eq!(State::from_code(state.code()), Some(state));
        }
        assert_eq!(State::from_code(99), None);
    }

    #[test]
    fn a_hotfix_passes_what_was_enqueued_within_the_ageing_and_nothing_older() {
        let day = Duration::from_secs(86_400);
        let day_us = 86_400_000_000;
        let hotfix = Priority::MAX.rank(10 * day_us, day);
        assert!(hotfix < Priority::default().rank(7 * day_us, day));
        assert!(hotfix > Priority::default().rank(5 * day_us, day), "nothing starves for ever");
    }

    #[test]
    fn equal_requests_have_equal_digests_whatever_their_spelling() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("test input is JSON");
        let one = NewTask::with_raw("h", raw(r#"{"a":1,"b":2}"#)).key("k1");
        let two = NewTask::with_raw("h", raw(r#"{ "b": 2, "a": 1 }"#)).key("k2");
        assert_eq!(one.digest(), two.digest());
        let other = NewTask::with_raw("h", raw(r#"{"a":1,"b":3}"#));
        assert_ne!(one.digest(), other.digest());
        assert_ne!(one.digest(), one.clone().priority(6).digest());
        assert_eq!(one.digest(), one.clone().traceparent("00-1-1-01").digest(), "a trace asks for nothing");
        assert_ne!(one.digest(), one.clone().webhook("https://example.com/").digest());
        assert_ne!(one.digest(), one.clone().reply(ReplyTo::new("results")).digest());
    }

    #[test]
    fn requests_that_no_store_could_keep_are_refused() {
        let ok = NewTask::new("h", &1);
        assert_eq!(ok.validate(), Ok(()));
        for (bad, field) in [
            (ok.clone().queue(""), "queue"),
            (ok.clone().queue("a b"), "queue"),
            (ok.clone().tenant("a/b"), "tenant"),
            (ok.clone().priority(10), "priority"),
            (ok.clone().key("nul\0"), "key"),
            (ok.clone().max_attempts(0), "max_attempts"),
            (ok.clone().tag("t", "v\0"), "tags"),
            (ok.clone().traceparent("a b"), "traceparent"),
            (ok.clone().traceparent("x".repeat(129)), "traceparent"),
            (ok.clone().webhook("example.com"), "webhook"),
            (ok.clone().reply(ReplyTo::new("")), "reply"),
            (NewTask::new("h", &"x".repeat(MAX_INPUT_BYTES)), "input"),
            (NewTask::new("h", &BTreeMap::from([(vec![1], 1)])), "input"),
        ] {
            assert_eq!(bad.validate().expect_err("must be refused").field, field);
        }
    }
}
