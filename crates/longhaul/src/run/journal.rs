//! The journal: a task's records, read back for replay. No I/O.
//!
//! A name stands for one operation in one part of the journal; a checkpoint begins a new part.
//! Each recorded outcome has an order, which is the order in which it is given to the handler
//! again. What arrives from outside has a place in the same order: it is given to the first
//! operation that waits at its address.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use serde_json::value::RawValue;
use uuid::Uuid;

use super::child::{CHILD, ChildEnded};
use super::order::{self, Order};
use crate::error::TaskError;
use crate::event::LogRow;
use crate::record::{Decision, Effect, Op, Record, decided_to_have_failed};
use crate::state::{AgentState, StateChange};
use crate::store::locks::News;
use crate::task::{State, TaskId};

mod legacy;
mod told;

pub(crate) use legacy::{prefix, to_undo};
use told::Told;

/// Which operation: the part of the journal and the name in it.
pub(super) type Key = (u32, String);

/// What arrived and was not given to the handler when a checkpoint was taken: address and message.
pub(super) type Kept = Vec<(String, Box<RawValue>)>;

/// Where grants of locks arrive.
pub(crate) const LOCK: &str = "lock/";
/// Where decisions on approvals arrive.
pub(crate) const APPROVAL: &str = "approval/";

/// Where the decision on an approval of this name arrives.
fn approval_address(part: u32, step: &str) -> String {
    format!("{APPROVAL}{part}/{step}")
}

/// What the undo of a step is called, in whichever part of the journal it is recorded.
pub(super) fn undo_name((part, step): &Key) -> String {
    if *part == 0 { format!("undo {step}") } else { format!("undo {part}/{step}") }
}

/// What was recorded of an operation that ended.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    pub(super) order: Order,
    pub(super) op: Option<Op>,
    pub(super) outcome: Result<Box<RawValue>, TaskError>,
}

/// What is known of an operation that has not ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Unfinished {
    /// Tries that failed or were begun.
    pub(super) tries: u32,
    /// The effect may have happened: why that is not known.
    pub(super) doubt: Option<TaskError>,
    /// A wait that began: until when, and what others call it by.
    pub(super) wait: Option<(Option<i64>, Option<String>)>,
    /// It can be undone once it is known to have happened.
    pub(super) undoable: bool,
    /// It was decided to give it up; until the task is opened again nobody is asked.
    given_up: bool,
}

/// Something that came from outside.
#[derive(Clone, Debug)]
struct Arrival {
    order: Order,
    message: Box<RawValue>,
    /// How often the task had been opened again before it came.
    opened: u32,
}

/// What a record changed for operations that are under way.
#[derive(Debug)]
pub(super) enum Touched {
    /// This one ended.
    Ended(Key),
    /// Something arrived at this address.
    Arrived(String),
    /// It is no longer in doubt whether the effect of this one happened.
    Undoubted(Key),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// What was taken in and not looked at yet.
    touched: Vec<Touched>,
    recorded: HashMap<Key, Recorded>,
    unfinished: HashMap<Key, Unfinished>,
    /// The part that new records belong to.
    part: u32,
    /// The order of the newest record, and how many were taken in.
    order: Order,
    taken: u64,
    /// What was read and not taken in yet, each with the number of its row's first event.
    read: Vec<(u64, Record)>,
    /// Progress that was told since something was recorded last.
    told: Told,
    /// Changes of the state not yet visible to the handler, with their order.
    patches: VecDeque<(Order, StateChange, u64)>,
    state: AgentState,
    state_version: u64,
    /// The state was begun, as far as the handler knows.
    state_begun: bool,
    /// What came from outside and was not given to the handler yet, by address.
    arrivals: HashMap<String, VecDeque<Arrival>>,
    /// The ids of what came with one.
    known_ids: HashSet<Uuid>,
    /// Where each part begins, and what had arrived and was not given to the handler then.
    checkpoints: HashMap<u32, (Order, Kept)>,
    /// The past before a checkpoint was not read.
    began_late: bool,
    /// Steps that were completed, can be undone and were not, with their results, by the order of
    /// their completion.
    undoable: BTreeMap<Order, (Key, Box<RawValue>)>,
    /// Completed steps whose effect stays, because nothing says how to undo it.
    lasting: Vec<String>,
    /// Steps that were undone, in that order, until a resume lets them start again.
    undone: Vec<Key>,
    /// How often a step was undone and may start again: its keys are new each time.
    generations: HashMap<Key, u32>,
    /// What is here up to now is another task's, which this one undoes by request.
    undo_of: Option<TaskId>,
    /// The task will end so; it only undoes what it did.
    undoing: Option<(State, TaskError)>,
    /// How often the task was opened again, and whether that was by request.
    opened: u32,
    resumed: bool,
    /// The task may hold locks.
    locked: bool,
    /// The number of the newest event that was read.
    seen: u64,
}

