//! The desk of a run: where a handler's operations ask, and are answered one at a time.
//!
//! Deterministic delivery: when the handler is pending, the recorded outcome with the lowest
//! order that it has asked for is released, and the handler is polled again before the next one.
//! Only when there is nothing to release may operations without a record start. So `join!` and
//! `select!` take the same branches live and in every replay.
//!
//! No I/O here; the driver (`driver.rs`) does what the desk says.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use serde_json::value::RawValue;

use super::StepContext;
pub(super) use super::journal::Unfinished;
use super::journal::{Journal, Key, Touched};
use super::line::Line;
use super::order::Order;
use super::outgoing::Outgoing;
use crate::error::TaskError;
use crate::event::{LogRow, NewEvent};
use crate::record::{Effect, Op, Record, UndoOn};
use crate::retry::RetryPolicy;
use crate::state::AgentState;
use crate::store::AskChange;
use crate::task::{TaskId, Waiting};

mod commit;
mod gather;

/// An operation that takes its place on the desk.
pub(super) struct Asking<'a> {
    pub(super) name: &'a str,
    /// Tells operations of one name apart that are under way at the same time.
    pub(super) key: Option<&'a str>,
    pub(super) op: Op,
    pub(super) effect: Effect,
    pub(super) address: Option<Address>,
    pub(super) undo: Option<Undo>,
}

/// Where what an operation waits for arrives.
pub(super) enum Address {
    /// Here, whichever operation waits.
    At(String),
    /// At a place of the operation's own, below this one.
    Own(&'static str),
}

impl<'a> Asking<'a> {
    /// One without an effect of its own.
    pub(super) fn plain(name: &'a str, op: Op) -> Self {
        Self { name, key: None, op, effect: Effect::Read, address: None, undo: None }
    }
}

/// The part of the journal that a checkpoint begins, and what it kept for it.
pub(super) struct Begun {
    pub(super) part: u32,
    pub(super) kept: Vec<(String, Box<RawValue>)>,
}

/// What an operation is told when its turn has come.
pub(super) enum Turn {
    /// It was recorded; this is its outcome.
    Recorded(Result<Box<RawValue>, TaskError>),
    /// It may start; this is known of earlier tries.
    Start(Unfinished),
}

/// What the driver has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Poll the handler again: something was released or started.
    Poll,
    /// Read the journal: an operation asked and it is not known what was recorded.
    Load,
    /// Write what was gathered.
    Commit,
    /// Write what was gathered if nothing else comes in a moment.
    CommitSoon,
    /// Nothing is under way but durable waits.
    Idle,
    /// Something is under way.
    Wait,
}

enum Stage {
    Asked,
    Granted,
    /// Under way; `effect` may not happen twice and must be recorded if at all possible.
    Working,
    /// Between two tries: no effect is under way.
    Resting,
    Waiting(Waiting),
    Released(Result<Box<RawValue>, TaskError>),
}

struct Ticket {
    base: String,
    op: Op,
    effect: Effect,
    /// Where what it waits for arrives.
    address: Option<String>,
    /// Its place among all that asked: of two that wait at one address, the first is served first.
    number: u64,
    undoable: bool,
    stage: Stage,
    waker: Option<Waker>,
}

impl Ticket {
    /// Whether it does something outside as soon as it starts. Other operations begin with something that is
    /// written, in one transaction with what the handler was given before.
    fn acts_at_once(&self, unfinished: &Unfinished) -> bool {
        match self.op {
            Op::Step => !self.effect.needs_intent() || unfinished.doubt.is_some(),
            Op::Lock | Op::Undo => true,
            Op::Publish | Op::Patch | Op::Sleep | Op::Signal | Op::Question | Op::Approval | Op::Join => false,
        }
    }
}

/// How to undo a step, given its result.
pub(super) struct Undo {
    pub(super) how: UndoHow,
    pub(super) policy: RetryPolicy,
    pub(super) timeout: Option<std::time::Duration>,
}

/// What undoes a step.
pub(super) enum UndoHow {
    /// A function of the handler's.
    Call(UndoWork),
    /// The step made tasks, and what they did is undone.
    Children,
}

pub(super) type UndoWork =
    Box<dyn FnMut(StepContext, &RawValue) -> Pin<Box<dyn Future<Output = Result<(), TaskError>> + Send>> + Send>;

