//! The decisions about locks that both stores share: who holds one, who is next, who waits in
//! vain. No I/O. A store reads a [`Line`] (a lock's row and those who wait for it) and the heads of
//! the tasks it asks for, lets it [settle](Line::settle), and writes what changed.
//!
//! What holds: a lock has at most one holder; it goes to who asked first among those that can still
//! use it; each hold has a token larger than every one before; whoever gets, loses or gives back a
//! lock is told in its log, in the same transaction.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::clock::micros;
use super::rules::{self, Change, Head};
use super::sessions::{Note, Session};
use super::{CommitRefused, LockAction, LockChange};
use crate::event::{LogEntry, NewEvent};
use crate::record::Record;
use crate::task::{Phase, State, TaskId, timestamp};

/// How many of those who wait are looked at when a lock becomes free. Should none of them be able
/// to use it, they leave the line, and the sweep looks at the next ones.
pub(crate) const LOOK: usize = 16;
/// The most tasks that a search for a deadlock looks at; beyond that `max_hold` has to do.
pub(crate) const SEARCH: usize = 1_000;

/// What arrives for an operation on a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum News {
    /// The task has the lock, until then; kept by a lock service too, if one is named.
    Granted {
        token: u64,
        until: i64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<String>,
    },
    /// It waited for as long as it wanted to.
    TimedOut,
    /// It would have waited for itself.
    Deadlock { cycle: Vec<Link> },
    /// It was given back, if it was still held.
    Released { held: bool },
}

impl News {
    /// Whether what arrived says that the lock was not given.
    pub(crate) fn refuses(message: &RawValue) -> bool {
        matches!(serde_json::from_str(message.get()), Ok(Self::TimedOut | Self::Deadlock { .. }))
    }
}

/// A task in a circle, and the lock it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(crate) task: TaskId,
    pub(crate) lock: String,
}

/// What a lock is called in the store; two tenants' locks never meet.
pub(crate) fn key(tenant: &str, name: &str) -> String {
    format!("{tenant}/{name}")
}

/// What its tenant calls it.
pub(crate) fn name_of(key: &str) -> &str {
    key.split_once('/').map_or(key, |(_, name)| name)
}

/// Who has a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) task: TaskId,
    /// Where it was given last.
    pub(crate) address: String,
    pub(crate) token: u64,
    pub(crate) until: i64,
}

/// Who waits for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) task: TaskId,
    pub(crate) address: String,
    pub(crate) max_hold: i64,
    pub(crate) until: Option<i64>,
}

/// A lock and those who wait for it, as far as they matter here: the first [`LOOK`] of them, those
/// whose time is up, and those of the tasks in question.
#[derive(Debug, Default)]
pub(crate) struct Line {
    pub(crate) key: String,
    pub(crate) hold: Option<Hold>,
    pub(crate) waiters: Vec<Waiter>,
    /// What keeps it at a lock service.
    pub(crate) session: Option<Session>,
    /// What the service said of that.
    pub(crate) note: Option<Note>,
    /// The token of the next hold; needed when [`Line::may_be_freed`].
    pub(crate) next_token: u64,
    /// Who holds it changed, or until when.
    pub(crate) changed: bool,
    /// So did its session.
    pub(crate) session_changed: bool,
    /// Who waits no longer.
    pub(crate) left: Vec<Waiter>,
    /// Who waits from now on.
    pub(crate) joined: Option<Waiter>,
    /// How many at the head of `waiters` are the first in line, without a gap.
    first: usize,
    /// Whether nobody else is in line.
    whole: bool,
}

/// What decisions about lines are made from, and what they tell the tasks.
#[derive(Debug)]
pub(crate) struct Book {
    now: i64,
    /// Tasks that are said to have ended.
    ended: BTreeSet<TaskId>,
    /// `None` for a task that is gone.
    heads: BTreeMap<TaskId, Option<Head>>,
    told: BTreeMap<TaskId, (Vec<NewEvent>, Vec<Record>)>,
    /// Tasks that hold a lock or wait for one from now on.
    pub(crate) locked: BTreeSet<TaskId>,
    /// The lock service that has to give a lock too; needed when [`Line::may_be_freed`].
    pub(crate) service: Option<String>,
}

impl Book {
    pub(crate) fn new(now: i64, ended: impl IntoIterator<Item = TaskId>) -> Self {
        let ended = ended.into_iter().collect();
        let (heads, told, locked) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { now, ended, heads, told, locked, service: None }
    }

    pub(super) fn now(&self) -> i64 {
        self.now
    }