impl Journal {
    /// Reads rows of the log, in order; [`Journal::take_read`] takes them in. A row that was read
    /// before is passed over.
    pub(super) fn read(&mut self, rows: &[LogRow]) -> Result<(), TaskError> {
        for row in rows {
            if row.last_seq() <= self.seen {
                continue;
            }
            let first = self.read.len();
            self.read.extend(order::numbered(row)?);
            self.told.read(row, self.read[first..].iter().map(|(_, record)| record));
            self.seen = self.seen.max(row.last_seq());
        }
        Ok(())
    }

    /// Takes in what was read, in the order in which it is given.
    pub(super) fn take_read(&mut self) {
        let mut records = std::mem::take(&mut self.read);
        order::sort(&mut records);
        for (seq, record) in records {
            self.take(seq, record);
        }
    }

    /// Takes in one record of the row that begins with event `seq`; gives its order.
    pub(super) fn take(&mut self, seq: u64, record: Record) -> Order {
        self.taken += 1;
        self.order = Order::of(&record, seq, self.taken);
        let part = self.part;
        match record {
            Record::Input(_) => {}
            Record::Intent { step, attempt, undoable } => {
                let entry = self.unfinished.entry((part, step)).or_default();
                entry.tries = attempt;
                entry.undoable = undoable;
                entry.doubt =
                    Some(TaskError::in_doubt("interrupted", "the worker was lost while the effect was under way"));
            }
            Record::Done { step, op, effect, result, undoable, .. } => {
                if op == Op::Approval {
                    self.arrivals.remove(&approval_address(part, &step));
                }
                if undoable {
                    self.undoable.insert(self.order, ((part, step.clone()), result.clone()));
                } else if op == Op::Step && effect.needs_intent() {
                    self.lasting.push(step.clone());
                }
                self.end((part, step), Some(op), Ok(result));
            }
            Record::Failed { step, attempt, last: false, .. } => {
                let entry = self.unfinished.entry((part, step)).or_default();
                (entry.tries, entry.doubt) = (attempt, None);
            }
            Record::Failed { step, error, last: true, .. } => {
                // An approval that was given and not used in its time is none.
                self.arrivals.remove(&approval_address(part, &step));
                self.end((part, step), None, Err(error));
            }
            Record::InDoubt { step, attempt, error, .. } => {
                let entry = self.unfinished.entry((part, step)).or_default();
                (entry.tries, entry.doubt) = (attempt, Some(error));
            }
            Record::Decided { step, decision, reason, .. } => self.decide(self.in_doubt(step), decision, reason),
            Record::Patched { patch, version } => {
                self.patches.push_back((self.order, StateChange::Patch(patch), version));
            }
            Record::StateBegun { state, version } => {
                self.patches.push_back((self.order, StateChange::Begin(state), version));
            }
            Record::Checkpoint { part, kept } => {
                self.part = part;
                self.checkpoints.insert(part, (self.order, kept));
            }
            Record::Reopened { resumed } => self.reopen(resumed),
            Record::Wait { step, until, id, .. } => {
                self.unfinished.entry((part, step)).or_default().wait = Some((until, id));
            }
            Record::Arrived { at, message, id } => {
                if id.is_none_or(|id| self.known_ids.insert(id)) {
                    self.arrive(at, message);
                }
            }
            Record::Undoing { state, error } => self.undoing = Some((state, error)),
            Record::UndoOf { task } => self.undo_other(task),
            Record::Undone { part, step } => {
                let key = (part, step);
                self.undoable.retain(|_, (known, _)| *known != key);
                self.undone.push(key);
            }
            Record::Withdrawn { part, step } => {
                self.unfinished.remove(&(part, step));
            }
            Record::Earlier { part, record } => {
                let newest = std::mem::replace(&mut self.part, part);
                self.take(seq, *record);
                self.part = newest;
            }
            Record::Inherited { part, step, op, result } => self.end((part, step), Some(op), Ok(result)),
        }
        self.order
    }

