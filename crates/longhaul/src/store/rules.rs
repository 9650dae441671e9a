//! The decisions both stores share, as pure functions over the changeable part of a task's row:
//! which candidates a claim may take, whether a commit is acceptable, what a request, a lost
//! lease or a passed time does to a task. They only say what should change; the stores write it.

use std::collections::BTreeMap;

use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use uuid::Uuid;

use super::{Action, Cancel, CommitRefused, Control, ControlRefused};
use crate::error::TaskError;
use crate::event::{LogEntry, NewEvent};
use crate::faults::{self, Mutant};
use crate::record::{Record, UndoOn};
use crate::run::child::{CHILD, ChildEnded};
use crate::run::wait::{SIGNAL, check_signal};
use crate::task::{Invalid, Phase, Priority, State, TaskId, Waiting, timestamp};

/// A task that lost this many leases since its last recorded step is given up as poison.
pub(crate) const MAX_CRASHES: u32 = 5;
/// A task that lost this many runs only where nothing else runs, so that it takes no neighbour
/// down with it.
pub(crate) const SUSPECT_CRASHES: u32 = 2;
/// The most a message, an answer or a signal may have.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1024 * 1024;
/// How long after its deadline a running task is left to the worker that holds it. After that
/// the sweep ends it: the worker is alive but stuck.
pub(crate) const DEADLINE_GRACE: i64 = 30_000_000;

/// The part of a task's row that decisions are made from and that they change.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: TaskId,
    pub(crate) tenant: String,
    pub(crate) queue: String,
    pub(crate) deadline: Option<i64>,
    pub(crate) priority: u8,
    pub(crate) rank: i64,
    pub(crate) state: State,
    pub(crate) phase: Phase,
    pub(crate) ready: bool,
    /// When the sweep must look at this row again.
    pub(crate) due_at: Option<i64>,
    /// Not to be started before.
    pub(crate) run_at: Option<i64>,
    /// The limit that holds it back.
    pub(crate) parked: Option<String>,
    /// The limits it counts in, a JSON array.
    pub(crate) holds: Option<String>,
    pub(crate) fence: u64,
    pub(crate) last_seq: u64,
    pub(crate) attempts: u32,
    pub(crate) crashes: u32,
    pub(crate) cancel: Option<Cancel>,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) error: Option<TaskError>,
    pub(crate) finished_at: Option<i64>,
    /// Something was done that can be undone, and when it is without a request.
    pub(crate) undoable: bool,
    pub(crate) undo_on: UndoOn,
    /// It ended, and its parent was not told yet.
    pub(crate) untold: bool,
    /// The task it undoes, by request, and the one that undoes it.
    pub(crate) undo_of: Option<TaskId>,
    pub(crate) undone_by: Option<TaskId>,
}

/// What a decision changes: the new head, and what is added to the log (its numbers follow
/// `head.last_seq`, which the store advances).
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) head: Head,
    pub(crate) entry: LogEntry,
}

impl Head {
    /// Ends the task, or has it undone first what it did.
    fn end(&mut self, state: State, error: TaskError, now: i64) -> Ending {
        let asked = self.cancel.as_ref().is_some_and(|cancel| cancel.undo);
        if !self.undoable || !self.undo_on.applies(state, asked) || self.phase == Phase::Compensating {
            return Ending { event: self.finish(state, error, now), record: None };
        }
        self.phase = Phase::Compensating;
        self.crashes = 0;
        self.enqueue(None, now);
        let event = progress(self, "compensating", &format!("{}; undoing what was done", error.message), now);
        self.error = Some(error.clone());
        Ending { event, record: Some(Record::Undoing { state, error }) }
    }

    /// Whether what it did may have been undone when it ended.
    pub(crate) fn may_be_undone(&self) -> bool {
        let asked = self.cancel.as_ref().is_some_and(|cancel| cancel.undo);
        self.undoable && (self.undo_on.failed || self.undo_on.cancelled || asked)
    }

    fn finish(&mut self, state: State, error: TaskError, now: i64) -> NewEvent {
        debug_assert!(self.state.may_become(state), "{} to {state}", self.state);
        self.state = state;
        self.phase = Phase::Forward;
        self.ready = false;
        self.due_at = None;
        // Of a task that never began, the time it was asked to wait for counts again when it is resumed.
        self.run_at = self.run_at.filter(|_| self.fence == 0);
        self.parked = None;
        self.waiting = None;
        self.finished_at = Some(now);
        let event = match state {
            State::Cancelled => "task.cancelled",
            _ => "task.failed",
        };
        let event = NewEvent::new(event, json!({"error": error}));
        self.error = Some(error);
        event
    }