    /// The tasks whose heads are needed.
    pub(crate) fn want(&mut self, line: &Line, change: Option<&LockChange>) {
        let mut wanted: BTreeSet<TaskId> = self.ended.clone();
        wanted.extend(change.map(|change| change.task));
        if line.may_be_freed(change, self) {
            wanted.extend(line.hold.iter().map(|hold| hold.task));
            wanted.extend(line.waiters.iter().take(LOOK).map(|waiter| waiter.task));
        }
        let late = line.waiters.iter().filter(|waiter| waiter.until.is_some_and(|until| until <= self.now));
        wanted.extend(late.map(|waiter| waiter.task));
        self.heads.extend(wanted.into_iter().map(|task| (task, None)));
    }

    /// The tasks that were wanted, in the order of their ids.
    pub(crate) fn wanted(&self) -> Vec<TaskId> {
        self.heads.keys().copied().collect()
    }

    pub(crate) fn know(&mut self, head: Head) {
        self.heads.insert(head.id, Some(head));
    }

    pub(crate) fn head(&self, task: TaskId) -> Option<&Head> {
        self.heads.get(&task)?.as_ref()
    }

    /// The tasks that did end: theirs is nothing any more.
    pub(crate) fn over(&self) -> Vec<TaskId> {
        self.ended.iter().copied().filter(|task| self.is_over(*task)).collect()
    }

    fn is_over(&self, task: TaskId) -> bool {
        self.head(task).is_none_or(|head| head.state.is_final())
    }

    /// Whether a task that waits can still use a lock: one that is being undone or was asked to
    /// stop cannot.
    fn can_use(&self, task: TaskId) -> bool {
        self.head(task)
            .is_some_and(|head| !head.state.is_final() && head.phase == Phase::Forward && head.cancel.is_none())
    }

    fn tell(&mut self, task: TaskId, event: NewEvent) {
        self.told.entry(task).or_default().0.push(event);
    }

    /// Gives an operation what it waits for.
    pub(crate) fn give(&mut self, task: TaskId, address: &str, key: &str, news: &News) {
        let name = name_of(key);
        let (kind, data) = match news {
            News::Granted { token, until, service: None } => {
                ("lock.acquired", json!({"name": name, "token": token, "until": timestamp(*until)}))
            }
            News::Granted { token, until, service } => (
                "lock.acquired",
                json!({"name": name, "token": token, "until": timestamp(*until), "service": service}),
            ),
            News::TimedOut => ("lock.timed_out", json!({"name": name})),
            News::Deadlock { cycle } => ("lock.deadlock", json!({"name": name, "cycle": cycle})),
            News::Released { held: true } => ("lock.released", json!({"name": name})),
            News::Released { held: false } => ("lock.not_held", json!({"name": name})),
        };
        // An address is a place, a part of the journal and the operation's name.
        let step = address.splitn(3, '/').nth(2).unwrap_or(address);
        // Numbers, names and ids always serialise.
        let message = to_raw_value(news).unwrap_or_else(|_| RawValue::NULL.to_owned());
        let (events, records) = self.told.entry(task).or_default();
        events.push(NewEvent::of_step(kind, step, data));
        records.push(Record::Arrived { at: address.to_owned(), message, id: None });
    }

    /// What becomes of the tasks: each one's head before, and what changes.
    pub(crate) fn changes(&mut self) -> Vec<(Head, Change)> {
        let mut changes = Vec::new();
        for (task, (events, records)) in std::mem::take(&mut self.told) {
            let Some(head) = self.head(task).cloned() else { continue };
            let mut change = if records.is_empty() {
                Change { head: head.clone(), entry: LogEntry::default() }
            } else {
                rules::arrive_all(&head, Vec::new(), self.now)
            };
            change.entry = LogEntry::new(&events, &records);
            changes.push((head, change));
        }
        changes
    }
}

/// Whether a run may do something with a lock, given what the task's row says now.
pub(crate) fn check(head: Option<&Head>, change: &LockChange, now: i64) -> Result<(), CommitRefused> {
    let current = head.filter(|head| head.fence == change.fence && head.state == State::Running);
    let Some(head) = current else { return Err(CommitRefused::Fenced { held: change.fence }) };
    if head.cancel.is_some() || head.phase != Phase::Forward {
        return Err(CommitRefused::Cancelled);
    }
    if head.deadline.is_some_and(|deadline| deadline <= now) {
        return Err(CommitRefused::DeadlineExceeded);
    }
    Ok(())
}

/// Whether one of these records (a JSON array) gave something to this address.
pub(crate) fn gave(records: &str, address: &str) -> bool {
    let records: Vec<Record> = serde_json::from_str(records).unwrap_or_default();
    records.iter().any(|record| matches!(record, Record::Arrived { at, .. } if at == address))
}

impl Line {
    pub(crate) fn new(key: &str, hold: Option<Hold>, waiters: Vec<Waiter>) -> Self {
        Self { key: key.to_owned(), hold, waiters, ..Self::default() }
    }