/// See the module.
pub(super) struct Desk {
    task: TaskId,
    fence: u64,
    journal: Journal,
    loaded: bool,
    /// How often each name was used in this part of the journal.
    counts: HashMap<String, u32>,
    part: u32,
    tickets: HashMap<Key, Ticket>,
    /// The names of those, without their counts.
    names: HashSet<String>,
    line: Line,
    outgoing: Outgoing,
    /// What is in the commit under way, without what ends the run.
    committing: Outgoing,
    commit_under_way: bool,
    /// The commit under way suspends the run.
    suspending: bool,
    commits: u32,
    /// The number of the batch being gathered, and of the last one on disk.
    batch: u64,
    batches_done: u64,
    waiting_for_disk: Vec<(u64, Waker)>,
    /// The batch with the newest outcome that was given before it is on disk and must not be lost.
    given: u64,
    /// Everything recorded was given to the handler.
    live: bool,
    /// Something new was started: what the handler says from now on is new.
    begun: bool,
    /// Progress that was told before the journal was read.
    early: Vec<NewEvent>,
    /// Nothing new may start.
    closing: bool,
    /// Nothing forward is accepted any more.
    ended: bool,
    /// How to undo the steps that were asked for, in case they are completed.
    undos: HashMap<Key, Undo>,
    /// When they are undone without a request.
    pub(super) undo_on: UndoOn,
    /// What was done is being undone: only that is written.
    undoing: bool,
    asked: u64,
    /// Something has to know the journal before it goes on.
    wants_journal: bool,
    /// Operations that were dropped before they had their outcome.
    left: HashSet<Key>,
    /// The newest event of the task that an operation was told of.
    heard: u64,
    /// Questions and approvals whose operations are gone.
    dropped: Vec<(Key, Op)>,
    /// Approvals that the store found expired when they were to be used.
    expired: HashSet<String>,
}

impl Desk {
    pub(super) fn new(task: TaskId, fence: u64, undo_on: UndoOn) -> Self {
        Self {
            task,
            fence,
            journal: Journal::default(),
            loaded: false,
            counts: HashMap::new(),
            part: 0,
            tickets: HashMap::new(),
            names: HashSet::new(),
            line: Line::default(),
            outgoing: Outgoing::default(),
            committing: Outgoing::default(),
            commit_under_way: false,
            suspending: false,
            commits: 0,
            batch: 1,
            batches_done: 0,
            waiting_for_disk: Vec::new(),
            given: 0,
            live: false,
            begun: false,
            early: Vec::new(),
            closing: false,
            ended: false,
            undos: HashMap::new(),
            undo_on,
            undoing: false,
            asked: 0,
            wants_journal: false,
            left: HashSet::new(),
            heard: 0,
            dropped: Vec::new(),
            expired: HashSet::new(),
        }
    }

    // --- for operations ---

    /// Puts an operation on the desk. The name is made unique by its place in line, or by `key`.
    pub(super) fn ask(&mut self, asking: Asking<'_>) -> Result<Key, TaskError> {
        let Asking { name, key, op, effect, address, undo } = asking;
        let base = key.map_or_else(|| name.to_owned(), |key| format!("{name}:{key}"));
        if self.names.contains(&base) {
            return Err(TaskError::fatal(
                "ambiguous_step",
                format!("'{base}' is already under way; give each of them a .key(..) of its own"),
            )
            .detail("step", base));
        }
        let count = self.counts.entry(base.clone()).or_default();
        *count += 1;
        let full = if *count == 1 { base.clone() } else { format!("{base}#{count}") };
        let key = (self.part, full);
        let address = address.map(|address| match address {
            Address::At(address) => address,
            Address::Own(place) => format!("{place}{}/{}", key.0, key.1),
        });
        if let Some(recorded) = self.journal.recorded(&key).and_then(|recorded| recorded.op)
            && recorded != op
        {
            return Err(TaskError::fatal(
                "step_kind_changed",
                format!("'{}' was recorded as a {} and is now a {}", key.1, recorded.name(), op.name()),
            )
            .detail("step", key.1));
        }
        self.asked += 1;
        let (number, undoable) = (self.asked, undo.is_some());
        if let Some(undo) = undo {
            self.undos.insert(key.clone(), undo);
        }
        self.names.insert(base.clone());
        let ticket = Ticket { base, op, effect, address, number, undoable, stage: Stage::Asked, waker: None };
        self.put(key.clone(), ticket);
        Ok(key)
    }