    /// Back in line, with its old rank, as soon as `run_at` has come.
    fn enqueue(&mut self, run_at: Option<i64>, now: i64) {
        let pending = self.state == State::Pending;
        debug_assert!(pending || self.state.may_become(State::Pending), "{} to pending", self.state);
        self.state = State::Pending;
        self.waiting = None;
        self.parked = None;
        self.run_at = run_at.filter(|&at| at > now);
        self.ready = self.run_at.is_none();
        self.due_at = pending_due(self.run_at, self.deadline());
    }

    /// Whether nothing may be begun for it any more.
    pub(crate) fn ended_or_cancelled(&self) -> bool {
        self.state.is_final() || self.cancel.is_some() || self.phase == Phase::Compensating
    }

    /// The deadline that counts: undoing has its own time.
    fn deadline(&self) -> Option<i64> {
        deadline_in(self.phase, self.deadline)
    }

    fn past_deadline(&self, now: i64) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }
}

/// How a task that must end does so.
struct Ending {
    event: NewEvent,
    record: Option<Record>,
}

/// The deadline as it counts in a phase: undoing has its own time.
pub(crate) fn deadline_in(phase: Phase, deadline: Option<i64>) -> Option<i64> {
    deadline.filter(|_| phase == Phase::Forward)
}

/// When a task must be looked at again, of which nothing was due yet.
pub(crate) fn next_look(head: &Head) -> Option<i64> {
    match head.state {
        State::Pending => pending_due(head.run_at, head.deadline()),
        State::Running => running_due(head.deadline, head.phase),
        State::Waiting => {
            let until = head.waiting.as_ref().and_then(|waiting| waiting.until);
            earliest(until.map(|until| until.as_microsecond()), head.deadline())
        }
        _ => None,
    }
}

/// When a pending task must be looked at: when its time comes, or when its time is up.
pub(crate) fn pending_due(run_at: Option<i64>, deadline: Option<i64>) -> Option<i64> {
    earliest(run_at, deadline)
}

/// When a running task must be looked at, if its worker does not end it.
pub(crate) fn running_due(deadline: Option<i64>, phase: Phase) -> Option<i64> {
    deadline_in(phase, deadline).map(|deadline| deadline.saturating_add(DEADLINE_GRACE))
}

/// The earlier of two times, either of which may be missing.
pub(crate) fn earliest(one: Option<i64>, other: Option<i64>) -> Option<i64> {
    [one, other].into_iter().flatten().min()
}

pub(crate) fn deadline_error(deadline: i64, during: &str) -> TaskError {
    TaskError::fatal("deadline_exceeded", format!("the deadline passed {during}"))
        .detail("deadline", timestamp(deadline).to_string())
}

pub(crate) fn cancel_error(cancel: &Cancel) -> TaskError {
    let message = match &cancel.reason {
        Some(reason) => format!("cancelled by {}: {reason}", cancel.by),
        None => format!("cancelled by {}", cancel.by),
    };
    TaskError::fatal("cancelled", message)
}

/// A row a claim may take.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) id: TaskId,
    pub(crate) rank: i64,
    pub(crate) tenant: String,
    pub(crate) queue: String,
    pub(crate) concurrency_key: Option<String>,
    pub(crate) crashes: u32,
}

impl Candidate {
    /// Whether it may run only where nothing else runs.
    pub(crate) fn is_suspect(&self) -> bool {
        self.crashes >= SUSPECT_CRASHES
    }

    /// The names of the limits it may count in, the same for every store.
    pub(crate) fn limits(&self) -> Vec<String> {
        let mut names = vec![queue_limit(&self.queue), tenant_limit(&self.tenant)];
        if let Some(key) = &self.concurrency_key {
            names.push(key_limit(&self.tenant, key));
        }
        names
    }
}

pub(crate) fn queue_limit(queue: &str) -> String {
    format!("queue/{queue}")
}

pub(crate) fn tenant_limit(tenant: &str) -> String {
    format!("tenant/{tenant}")
}

/// A concurrency key's own counter; two tenants' keys never meet.
pub(crate) fn key_limit(tenant: &str, key: &str) -> String {
    format!("key/{tenant}/{key}")
}