    fn end(&mut self, key: Key, op: Option<Op>, outcome: Result<Box<RawValue>, TaskError>) {
        self.unfinished.remove(&key);
        self.touched.push(Touched::Ended(key.clone()));
        self.recorded.insert(key, Recorded { order: self.order, op, outcome });
    }

    fn reopen(&mut self, resumed: bool) {
        self.opened += 1;
        self.recorded.retain(|_, recorded| recorded.outcome.is_ok());
        for unfinished in self.unfinished.values_mut() {
            unfinished.tries = 0;
            unfinished.given_up = false;
        }
        // A lock that was not given is asked for again; one that was stays the task's own.
        for (_, arrivals) in self.arrivals.iter_mut().filter(|(at, _)| at.starts_with(LOCK)) {
            arrivals.retain(|arrival| !News::refuses(&arrival.message));
        }
        if !resumed {
            return;
        }
        self.resumed = true;
        self.undoing = None;
        for key in std::mem::take(&mut self.undone) {
            self.recorded.remove(&key);
            *self.generations.entry(key).or_default() += 1;
        }
        // An approval was for the run it was given to.
        self.recorded.retain(|_, recorded| !matches!(recorded.op, Some(Op::Undo | Op::Approval)));
        // How children ended is told again, to every task that is resumed: one that failed may have
        // been resumed since.
        let completed = |arrival: &Arrival| {
            let ended = serde_json::from_str::<ChildEnded>(arrival.message.get());
            ended.is_ok_and(|ended| ended.state == State::Completed)
        };
        for (_, arrivals) in self.arrivals.iter_mut().filter(|(at, _)| at.starts_with(CHILD)) {
            arrivals.retain(completed);
        }
        self.arrivals.retain(|_, arrivals| !arrivals.is_empty());
        // Locks ended with the task.
        self.arrivals.retain(|at, _| !at.starts_with(APPROVAL) && !at.starts_with(LOCK));
        self.unfinished.retain(|_, unfinished| unfinished.wait.is_none());
    }

    /// What was recorded so far is another task's: its undos that failed are tried again, and what it
    /// undid itself is not this one's.
    fn undo_other(&mut self, task: TaskId) {
        self.undo_of = Some(task);
        self.undone.clear();
        let undos: HashSet<String> = self.undoable_keys().map(undo_name).collect();
        self.recorded.retain(|(_, name), recorded| recorded.outcome.is_ok() || !undos.contains(name));
        self.unfinished.retain(|(_, name), _| !undos.contains(name));
    }

    fn arrive(&mut self, at: String, message: Box<RawValue>) {
        let opened = self.opened;
        self.locked |= at.starts_with(LOCK);
        let arrivals = self.arrivals.entry(at.clone()).or_default();
        if let Some(last) = arrivals.back().filter(|_| at.starts_with(CHILD)) {
            if last.message.get() == message.get() {
                // Told again, because the parent had ended when it was told first.
                return;
            }
            if last.opened < opened {
                // It was resumed after its parent was: how it ended before no longer counts.
                arrivals.clear();
            }
        }
        arrivals.push_back(Arrival { order: self.order, message, opened });
        self.touched.push(Touched::Arrived(at));
    }

    /// The order of what arrived first at an address.
    pub(super) fn arrived(&self, at: &str) -> Option<Order> {
        self.arrivals.get(at)?.front().map(|arrival| arrival.order)
    }

    /// Gives what arrived first at an address to the operation that waits there.
    pub(super) fn hand_over(&mut self, at: &str, key: &Key) -> Option<Box<RawValue>> {
        let arrivals = self.arrivals.get_mut(at)?;
        let arrival = arrivals.pop_front()?;
        if arrivals.is_empty() {
            self.arrivals.remove(at);
        }
        // Should it have been given up at the same time, what came first counts.
        self.recorded.remove(key);
        self.unfinished.remove(key);
        self.show_patches(arrival.order);
        Some(arrival.message)
    }