    /// Whether the lock is free or becomes so now, as far as known before the tasks are looked at.
    pub(crate) fn may_be_freed(&self, change: Option<&LockChange>, book: &Book) -> bool {
        let Some(hold) = &self.hold else { return true };
        let released = change.is_some_and(|change| releases(change, hold));
        released || hold.until <= book.now || book.ended.contains(&hold.task) || self.session_may_free(book.now)
    }

    /// Does what is due, what is asked, and gives the lock to the next in line if it is free then.
    pub(crate) fn settle(&mut self, change: Option<&LockChange>, book: &mut Book) {
        self.first = self.waiters.len().min(LOOK);
        self.whole = self.waiters.len() < LOOK;
        self.end_hold(book);
        self.clear(book);
        if let Some(change) = change {
            match &change.action {
                LockAction::Acquire { max_hold, within } => {
                    let until = within.map(|within| book.now.saturating_add(micros(within)));
                    self.ask(change, micros(*max_hold), until, book);
                }
                LockAction::Release { .. } => self.release(change, book),
            }
        }
        let taken = self.hear_service(book);
        if self.hold.is_none() {
            self.pass_on(taken, book);
        } else {
            self.drop_stray_session(book.now);
        }
        if let Some(waiter) = &self.joined {
            book.locked.insert(waiter.task);
        }
    }

    /// Whether the lock is free and, as far as known, nobody waits for it.
    pub(crate) fn is_idle(&self) -> bool {
        self.hold.is_none() && self.waiters.is_empty()
    }

    /// Takes the lock from a task that ended, had it for long enough, or lost it at the lock service.
    fn end_hold(&mut self, book: &mut Book) {
        let Some(hold) = &self.hold else { return };
        let over = book.ended.contains(&hold.task) && book.is_over(hold.task);
        let late = (hold.until <= book.now).then(|| json!({"reason": "max_hold"}));
        let why = late.or_else(|| self.session_ends_hold(book));
        if !over && why.is_none() {
            return;
        }
        if !book.is_over(hold.task) {
            let mut data = json!({"name": name_of(&self.key), "token": hold.token});
            if let (Some(data), Some(Value::Object(why))) = (data.as_object_mut(), why) {
                data.extend(why.into_iter().filter(|(_, value)| !value.is_null()));
            }
            book.tell(hold.task, NewEvent::of_step("lock.expired", hold.step(), data));
        }
        self.hold = None;
        self.changed = true;
    }

    /// Lets those leave the line that ended or waited for long enough.
    fn clear(&mut self, book: &mut Book) {
        let (mut stay, mut leave) = (Vec::new(), Vec::new());
        let mut first = self.first;
        for (index, waiter) in std::mem::take(&mut self.waiters).into_iter().enumerate() {
            let over = book.ended.contains(&waiter.task) && book.is_over(waiter.task);
            let late = waiter.until.is_some_and(|until| until <= book.now);
            if late && !over && book.can_use(waiter.task) {
                book.give(waiter.task, &waiter.address, &self.key, &News::TimedOut);
            }
            if over || late {
                first -= usize::from(index < self.first);
                leave.push(waiter);
            } else {
                stay.push(waiter);
            }
        }
        (self.waiters, self.first) = (stay, first);
        self.left.extend(leave);
    }

    fn ask(&mut self, change: &LockChange, max_hold: i64, until: Option<i64>, book: &mut Book) {
        let own = self.hold.as_mut().filter(|hold| hold.task == change.task);
        if let Some(hold) = own {
            hold.until = hold.until.max(book.now.saturating_add(max_hold));
            hold.address.clone_from(&change.address);
            self.changed = true;
            let service = self.session.as_ref().map(|session| session.service.clone());
            let news = News::Granted { token: hold.token, until: hold.until, service };
            book.give(change.task, &change.address, &self.key, &news);
            return;
        }
        let waits = |waiter: &Waiter| waiter.task == change.task && waiter.address == change.address;
        if self.waiters.iter().any(waits) {
            return;
        }
        let waiter = Waiter { task: change.task, address: change.address.clone(), max_hold, until };
        self.joined = Some(waiter);
    }

    fn release(&mut self, change: &LockChange, book: &mut Book) {
        let held = self.hold.as_ref().is_some_and(|hold| releases(change, hold));
        if held {
            self.hold = None;
            self.changed = true;
        }
        book.give(change.task, &change.address, &self.key, &News::Released { held });
    }