/// A bound on running tasks and how many count in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) max: u32,
    pub(crate) running: u32,
}

/// What a claim does with its candidates, by their index.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Lease these; each with the limits it counts in from now on.
    pub(crate) take: Vec<(usize, Vec<String>)>,
    /// Not ready any more until this limit has room again.
    pub(crate) park: Vec<(usize, String)>,
    pub(crate) suspect_waits: bool,
}

/// Decides which candidates (lowest rank first) a claim takes. `limits` has every limit that is
/// set or counted, and is kept up to date with what is taken.
pub(crate) fn admit(
    candidates: &[Candidate],
    limits: &mut BTreeMap<String, Limit>,
    max: usize,
    idle: bool,
) -> Admission {
    let mut admission = Admission::default();
    let alone = idle && candidates.iter().any(Candidate::is_suspect);
    for (index, candidate) in candidates.iter().enumerate() {
        if admission.take.len() == max || (alone && !admission.take.is_empty()) {
            break;
        }
        if candidate.is_suspect() != alone {
            admission.suspect_waits |= candidate.is_suspect();
            continue;
        }
        let names: Vec<String> = candidate.limits().into_iter().filter(|name| limits.contains_key(name)).collect();
        let full = names.iter().find(|&name| limits.get(name).is_some_and(|limit| limit.running >= limit.max));
        if let Some(full) = full {
            admission.park.push((index, full.clone()));
            continue;
        }
        for name in &names {
            if let Some(limit) = limits.get_mut(name) {
                limit.running += 1;
            }
        }
        admission.take.push((index, names));
    }
    admission
}

/// Whether a commit may be written, given what the task's row says now.
pub(crate) struct CommitCheck {
    pub(crate) state: State,
    pub(crate) fence: u64,
    pub(crate) commit_no: u32,
    pub(crate) last_seq: u64,
    pub(crate) cancelled: bool,
    pub(crate) deadline: Option<i64>,
    /// An approval that the commit uses, and that has expired.
    pub(crate) expired: Option<String>,
}

/// The verdict on a commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Write,
    /// It was written before; its answer was lost.
    Known,
    Refuse(CommitRefused),
}

pub(crate) fn check_commit(row: Option<&CommitCheck>, commit: &super::Commit, now: i64) -> Verdict {
    let fenced = Verdict::Refuse(CommitRefused::Fenced { held: commit.fence });
    let Some(row) = row else { return fenced };
    if row.fence != commit.fence && !faults::is(Mutant::FenceNotChecked) {
        return fenced;
    }
    if commit.number <= row.commit_no {
        return Verdict::Known;
    }
    if row.state != State::Running {
        return fenced;
    }
    if commit.forward && row.cancelled && !faults::is(Mutant::CancelLost) {
        return Verdict::Refuse(CommitRefused::Cancelled);
    }
    if commit.forward && row.deadline.is_some_and(|deadline| deadline <= now) {
        return Verdict::Refuse(CommitRefused::DeadlineExceeded);
    }
    if commit.known_seq.is_some_and(|known| known < row.last_seq) {
        return Verdict::Refuse(CommitRefused::Stale { last_seq: row.last_seq });
    }
    if let Some(id) = &row.expired {
        return Verdict::Refuse(CommitRefused::ApprovalExpired { id: id.clone() });
    }
    Verdict::Write
}

/// What taking back an expired lease does. The fence is raised, so that nothing the old holder
/// still sends is accepted.
pub(crate) fn lease_lost(head: &Head, now: i64) -> Change {
    let mut head = head.clone();
    head.crashes += 1;
    head.fence += 1;
    let cancel = head.cancel.clone().filter(|_| head.phase == Phase::Forward);
    let ending = if let Some(cancel) = cancel {
        head.end(State::Cancelled, cancel_error(&cancel), now)
    } else if head.past_deadline(now) {
        let error = deadline_error(head.deadline.unwrap_or(now), "while its worker was lost");
        head.end(State::Failed, error, now)
    } else if head.crashes >= MAX_CRASHES {
        let error = poison(&head);
        head.end(State::Failed, error, now)
    } else {
        head.enqueue(None, now);
        let message = "The worker was lost; the task goes on from its last recorded step.";
        Ending { event: progress(&head, "retrying", message, now), record: None }
    };
    change(head, ending)
}