    /// Puts a ticket in line.
    fn put(&mut self, key: Key, ticket: Ticket) {
        if let Some(address) = &ticket.address {
            self.line.wait_at(address, ticket.number, key.clone());
        }
        self.tickets.insert(key.clone(), ticket);
        self.line.may_start(key.clone());
        self.look(&key);
    }

    /// Puts an operation in line for what was recorded of it, and for what arrived where it waits.
    fn look(&mut self, key: &Key) {
        let Some(ticket) = self.tickets.get(key) else { return };
        if let Some(recorded) = self.journal.recorded(key) {
            self.line.push(recorded.order, ticket.number, key.clone());
        }
        if let Some(address) = ticket.address.clone() {
            self.look_at(&address);
        }
    }

    /// Puts the first that waits at an address in line for what arrived there.
    fn look_at(&mut self, address: &str) {
        let Some(order) = self.journal.arrived(address) else { return };
        let given =
            |key: &Key| self.tickets.get(key).is_none_or(|ticket| matches!(ticket.stage, Stage::Released(_)));
        let first = self.line.waiting_at(address).find(|(_, key)| !given(key));
        if let Some((number, key)) = first.map(|(number, key)| (number, key.clone())) {
            self.line.push(order, number, key);
        }
    }

    /// Looks at what the journal has taken in.
    fn look_at_news(&mut self) {
        for touched in self.journal.take_touched() {
            match touched {
                Touched::Ended(key) => self.look(&key),
                Touched::Arrived(address) => self.look_at(&address),
                Touched::Undoubted(key) => self.line.may_start(key),
            }
        }
    }