    /// What can be undone, the last completed first.
    pub(super) fn undoable(&self) -> Vec<(Key, Box<RawValue>)> {
        self.undoable.values().rev().cloned().collect()
    }

    /// Which steps can be undone.
    pub(super) fn undoable_keys(&self) -> impl Iterator<Item = &Key> {
        self.undoable.values().map(|(key, _)| key)
    }

    /// Whether anything has to be undone should the task fail, or may have to be.
    pub(super) fn has_undoable(&self) -> bool {
        !self.undoable.is_empty() || self.doubtful().any(|(_, unfinished)| unfinished.undoable)
    }

    /// The names of steps that were undone.
    pub(super) fn undone(&self) -> Vec<String> {
        self.undone.iter().map(|(_, name)| name.clone()).collect()
    }

    /// The names of completed steps whose effect stays, because nothing says how to undo it.
    pub(super) fn lasting(&self) -> Vec<String> {
        self.lasting.clone()
    }

    /// Steps of which it is not known whether they happened.
    pub(super) fn doubts(&self) -> Vec<Key> {
        let mut keys: Vec<Key> = self.doubtful().map(|(key, _)| key.clone()).collect();
        keys.sort();
        keys
    }

    fn doubtful(&self) -> impl Iterator<Item = (&Key, &Unfinished)> {
        self.unfinished.iter().filter(|(_, unfinished)| unfinished.doubt.is_some() && !unfinished.given_up)
    }

    /// Whether the task may hold locks.
    pub(super) fn is_locked(&self) -> bool {
        self.locked
    }

    /// Whether the task was opened again by request.
    pub(super) fn was_resumed(&self) -> bool {
        self.resumed
    }

    /// The task that this one undoes by request.
    pub(super) fn undo_of(&self) -> Option<TaskId> {
        self.undo_of
    }

    /// How the task will end after undoing, once that was begun.
    pub(super) fn undoing(&self) -> Option<&(State, TaskError)> {
        self.undoing.as_ref()
    }

    /// How often the step was undone and let start again.
    pub(super) fn generation(&self, key: &Key) -> u32 {
        self.generations.get(key).copied().unwrap_or(0)
    }

    /// The step of this name that is in doubt; the newest, if several are.
    fn in_doubt(&self, step: String) -> Key {
        let doubtful =
            self.unfinished.iter().filter(|((_, name), unfinished)| *name == step && unfinished.doubt.is_some());
        let part = doubtful.map(|((part, _), _)| *part).max().unwrap_or(self.part);
        (part, step)
    }

    fn decide(&mut self, key: Key, decision: Decision, reason: Option<String>) {
        match decision {
            Decision::Retry => {
                if let Some(unfinished) = self.unfinished.get_mut(&key) {
                    unfinished.doubt = None;
                    // A person asked for this try; it does not count against the policy.
                    unfinished.tries = 0;
                }
                self.touched.push(Touched::Undoubted(key));
            }
            Decision::Done(result) => {
                if self.unfinished.get(&key).is_some_and(|unfinished| unfinished.undoable) {
                    self.undoable.insert(self.order, (key.clone(), result.clone()));
                } else {
                    self.lasting.push(key.1.clone());
                }
                self.end(key, Some(Op::Step), Ok(result));
            }
            Decision::Fail => {
                let unfinished = self.unfinished.get(&key).cloned().unwrap_or_default();
                let doubt = unfinished.doubt.clone();
                let mut error = decided_to_have_failed(&key.1, reason.as_deref()).detail("step", key.1.clone());
                if let Some(doubt) = &doubt {
                    error = error.caused_by(doubt.clone());
                }
                self.end(key.clone(), None, Err(error));
                // It is still not known whether the effect happened: should the task be opened
                // again, the question comes back.
                self.unfinished.insert(key, Unfinished { tries: 0, given_up: true, ..unfinished });
            }
        }
    }

    /// What was taken in since this was asked last.
    pub(super) fn take_touched(&mut self) -> Vec<Touched> {
        std::mem::take(&mut self.touched)
    }