fn poison(head: &Head) -> TaskError {
    let crashes = head.crashes;
    let message = format!("{crashes} workers in a row died or stopped answering while running it");
    let poison = TaskError::fatal("poison", message).detail("crashes", crashes);
    if head.phase == Phase::Forward {
        return poison;
    }
    let mut error = TaskError::fatal("compensation_failed", format!("undoing was given up: {}", poison.message))
        .detail("crashes", crashes);
    if let Some(original) = &head.error {
        error = error.caused_by(original.clone());
    }
    error
}

fn change(head: Head, ending: Ending) -> Change {
    let records: Vec<Record> = ending.record.into_iter().collect();
    Change { entry: LogEntry::new(&[ending.event], &records), head }
}

/// What a time that has come does; `None` when there is nothing to do yet (the row's `due_at` is
/// then only moved).
pub(crate) fn due(head: &Head, now: i64) -> Option<Change> {
    let mut head = head.clone();
    let mut events = Vec::new();
    let cancel = head.cancel.clone().filter(|_| head.phase == Phase::Forward);
    match head.state {
        State::Pending | State::Waiting if cancel.is_some() => {
            // Its parent was cancelled.
            let error = cancel.as_ref().map_or_else(|| TaskError::fatal("cancelled", "cancelled"), cancel_error);
            let ending = head.end(State::Cancelled, error, now);
            return Some(change(head, ending));
        }
        State::Pending if head.past_deadline(now) => {
            let error = deadline_error(head.deadline.unwrap_or(now), "in the queue");
            let ending = head.end(State::Failed, error, now);
            return Some(change(head, ending));
        }
        State::Pending if head.run_at.is_some_and(|at| at <= now) => {
            head.run_at = None;
            head.ready = true;
            head.due_at = pending_due(None, head.deadline());
        }
        State::Waiting if head.past_deadline(now) => {
            let error = deadline_error(head.deadline.unwrap_or(now), "while the task was waiting");
            let ending = head.end(State::Failed, error, now);
            return Some(change(head, ending));
        }
        State::Waiting
            if head
                .waiting
                .as_ref()
                .and_then(|waiting| waiting.until)
                .is_some_and(|until| until.as_microsecond() <= now) =>
        {
            head.enqueue(None, now);
            events.push(NewEvent::new("task.resumed", json!({"by": "time"})));
        }
        State::Running if head.deadline().is_some_and(|deadline| deadline + DEADLINE_GRACE <= now) => {
            // The worker's lease is alive but it did not end the task: raise the fence so that
            // nothing of it is accepted any more.
            head.fence += 1;
            let error = deadline_error(head.deadline.unwrap_or(now), "and its worker did not stop it");
            let ending = head.end(State::Failed, error, now);
            return Some(change(head, ending));
        }
        _ => return None,
    }
    Some(Change { entry: LogEntry::new(&events, &[] as &[Record]), head })
}