    /// Waits for the operation's turn.
    pub(super) fn poll_turn(&mut self, key: &Key, cx: &mut Context<'_>) -> Poll<Turn> {
        let unfinished = self.journal.unfinished(key);
        let Some(ticket) = self.tickets.get_mut(key) else { return Poll::Pending };
        match std::mem::replace(&mut ticket.stage, Stage::Working) {
            Stage::Released(outcome) => {
                // There may be more for it.
                self.look(key);
                Poll::Ready(Turn::Recorded(outcome))
            }
            Stage::Granted => Poll::Ready(Turn::Start(unfinished)),
            other => {
                ticket.stage = other;
                ticket.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The operation waits for something outside; nothing of it is under way. What it was given while it was on
    /// its way here stays with it.
    pub(super) fn wait(&mut self, key: &Key, waiting: Waiting) {
        let ticket = self.tickets.get_mut(key);
        if let Some(ticket) = ticket.filter(|ticket| !matches!(ticket.stage, Stage::Released(_))) {
            if waiting.kind == "in_doubt" {
                self.line.may_start(key.clone());
            }
            ticket.stage = Stage::Waiting(waiting);
        }
    }

    /// No effect of the operation is under way for a while.
    pub(super) fn rest(&mut self, key: &Key) {
        if let Some(ticket) = self.tickets.get_mut(key) {
            ticket.stage = Stage::Resting;
        }
    }

    /// An effect of the operation is about to start.
    pub(super) fn work(&mut self, key: &Key) {
        if let Some(ticket) = self.tickets.get_mut(key).filter(|ticket| matches!(ticket.stage, Stage::Resting)) {
            ticket.stage = Stage::Working;
        }
    }

    /// The operation's wait is over by itself: something of it is under way again.
    pub(super) fn stop_waiting(&mut self, key: &Key) {
        if let Some(ticket) = self.tickets.get_mut(key).filter(|ticket| matches!(ticket.stage, Stage::Waiting(_)))
        {
            ticket.stage = Stage::Working;
        }
    }

    /// The store told an operation that the log has grown to this number.
    pub(super) fn hear(&mut self, seq: u64) {
        self.heard = self.heard.max(seq);
    }

    /// The newest event that an operation was told of.
    pub(super) fn heard(&self) -> u64 {
        self.heard
    }

    /// Where what the operation waits for arrives.
    pub(super) fn address_of(&self, key: &Key) -> Option<String> {
        self.tickets.get(key)?.address.clone()
    }

    /// Puts an operation of a known name on the desk, while undoing.
    pub(super) fn ask_again(&mut self, key: &Key, op: Op) -> Result<(), TaskError> {
        if self.tickets.contains_key(key) {
            return Err(TaskError::fatal("ambiguous_step", format!("'{}' is already under way", key.1)));
        }
        self.asked += 1;
        let ticket = Ticket {
            base: key.1.clone(),
            op,
            effect: Effect::Idempotent,
            address: None,
            number: self.asked,
            undoable: false,
            stage: Stage::Asked,
            waker: None,
        };
        self.put(key.clone(), ticket);
        Ok(())
    }

    /// The operation is over, or was dropped.
    pub(super) fn leave(&mut self, key: &Key) {
        let ticket = self.tickets.remove(key);
        if let Some(ticket) = &ticket {
            self.names.remove(&ticket.base);
            if let Some(address) = &ticket.address {
                self.line.leave(address, ticket.number);
                self.look_at(address);
            }
        }
        let op = ticket.as_ref().map(|ticket| ticket.op);
        if let Some(op @ (Op::Question | Op::Approval)) = op {
            self.dropped.push((key.clone(), op));
        }
        let given = |ticket: Ticket| matches!(ticket.stage, Stage::Released(_) | Stage::Working | Stage::Resting);
        if !ticket.is_some_and(given) {
            self.left.insert(key.clone());
        }
    }

    /// Takes back what was asked of people by operations that are gone, once the handler has gone on
    /// without them. Those of a handler that ended or was dropped are not taken back: another run may
    /// ask for the same.
    fn take_back(&mut self) {
        if self.dropped.is_empty() || self.closing || !self.loaded {
            return;
        }
        let on_its_way = self.commit_under_way || !self.outgoing.records.is_empty();
        let mut later = Vec::new();
        for (key, op) in std::mem::take(&mut self.dropped) {
            match self.journal.unfinished(&key).wait {
                Some((_, Some(id))) => {
                    let kind = format!("{}.withdrawn", op.name());
                    let event = NewEvent::of_step(&kind, &key.1, serde_json::json!({"id": id}));
                    self.outgoing.asks.push(AskChange::Expire { id });
                    self.note(Record::Withdrawn { part: key.0, step: key.1 }, event);
                }
                // It may have been asked just now.
                _ if on_its_way => later.push((key, op)),
                _ => {}
            }
        }
        self.dropped = later;
    }

    /// Recorded names that the handler did not ask for.
    pub(super) fn unused(&self) -> Vec<String> {
        self.journal.unused().filter(|key| !self.left.contains(key)).map(|(_, name)| name.clone()).collect()
    }

    /// Goes on from a checkpoint that begins `part` at event `seq`. A journal that was not read
    /// yet is read from there only, with `state` as the task's state.
    pub(super) fn resume_at(&mut self, checkpoint: Begun, seq: u64, state: Option<(u64, AgentState)>) {
        let Begun { part, kept } = checkpoint;
        self.part = part;
        if self.loaded {
            self.journal.skip_to(part);
            self.journal.restore_arrivals(part);
            self.live = self.journal.is_used_up();
        } else {
            self.journal.begin_at(part, seq, kept, state);
        }
        let under_way: Vec<Key> = self.tickets.keys().cloned().collect();
        for key in under_way {
            self.look(&key);
        }
    }

    /// Waits until the journal was read.
    pub(super) fn poll_loaded(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.loaded {
            return Poll::Ready(());
        }
        self.wants_journal = true;
        // The handler is polled again when it was read.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Whether the journal was read.
    pub(super) fn is_loaded(&self) -> bool {
        self.loaded
    }

    pub(super) fn journal(&self) -> &Journal {
        &self.journal
    }

    // --- for the driver ---

    /// Decides what to do now that the handler is pending.
    pub(super) fn next(&mut self) -> Next {
        if !self.loaded {
            return if self.tickets.is_empty() && !self.wants_journal {
                self.next_write().unwrap_or(Next::Wait)
            } else {
                Next::Load
            };
        }
        if self.release() || self.start() {
            return Next::Poll;
        }
        self.take_back();
        let only_waits = !self.tickets.is_empty()
            && self.tickets.values().all(|ticket| matches!(ticket.stage, Stage::Waiting(_)));
        match self.next_write() {
            // What nobody waits for is written when the run is suspended, in one transaction.
            Some(Next::CommitSoon) if only_waits => Next::Idle,
            Some(write) => write,
            None if only_waits && !self.commit_under_way => Next::Idle,
            None => Next::Wait,
        }
    }

    fn next_write(&self) -> Option<Next> {
        if self.commit_under_way {
            return None;
        }
        if self.outgoing.urgent {
            return Some(Next::Commit);
        }
        self.outgoing.soon.then_some(Next::CommitSoon)
    }

    /// Releases the outcome with the lowest order that was asked for: what was recorded of the
    /// operation, or what arrived where it waits.
    fn release(&mut self) -> bool {
        self.look_at_news();
        while let Some((order, number, key)) = self.line.pop() {
            let waits =
                |ticket: &&mut Ticket| ticket.number == number && !matches!(ticket.stage, Stage::Released(_));
            let Some(ticket) = self.tickets.get_mut(&key).filter(waits) else { continue };
            let arrived = ticket.address.clone().filter(|address| self.journal.arrived(address) == Some(order));
            let outcome = match &arrived {
                Some(address) => self.journal.hand_over(address, &key).map(Ok),
                None if self.journal.recorded(&key).is_some_and(|recorded| recorded.order == order) => {
                    self.journal.release(&key).map(|recorded| recorded.outcome)
                }
                None => None,
            };
            let Some(outcome) = outcome else { continue };
            ticket.stage = Stage::Released(outcome);
            if let Some(waker) = ticket.waker.take() {
                waker.wake();
            }
            if let Some(address) = &arrived {
                // What arrived after it is for the next that waits there.
                self.look_at(address);
            }
            self.live |= self.journal.is_used_up();
            return true;
        }
        false
    }

    /// Lets operations without a record start, and those whose doubt was cleared start again. What acts
    /// on the world waits until everything that the handler was given is on disk.
    fn start(&mut self) -> bool {
        let mut started = false;
        if self.closing || self.suspending {
            return false;
        }
        let settled = self.batches_done >= self.given;
        for key in self.line.take_fresh() {
            let Some(ticket) = self.tickets.get_mut(&key) else { continue };
            let unfinished = || self.journal.unfinished(&key);
            let may = match &ticket.stage {
                Stage::Asked => true,
                Stage::Waiting(waiting) => waiting.kind == "in_doubt" && unfinished().doubt.is_none(),
                _ => false,
            };
            if may && !settled && ticket.acts_at_once(&unfinished()) {
                self.line.may_start(key);
                continue;
            }
            if may {
                ticket.stage = Stage::Granted;
                if let Some(waker) = ticket.waker.take() {
                    waker.wake();
                }
                started = true;
            }
        }
        if started {
            (self.live, self.begun) = (true, true);
            self.journal.show_patches(Order::LAST);
        }
        started
    }

    /// Takes in the log that was read.
    pub(super) fn load(&mut self, rows: &[LogRow], complete: bool) -> Result<(), TaskError> {
        self.journal.read(rows)?;
        if !complete && !self.loaded {
            // A record further on may come before these.
            return Ok(());
        }
        self.journal.take_read();
        self.look_at_news();
        if !self.loaded {
            self.loaded = true;
            self.live = self.journal.is_used_up();
            for event in std::mem::take(&mut self.early) {
                self.progress(event);
            }
        }
        Ok(())
    }

    /// The log is known up to event `seq`.
    pub(super) fn saw(&mut self, seq: u64) {
        self.journal.saw(seq);
    }

    /// From now on nothing new starts; what may not happen twice and is under way can still be
    /// recorded. After a cancel or a deadline (`ended`), only that.
    pub(super) fn close(&mut self, ended: bool) {
        self.closing = true;
        self.ended |= ended;
    }

    /// Whether an effect that may not happen twice, or that must be undone, is under way or on its
    /// way to the disk. One that is handed back (`goes_on`) is not undone now.
    pub(super) fn has_effects_under_way(&self, goes_on: bool) -> bool {
        let working = |ticket: &Ticket| {
            let matters = ticket.effect.needs_intent() || (ticket.undoable && !goes_on);
            matches!(ticket.stage, Stage::Working) && matters && ticket.op == Op::Step
        };
        self.commit_under_way || self.outgoing.urgent || self.tickets.values().any(working)
    }

    /// What the run waits for, when it only waits: what a person has to do first, and the earliest
    /// time at which one of the waits ends by itself.
    pub(super) fn waiting_for(&self) -> Option<(Waiting, Option<i64>)> {
        let mut waits: Vec<&Waiting> = self
            .tickets
            .values()
            .filter_map(|ticket| match &ticket.stage {
                Stage::Waiting(waiting) => Some(waiting),
                _ => None,
            })
            .collect();
        let place = |waiting: &Waiting| Waiting::KINDS.iter().position(|kind| *kind == waiting.kind);
        waits.sort_by(|one, other| (place(one), &one.id).cmp(&(place(other), &other.id)));
        let until = waits.iter().filter_map(|waiting| waiting.until).min();
        waits.first().map(|&waiting| (waiting.clone(), until.map(|until| until.as_microsecond())))
    }

    /// Whether something that arrives from outside may be wanted.
    pub(super) fn waits_for_others(&self) -> bool {
        self.loaded && self.line.is_waiting()
    }

    /// Turns to undoing: the handler is gone, and nothing of it is under way.
    pub(super) fn begin_undo(&mut self) {
        self.tickets.clear();
        self.names.clear();
        self.line.clear();
        // What was gathered to go forward is not wanted any more.
        self.outgoing.keep_settled(self.ended);
        (self.closing, self.ended, self.undoing) = (false, true, true);
        (self.live, self.begun) = (true, true);
    }

    /// Whether how to undo it is known of every step that is to be undone.
    pub(super) fn knows_undos(&self) -> bool {
        self.loaded
            && !self.journal.began_late()
            && self.journal.undoable_keys().all(|key| self.undos.contains_key(key))
    }

    /// How to undo a step.
    pub(super) fn take_undo(&mut self, key: &Key) -> Option<Undo> {
        self.undos.remove(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::LogEntry;
    use crate::store::{Committed, Outcome};
    use std::task::Waker;

    #[test]
    fn what_arrives_before_an_operation_begins_to_wait_is_not_lost() {
        let mut desk = Desk::new(TaskId::new(), 1, UndoOn::default());
        let input = Record::Input(RawValue::NULL.to_owned());
        let row = |seq, record: Record| {
            let entry = LogEntry::new(&[NewEvent::new("test", serde_json::Value::Null)], &[record]);
            LogRow { seq, count: 1, time: 0, run: 0, events: entry.events, records: entry.records }
        };
        desk.load(&[row(1, input)], true).expect("readable");
        let address = Some(Address::At("signal/go".to_owned()));
        let key = desk.ask(Asking { address, ..Asking::plain("signal go", Op::Signal) }).expect("a place");
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(desk.poll_turn(&key, cx).is_pending());
        assert_eq!(desk.next(), Next::Poll);
        assert!(matches!(desk.poll_turn(&key, cx), Poll::Ready(Turn::Start(_))));

        let message = RawValue::from_string("7".to_owned()).expect("JSON");
        desk.load(&[row(2, Record::Arrived { at: "signal/go".to_owned(), message, id: None })], true)
            .expect("readable");
        assert_eq!(desk.next(), Next::Poll, "it is given what arrived");
        let waiting = Waiting { kind: "signal".into(), id: "go".into(), since: None, until: None };
        desk.wait(&key, waiting);
        let turn = desk.poll_turn(&key, cx);
        assert!(matches!(turn, Poll::Ready(Turn::Recorded(Ok(message))) if message.get() == "7"));
    }

    #[test]
    fn who_waits_for_the_disk_goes_on_when_a_suspension_was_refused() {
        let mut desk = Desk::new(TaskId::new(), 1, UndoOn::default());
        let cx = &mut Context::from_waker(Waker::noop());
        let waiting = Waiting { kind: "lock".into(), id: "db".into(), since: None, until: None };
        let suspend = || Outcome::Suspended { waiting: waiting.clone(), wake_after: None };
        desk.end_commit(true, None, None, suspend());
        let during = desk.flush();
        assert!(desk.poll_disk(during, cx).is_pending(), "something is on its way");
        desk.not_committed();
        assert!(desk.poll_disk(during, cx).is_ready());
        let after = desk.flush();
        assert!(desk.poll_disk(after, cx).is_ready(), "nothing is");

        desk.tell(NewEvent::new("test", serde_json::Value::Null));
        desk.end_commit(true, None, None, suspend());
        let told = desk.flush();
        desk.not_committed();
        assert!(desk.poll_disk(told, cx).is_pending(), "what was gathered is still to be written");
        desk.take_commit();
        desk.committed(&[], Committed { first_seq: 1, last_seq: 1 }).expect("readable");
        assert!(desk.poll_disk(told, cx).is_ready());
    }
}