    /// What was recorded of an operation.
    pub(super) fn recorded(&self, key: &Key) -> Option<&Recorded> {
        self.recorded.get(key)
    }

    /// What is known of an operation that has not ended.
    pub(super) fn unfinished(&self, key: &Key) -> Unfinished {
        self.unfinished.get(key).cloned().unwrap_or_default()
    }

    /// Gives an outcome to the handler: it is no longer kept here, and patches up to it become
    /// visible.
    pub(super) fn release(&mut self, key: &Key) -> Option<Recorded> {
        let recorded = self.recorded.remove(key)?;
        self.show_patches(recorded.order);
        Some(recorded)
    }

    /// Whether every recorded outcome was given to the handler.
    pub(super) fn is_used_up(&self) -> bool {
        self.recorded.is_empty()
    }

    /// Recorded names that no one asked for.
    pub(super) fn unused(&self) -> impl Iterator<Item = &Key> {
        self.recorded.keys()
    }

    /// Makes patches up to `order` visible.
    pub(super) fn show_patches(&mut self, order: Order) {
        while self.patches.front().is_some_and(|(at, ..)| *at <= order) {
            if let Some((_, change, version)) = self.patches.pop_front() {
                self.state.change(&change);
                self.state_version = version;
                self.state_begun |= matches!(change, StateChange::Begin(_));
            }
        }
    }

    /// Whether the state was begun. When the past was not read, one that there is was.
    pub(super) fn has_begun_state(&self) -> bool {
        self.state_begun || (self.began_late && self.state_version > 0)
    }

    /// Whether progress was told by a run before, since something was recorded last; asked for once
    /// for each time it was told.
    pub(super) fn told_before(&mut self, progress: &serde_json::Value) -> bool {
        self.told.take(progress)
    }

    /// The state as the handler may see it now.
    pub(super) fn state(&self) -> (u64, &AgentState) {
        (self.state_version, &self.state)
    }

    /// The version the next patch will have.
    pub(super) fn next_state_version(&self) -> u64 {
        self.patches.back().map_or(self.state_version, |(_, _, version)| *version) + 1
    }

    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// A commit of this run was accepted up to event `seq`.
    pub(super) fn saw(&mut self, seq: u64) {
        self.seen = self.seen.max(seq);
    }

    /// Goes on from a checkpoint: everything up to its part is forgotten.
    pub(super) fn skip_to(&mut self, part: u32) {
        self.recorded.retain(|(of, _), _| *of >= part);
        self.unfinished.retain(|(of, _), _| *of >= part);
    }

    /// What had arrived before a checkpoint is as it was then: what was given to the handler is not
    /// given again.
    pub(super) fn restore_arrivals(&mut self, part: u32) {
        let Some((at, kept)) = self.checkpoints.get(&part).cloned() else { return };
        for arrivals in self.arrivals.values_mut() {
            arrivals.retain(|arrival| arrival.order > at);
        }
        self.arrivals.retain(|_, arrivals| !arrivals.is_empty());
        self.keep(kept);
        self.show_patches(at);
    }

    /// Puts what was kept by a checkpoint before everything that came later.
    fn keep(&mut self, kept: Kept) {
        for (number, (at, message)) in kept.into_iter().enumerate().rev() {
            let arrival = Arrival { order: Order::kept(number as u64), message, opened: 0 };
            self.arrivals.entry(at).or_default().push_front(arrival);
        }
    }

    /// What arrived and was not given to the handler, in its order.
    pub(super) fn kept(&self) -> Kept {
        let all =
            self.arrivals.iter().flat_map(|(at, arrivals)| arrivals.iter().map(move |arrival| (at, arrival)));
        let mut all: Vec<(&String, &Arrival)> = all.collect();
        all.sort_by_key(|(_, arrival)| arrival.order);
        all.into_iter().map(|(at, arrival)| (at.clone(), arrival.message.clone())).collect()
    }

    /// Whether the past before a checkpoint was not read.
    pub(super) fn began_late(&self) -> bool {
        self.began_late
    }