/// What a request does. `Ok(None)`: nothing to do. `Patch` and `Delete` touch other tables and
/// are finished by the stores; here they are only allowed or refused.
pub(crate) fn control(
    head: &Head,
    control: &Control,
    ageing_micros: i64,
    now: i64,
) -> Result<Option<Change>, ControlRefused> {
    let mut head = head.clone();
    let (mut events, mut records) = (Vec::new(), Vec::new());
    match &control.action {
        Action::Cancel { undo, reason } => {
            let cancel = Cancel { undo: *undo, by: control.by.clone(), reason: reason.clone() };
            // A cancel without undo cannot become one with: its worker may have ended the task already.
            let without = head
                .cancel
                .as_ref()
                .is_some_and(|first| *undo && !first.undo && !head.undo_on.applies(State::Cancelled, false));
            match head.state {
                State::Cancelled if without && head.undoable && head.undone_by.is_none() => {
                    let why = "the task was cancelled without undo; ask for its undo, which is a task of its own";
                    return Err(ControlRefused::WrongState(why.to_owned()));
                }
                State::Running if without && head.phase == Phase::Forward => {
                    let why = "the task is being cancelled without undo; when that is done, ask for its undo";
                    return Err(ControlRefused::WrongState(why.to_owned()));
                }
                State::Cancelled => return Ok(None),
                State::Completed | State::Failed => {
                    return Err(ControlRefused::WrongState(format!("the task is {} already", head.state)));
                }
                State::Running if head.cancel.is_some() => return Ok(None),
                // It is being undone already; what is below it still has to end.
                _ if head.phase == Phase::Compensating => {
                    if head.cancel.is_some() {
                        return Ok(None);
                    }
                    events.push(NewEvent::new(
                        "task.cancel_requested",
                        json!({"by": cancel.by, "reason": cancel.reason}),
                    ));
                    head.cancel = Some(cancel);
                }
                State::Running => {
                    events.push(NewEvent::new(
                        "task.cancel_requested",
                        json!({"by": cancel.by, "reason": cancel.reason}),
                    ));
                    head.cancel = Some(cancel);
                }
                State::Pending | State::Waiting => {
                    let error = cancel_error(&cancel);
                    head.cancel = Some(cancel);
                    let ending = head.end(State::Cancelled, error, now);
                    events.push(ending.event);
                    records.extend(ending.record);
                }
            }
        }
        Action::Resume => match head.state {
            State::Failed | State::Cancelled => {
                if let Some(undone) = head.undo_of {
                    let why = format!("it undoes task {undone}; ask for the undo of that one again");
                    return Err(ControlRefused::WrongState(why));
                }
                if let Some(undo) = head.undone_by {
                    let why = format!("task {undo} undoes what it did; submit it again instead");
                    return Err(ControlRefused::WrongState(why));
                }
                if head.past_deadline(now) {
                    return Err(ControlRefused::WrongState(
                        "the task's deadline has passed; submit it again with a new one".to_owned(),
                    ));
                }
                head.enqueue(head.run_at, now);
                head.cancel = None;
                head.error = None;
                head.finished_at = None;
                head.attempts = 0;
                head.crashes = 0;
                records.push(Record::Reopened { resumed: true });
                events.push(NewEvent::new("task.resumed", json!({"by": control.by})));
            }
            State::Completed => return Ok(None),
            _ if head.phase == Phase::Compensating => {
                let why = "what the task did is being undone; resume it when that has ended";
                return Err(ControlRefused::WrongState(why.to_owned()));
            }
            _ if head.cancel.is_some() => {
                let why = "the task is being cancelled; resume it when that has ended";
                return Err(ControlRefused::WrongState(why.to_owned()));
            }
            _ => return Ok(None),
        },
        Action::Priority(value) => {
            let priority = Priority::new(*value)
                .ok_or_else(|| Invalid::new("priority", format!("is {value}; it must be 0 to 9")))?;
            if head.state.is_final() {
                return Err(ControlRefused::WrongState(format!("the task is {} already", head.state)));
            }
            if head.priority == priority.get() {
                return Ok(None);
            }
            let steps = i64::from(head.priority) - i64::from(priority.get());
            head.rank = head.rank.saturating_add(ageing_micros.saturating_mul(steps));
            events.push(NewEvent::new(
                "task.priority_changed",
                json!({"from": head.priority, "to": priority.get(), "by": control.by}),
            ));
            head.priority = priority.get();
        }
        Action::Decide { step, decision, reason } => {
            let waits = head.state == State::Waiting
                && head.waiting.as_ref().is_some_and(|waiting| waiting.kind == "in_doubt" && waiting.id == *step);
            if !waits {
                return Err(ControlRefused::WrongState(format!("step '{step}' is not waiting for a decision")));
            }
            head.enqueue(None, now);
            events.push(NewEvent::of_step(
                "step.decided",
                step,
                json!({"decision": decision.name(), "by": control.by, "reason": reason}),
            ));
            records.push(Record::Decided {
                step: step.clone(),
                decision: decision.clone(),
                by: control.by.clone(),
                reason: reason.clone(),
            });
        }
        Action::Signal { name, message, id, .. } => {
            check_signal(name)?;
            if message.get().len() > MAX_MESSAGE_BYTES {
                let problem =
                    format!("has {} bytes; at most {MAX_MESSAGE_BYTES} are accepted", message.get().len());
                return Err(Invalid::new("message", problem).into());
            }
            if head.state.is_final() {
                return Err(ControlRefused::WrongState(format!("the task is {} already", head.state)));
            }
            let event = NewEvent::new("signal.received", json!({"name": name, "by": control.by}));
            let at = format!("{SIGNAL}{name}");
            let arrived = Record::Arrived { at, message: message.clone(), id: Some(*id) };
            return Ok(Some(arrive_all(&head, vec![(arrived, event)], now)));
        }
        Action::Patch { .. } if head.state.is_final() => {
            let why = format!("the task is {} already, and its state is what it ended with", head.state);
            return Err(ControlRefused::WrongState(why));
        }
        Action::Patch { .. } | Action::Answer { .. } | Action::Approve { .. } => {}
        Action::Delete => {
            if !head.state.is_final() {
                return Err(ControlRefused::WrongState(format!(
                    "the task is {}; cancel it first, then delete it",
                    head.state
                )));
            }
            if head.untold {
                return Err(ControlRefused::WrongState(
                    "its parent has not been told yet how it ended; try again in a moment".to_owned(),
                ));
            }
        }
    }
    Ok(Some(Change { entry: LogEntry::new(&events, &records), head }))
}