    /// The first in line that can use the lock. Those looked at that cannot leave the line.
    pub(super) fn next(&mut self, book: &Book) -> Option<TaskId> {
        // With more in line than were read, who has just come is not the next.
        let newest = self.joined.iter().filter(|_| self.whole);
        let line = self.waiters.iter().take(self.first).chain(newest);
        let next = line.map(|waiter| waiter.task).find(|task| book.can_use(*task));
        let looked_at = self.waiters.drain(..self.first).collect::<Vec<_>>();
        let (stay, leave): (Vec<_>, Vec<_>) = looked_at.into_iter().partition(|waiter| book.can_use(waiter.task));
        self.first = stay.len();
        self.waiters.splice(..0, stay);
        self.left.extend(leave);
        next
    }

    /// Gives the lock to a task, wherever it waits for it.
    pub(super) fn grant(&mut self, next: TaskId, token: u64, service: Option<String>, book: &mut Book) {
        let mut given: Vec<Waiter> = self.waiters.extract_if(.., |waiter| waiter.task == next).collect();
        self.left.extend(given.iter().cloned());
        given.extend(self.joined.take_if(|waiter| waiter.task == next));
        let Some(first) = given.first() else { return };
        let longest = given.iter().map(|waiter| waiter.max_hold).max().unwrap_or(first.max_hold);
        let until = book.now.saturating_add(longest);
        let hold = Hold { task: next, address: first.address.clone(), token, until };
        for waiter in &given {
            let news = News::Granted { token, until, service: service.clone() };
            book.give(waiter.task, &waiter.address, &self.key, &news);
        }
        book.locked.insert(hold.task);
        self.hold = Some(hold);
        self.changed = true;
    }
}

impl Hold {
    /// The operation that got it.
    fn step(&self) -> &str {
        self.address.splitn(3, '/').nth(2).unwrap_or(&self.address)
    }
}

fn releases(change: &LockChange, hold: &Hold) -> bool {
    matches!(change.action, LockAction::Release { token } if token == hold.token && hold.task == change.task)
}

/// Someone waits for someone, at a lock.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    pub(crate) from: TaskId,
    pub(crate) key: String,
    pub(crate) to: TaskId,
}

/// Looks for a circle of tasks that wait for each other, from one of them on. The store gives the
/// edges of each frontier until there is no more, or a circle.
#[derive(Debug)]
pub(crate) struct Search {
    start: TaskId,
    frontier: Vec<TaskId>,
    /// How each task was come to.
    came: HashMap<TaskId, Link>,
}

impl Search {
    pub(crate) fn from(start: TaskId) -> Self {
        Self { start, frontier: vec![start], came: HashMap::new() }
    }

    /// Whose edges are wanted next.
    pub(crate) fn frontier(&self) -> &[TaskId] {
        if self.came.len() < SEARCH { &self.frontier } else { &[] }
    }

    /// Takes the edges of the frontier; gives the circle if they close one, beginning with the start.
    pub(crate) fn take(&mut self, edges: Vec<Edge>) -> Option<Vec<Link>> {
        self.frontier.clear();
        for Edge { from, key, to } in edges {
            let link = Link { task: from, lock: name_of(&key).to_owned() };
            if to == self.start {
                return Some(self.way_to(link));
            }
            if let Entry::Vacant(new) = self.came.entry(to) {
                new.insert(link);
                self.frontier.push(to);
            }
        }
        None
    }

    fn way_to(&self, last: Link) -> Vec<Link> {
        let mut way = vec![last];
        while let Some(link) = way.last().and_then(|link| self.came.get(&link.task)) {
            way.push(link.clone());
        }
        way.reverse();
        way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_circle_is_named_from_the_one_that_closes_it() {
        let [a, b, c, other] = [(); 4].map(|()| TaskId::new());
        let edge = |from, key: &str, to| Edge { from, key: format!("default/{key}"), to };
        let mut search = Search::from(a);
        assert_eq!(search.frontier(), [a]);
        assert!(search.take(vec![edge(a, "x", b), edge(a, "x", other)]).is_none());
        assert_eq!(search.frontier(), [b, other]);
        assert!(search.take(vec![edge(b, "y", c), edge(b, "y", other)]).is_none());
        let cycle = search.take(vec![edge(c, "z", a)]).expect("closed");
        let link = |task, lock: &str| Link { task, lock: lock.to_owned() };
        assert_eq!(cycle, [link(a, "x"), link(b, "y"), link(c, "z")]);
    }

    #[test]
    fn a_search_that_meets_no_one_new_ends() {
        let [a, b, c] = [(); 3].map(|()| TaskId::new());
        let edge = |from, to| Edge { from, key: "default/x".to_owned(), to };
        let mut search = Search::from(a);
        assert!(search.take(vec![edge(a, b)]).is_none());
        assert!(search.take(vec![edge(b, c)]).is_none());
        assert!(search.take(vec![edge(c, b)]).is_none());
        assert!(search.frontier().is_empty());
    }
}