    /// Begins with a part in the middle of the log, whose past is not read.
    pub(super) fn begin_at(&mut self, part: u32, seq: u64, kept: Kept, state: Option<(u64, AgentState)>) {
        self.part = part;
        self.seen = seq;
        self.began_late = true;
        self.keep(kept);
        if let Some((version, state)) = state {
            (self.state_version, self.state) = (version, state);
        }
    }

    /// The newest part begun so far.
    pub(super) fn newest_part(&self) -> u32 {
        self.part
    }
}

/// The effect class that decides whether an interrupted try is in doubt.
pub(super) fn doubtful(effect: Effect, unfinished: &Unfinished) -> Option<TaskError> {
    unfinished.doubt.clone().filter(|_| effect.needs_intent())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(step: &str) -> Record {
        Record::Done {
            step: step.into(),
            op: Op::Step,
            effect: Effect::Read,
            attempt: 1,
            started: 0,
            result: RawValue::NULL.to_owned(),
            undoable: false,
            given_after: None,
        }
    }

    fn failed(step: &str, attempt: u32, last: bool) -> Record {
        let error = TaskError::retryable("e", "e");
        Record::Failed { step: step.into(), effect: Effect::Read, attempt, started: 0, last, error }
    }

    fn key(name: &str) -> Key {
        (0, name.to_owned())
    }

    #[test]
    fn a_new_attempt_forgets_failures_and_keeps_successes() {
        let mut journal = Journal::default();
        journal.take(0, done("a"));
        journal.take(0, failed("b", 3, true));
        assert!(journal.recorded(&key("b")).is_some());
        journal.take(0, Record::Reopened { resumed: false });
        assert!(journal.recorded(&key("a")).is_some());
        assert!(journal.recorded(&key("b")).is_none());
    }

    #[test]
    fn tries_are_counted_over_crashes() {
        let mut journal = Journal::default();
        journal.take(0, failed("a", 1, false));
        journal.take(0, failed("a", 2, false));
        assert_eq!(journal.unfinished(&key("a")).tries, 2);
    }

    #[test]
    fn an_intent_without_a_record_is_in_doubt_until_decided() {
        let mut journal = Journal::default();
        journal.take(0, Record::Intent { step: "pay".into(), attempt: 1, undoable: false });
        assert!(doubtful(Effect::Irreversible, &journal.unfinished(&key("pay"))).is_some());
        assert!(doubtful(Effect::Idempotent, &journal.unfinished(&key("pay"))).is_none());
        let decide = |decision| Record::Decided { step: "pay".into(), decision, by: "ann".into(), reason: None };
        journal.take(0, decide(Decision::Retry));
        assert!(journal.unfinished(&key("pay")).doubt.is_none());
        journal.take(0, Record::Intent { step: "pay".into(), attempt: 1, undoable: false });
        journal.take(0, decide(Decision::Fail));
        let recorded = journal.recorded(&key("pay")).expect("decided");
        let error = recorded.outcome.as_ref().expect_err("failed");
        assert!(error.message.contains("'pay'"), "it names the step: {error}");
        assert_eq!(error.cause.as_ref().expect("the doubt").code, "interrupted");
        journal.take(0, Record::Reopened { resumed: false });
        assert!(journal.unfinished(&key("pay")).doubt.is_some(), "opened again, it is in doubt again");
    }

    #[test]
    fn what_comes_twice_under_one_id_is_given_once() {
        let mut journal = Journal::default();
        let arrived = |id| Record::Arrived { at: "signal/go".into(), message: RawValue::NULL.to_owned(), id };
        let (one, two) = (Some(Uuid::now_v7()), Some(Uuid::now_v7()));
        for id in [one, one, two, None, None, one] {
            journal.take(0, arrived(id));
        }
        let given = std::iter::from_fn(|| journal.hand_over("signal/go", &key("signal go")));
        assert_eq!(given.count(), 4);
    }

    #[test]
    fn names_after_a_checkpoint_are_new_names() {
        let mut journal = Journal::default();
        journal.take(0, done("think"));
        journal.take(0, Record::Checkpoint { part: 1, kept: Vec::new() });
        assert!(journal.recorded(&(1, "think".into())).is_none());
        journal.take(0, done("think"));
        journal.skip_to(1);
        assert!(journal.recorded(&(0, "think".into())).is_none());
        assert!(journal.recorded(&(1, "think".into())).is_some());
    }
}