/// Whether these records, as they are stored, have what arrived under this id.
pub(crate) fn has_arrived(records: &str, id: Uuid) -> bool {
    let records: Vec<Record> = serde_json::from_str(records).unwrap_or_default();
    records.iter().any(|record| matches!(record, Record::Arrived { id: Some(known), .. } if *known == id))
}

/// What arriving at a task's address does: it is in the log, for good, and a task that waits goes on.
pub(crate) fn arrive(head: &Head, at: String, message: Box<RawValue>, event: NewEvent, now: i64) -> Change {
    arrive_all(head, vec![(Record::Arrived { at, message, id: None }, event)], now)
}

/// As [`arrive`], for several at once.
pub(crate) fn arrive_all(head: &Head, arrived: Vec<(Record, NewEvent)>, now: i64) -> Change {
    let mut head = head.clone();
    if head.state == State::Waiting {
        head.enqueue(None, now);
    }
    let (records, events): (Vec<Record>, Vec<NewEvent>) = arrived.into_iter().unzip();
    Change { entry: LogEntry::new(&events, &records), head }
}

/// How a child ended, as it arrives at its parent.
pub(crate) fn child_ended(child: TaskId, ended: &ChildEnded) -> (Record, NewEvent) {
    let event = NewEvent::new("child.ended", json!({"child": child, "state": ended.state}));
    // Made of types that always serialise.
    let message = to_raw_value(ended).unwrap_or_else(|_| RawValue::NULL.to_owned());
    (Record::Arrived { at: format!("{CHILD}{child}"), message, id: None }, event)
}

fn progress(head: &Head, status: &str, message: &str, now: i64) -> NewEvent {
    NewEvent::new(
        "progress",
        json!({
            "task_id": head.id, "step": 0, "total_step": 0, "status": status, "message": message,
            "time": timestamp(now),
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(state: State) -> Head {
        Head {
            id: TaskId::new(),
            tenant: "default".into(),
            queue: "default".into(),
            deadline: None,
            priority: 5,
            rank: 0,
            state,
            phase: Phase::Forward,
            ready: state == State::Pending,
            due_at: None,
            run_at: None,
            parked: None,
            holds: None,
            fence: 1,
            last_seq: 2,
            attempts: 0,
            crashes: 0,
            cancel: None,
            waiting: None,
            error: None,
            finished_at: None,
            undoable: false,
            undo_on: UndoOn::default(),
            untold: false,
            undo_of: None,
            undone_by: None,
        }
    }

    fn ask(action: Action) -> Control {
        Control { tenant: "default".into(), task: TaskId::new(), by: "ann".into(), action }
    }

    #[test]
    fn the_fifth_lost_lease_without_a_recorded_step_is_poison() {
        let mut task = head(State::Running);
        for crash in 1..MAX_CRASHES {
            task = lease_lost(&task, 0).head;
            assert_eq!((task.state, task.crashes), (State::Pending, crash));
            task.state = State::Running;
        }
        let task = lease_lost(&task, 0).head;
        assert_eq!(task.state, State::Failed);
        assert_eq!(task.error.expect("says why").code, "poison");
    }

    #[test]
    fn a_cancelled_task_whose_worker_died_is_cancelled_not_run_again() {
        let mut task = head(State::Running);
        task.cancel = Some(Cancel { undo: false, by: "ann".into(), reason: None });
        assert_eq!(lease_lost(&task, 0).head.state, State::Cancelled);
    }

    #[test]
    fn what_is_not_to_be_undone_ends_at_once() {
        let never = UndoOn { failed: false, cancelled: false };
        for (undo_on, asked, undone) in
            [(never, false, false), (never, true, true), (UndoOn::default(), false, true)]
        {
            let mut task = head(State::Running);
            (task.undoable, task.undo_on) = (true, undo_on);
            task.cancel = Some(Cancel { undo: asked, by: "ann".into(), reason: None });
            let ended = lease_lost(&task, 0).head;
            let compensating = ended.phase == Phase::Compensating;
            assert_eq!((compensating, ended.state == State::Cancelled), (undone, !undone));
        }
    }

    #[test]
    fn a_deadline_ends_a_task_in_the_queue_and_while_waiting_but_leaves_a_running_one_its_grace() {
        for state in [State::Pending, State::Waiting] {
            let mut task = head(state);
            task.deadline = Some(10);
            assert!(due(&task, 9).is_none());
            let ended = due(&task, 10).expect("due").head;
            assert_eq!(
                (ended.state, ended.error.expect("says why").code.as_str()),
                (State::Failed, "deadline_exceeded")
            );
        }
        let mut task = head(State::Running);
        task.deadline = Some(10);
        assert!(due(&task, 11).is_none());
        let ended = due(&task, 10 + DEADLINE_GRACE).expect("due").head;
        assert_eq!((ended.state, ended.fence), (State::Failed, 2));
    }

    #[test]
    fn resume_opens_failed_and_cancelled_tasks_and_leaves_all_others_alone() {
        for state in State::ALL {
            let change = control(&head(state), &ask(Action::Resume), 0, 0).expect("never an error");
            let opens = matches!(state, State::Failed | State::Cancelled);
            assert_eq!(change.map(|change| change.head.state), opens.then_some(State::Pending));
        }
    }

    #[test]
    fn a_decision_is_taken_only_for_the_step_in_doubt() {
        let mut task = head(State::Waiting);
        task.waiting = Some(Waiting { kind: "in_doubt".into(), id: "pay".into(), since: None, until: None });
        let decide = |step: &str| {
            ask(Action::Decide { step: step.into(), decision: crate::record::Decision::Retry, reason: None })
        };
        assert!(control(&task, &decide("other"), 0, 0).is_err());
        let change = control(&task, &decide("pay"), 0, 0).expect("allowed").expect("changes");
        assert_eq!(change.head.state, State::Pending);
    }

    #[test]
    fn a_suspect_runs_only_where_nothing_else_runs() {
        let candidate = |rank, crashes| Candidate {
            id: TaskId::new(),
            rank,
            tenant: "t".into(),
            queue: "q".into(),
            concurrency_key: None,
            crashes,
        };
        let candidates = [candidate(1, 0), candidate(2, SUSPECT_CRASHES), candidate(3, 0)];
        let busy = admit(&candidates, &mut BTreeMap::new(), 10, false);
        assert_eq!(busy.take.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 2]);
        assert!(busy.suspect_waits);
        let idle = admit(&candidates, &mut BTreeMap::new(), 10, true);
        assert_eq!(idle.take.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1]);
    }

    proptest! {
        #[test]
        fn admission_never_exceeds_a_limit_and_takes_all_it_may(
            keys in proptest::collection::vec(proptest::option::of(0u8..3), 0..40),
            max_queue in 0u32..20, max_key in 0u32..5, max in 0usize..40,
        ) {
            let candidates: Vec<Candidate> = keys.iter().enumerate().map(|(index, key)| Candidate {
                id: TaskId::new(), rank: index as i64, tenant: "t".into(), queue: "q".into(),
                concurrency_key: key.map(|key| key.to_string()), crashes: 0,
            }).collect();
            let mut limits: BTreeMap<String, Limit> =
                (0..3).map(|key| (key_limit("t", &key.to_string()), Limit { max: max_key, running: 0 })).collect();
            limits.insert(queue_limit("q"), Limit { max: max_queue, running: 0 });
            let admission = admit(&candidates, &mut limits, max, false);
            for limit in limits.values() {
                prop_assert!(limit.running <= limit.max);
            }
            let taken = admission.take.len();
            prop_assert!(taken <= max);
            if taken < max {
                prop_assert_eq!(taken + admission.park.len(), candidates.len(), "nothing is left undecided");
            }
            for (index, name) in &admission.park {
                prop_assert!(candidates[*index].limits().contains(name));
                prop_assert_eq!(limits[name].running, limits[name].max, "parked only on a full limit");
            }
        }
    }
}
