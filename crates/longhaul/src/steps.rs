//! Steps as people see them: a task's log, projected. Pure; the journal (`run/journal.rs`) is what a run
//! goes by, this is only what it looks like from outside.

use std::borrow::Cow;
use std::collections::HashMap;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::TaskError;
use crate::event::LogRow;
use crate::record::{Decision, Effect, Op, Record, decided_to_have_failed, records_of};
use crate::run::child::{CHILD, ChildEnded};
use crate::run::journal::{APPROVAL, LOCK};
use crate::run::wait::{DecidedApproval, QUESTION, SIGNAL};
use crate::store::locks::News;
use crate::task::{State, TaskId, timestamp};

/// Where a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepState {
    /// Waits: for its next try, for a person, a signal, a time, a child, a lock.
    Pending,
    /// Its effect is under way.
    Running,
    /// Ended well.
    Completed,
    /// Failed for good.
    Failed,
    /// Nobody knows whether its effect happened.
    InDoubt,
    /// It was completed and then undone.
    Undone,
    /// It was completed and could not be undone.
    UndoFailed,
}

/// One step, or one wait, of a task.
#[derive(Clone, Debug, Serialize)]
pub struct StepInfo {
    /// Its name in the task.
    pub name: String,
    /// `step` or what the step itself says (`model`, `tool`, …), `sleep`, `signal`, `question`,
    /// `approval`, `child`, `lock`, `publish` or `patch`.
    pub kind: Cow<'static, str>,
    /// What kind of effect it has, once that is recorded; waits have none.
    pub effect: Option<Effect>,
    /// Where it stands.
    pub state: StepState,
    /// The number of its newest try; 0 for waits.
    pub attempt: u32,
    /// What it gave.
    pub result: Option<Box<RawValue>>,
    /// Why it failed, or why its newest try did.
    pub error: Option<TaskError>,
    /// When it began.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
}

/// The steps of a task with this log, in the order in which they began. Rows that cannot be read are
/// passed over.
pub(crate) fn steps_of(task: TaskId, rows: &[LogRow]) -> Vec<StepInfo> {
    let mut steps = Steps::default();
    for row in rows {
        steps.read(task, row);
    }
    steps.list.into_iter().map(|entry| entry.info).collect()
}

/// What a step is not, whatever it calls itself.
const WAITS: [&str; 6] = ["sleep", "signal", "question", "approval", "child", "lock"];
/// What begins with the event of a step and has a record of its own.
const OTHERS: [&str; 2] = ["sleep", "undo"];

/// Part of the journal, and name in it.
type Key = (u32, String);

struct Entry {
    key: Key,
    info: StepInfo,
    /// Its start was recorded before its effect, so an interruption leaves it in doubt.
    intended: bool,
    /// It was decided to give it up, though nobody knows what happened.
    given_up: bool,
}

#[derive(Default)]
struct Steps {
    list: Vec<Entry>,
    places: HashMap<Key, usize>,
    part: u32,
}

impl Steps {
    fn read(&mut self, task: TaskId, row: &LogRow) {
        let events = row.events_of(task);
        let lost = |status: &Value| row.run == 0 && status == "retrying";
        if events.iter().any(|event| event.kind == "task.started" || lost(&event.data["status"])) {
            self.interrupt();
        }
        let records = records_of(row).unwrap_or_default();
        // Which tries ended, and in which part: deferred records can stand before a checkpoint.
        let mut settled: Vec<(Key, u32)> = Vec::new();
        for record in records {
            let part = if let Record::Earlier { part, .. } = record { part } else { self.part };
            if let Some((step, attempt)) = settles(record.plain()) {
                settled.push(((part, step), attempt));
            }
            self.take(record, row.time);
        }
        for event in &events {
            let kind = event.data["kind"].as_str();
            match (event.kind.as_str(), &event.step) {
                ("step.started" | "step.completed", _) if kind.is_some_and(|kind| OTHERS.contains(&kind)) => {}
                ("step.started", Some(step)) => {
                    let attempt = event.data["attempt"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
                    let over = settled.iter().find(|((_, name), tried)| name == step && *tried >= attempt);
                    let key = over.map_or_else(|| (self.part, step.clone()), |(key, _)| key.clone());
                    if over.is_none() {
                        self.begin(step, attempt, event.time);
                    }
                    if let Some(kind) = kind {
                        self.entry(key, "step").info.kind = Cow::Owned(kind.to_owned());
                    }
                }
                ("step.completed", Some(step)) => {
                    // A deferred one ended before its row was written.
                    let ended = settled.iter().find(|((_, name), _)| name == step);
                    if let Some((key, _)) = ended
                        && let Some(&place) = self.places.get(key)
                    {
                        self.list[place].info.finished_at = Some(event.time);
                    }
                }
                ("task.waiting", _) => self.wait(&event.data, event.time),
                _ => {}
            }
        }
        if events.iter().any(crate::event::Event::is_final) {
            self.interrupt();
        }
    }

    fn entry(&mut self, key: Key, kind: &'static str) -> &mut Entry {
        let place = *self.places.entry(key.clone()).or_insert_with(|| {
            let info = StepInfo {
                name: key.1.clone(),
                kind: Cow::Borrowed(kind),
                effect: None,
                state: StepState::Pending,
                attempt: 0,
                result: None,
                error: None,
                started_at: None,
                finished_at: None,
            };
            self.list.push(Entry { key, info, intended: false, given_up: false });
            self.list.len() - 1
        });
        &mut self.list[place]
    }

    /// The entry of this name in the part that goes on.
    fn here(&mut self, name: &str, kind: &'static str) -> &mut Entry {
        self.entry((self.part, name.to_owned()), kind)
    }

    /// The newest entry of this name in any part.
    fn newest(&mut self, name: &str) -> Option<&mut Entry> {
        self.list.iter_mut().rev().find(|entry| entry.key.1 == name)
    }

    fn begin(&mut self, step: &str, attempt: u32, at: Timestamp) {
        let entry = self.here(step, "step");
        if matches!(entry.info.state, StepState::Completed | StepState::Undone | StepState::UndoFailed) {
            return;
        }
        entry.info.state = StepState::Running;
        entry.info.attempt = attempt;
        entry.info.started_at.get_or_insert(at);
    }

    /// What was under way is so no longer: its worker was lost, or the task ended.
    fn interrupt(&mut self) {
        for entry in self.list.iter_mut().filter(|entry| entry.info.state == StepState::Running) {
            entry.info.state = if entry.intended { StepState::InDoubt } else { StepState::Pending };
        }
    }

    fn wait(&mut self, waiting: &Value, at: Timestamp) {
        let id = waiting["id"].as_str().unwrap_or_default();
        let entry = match waiting["kind"].as_str().unwrap_or_default() {
            "in_doubt" => {
                if let Some(entry) = self.newest(id) {
                    entry.info.state = StepState::InDoubt;
                }
                return;
            }
            "signal" => self.open(&format!("signal {id}"), "signal"),
            "child" => self.open(&format!("join {id}"), "child"),
            "lock" => self.open(&format!("lock {id}"), "lock"),
            // These have a record of their own.
            _ => return,
        };
        entry.info.started_at.get_or_insert(at);
    }

    /// An entry of this name that has not ended: the known one, or a further one with a number.
    fn open(&mut self, name: &str, kind: &'static str) -> &mut Entry {
        let mut number = 1;
        loop {
            let numbered = if number == 1 { name.to_owned() } else { format!("{name}#{number}") };
            let key = (self.part, numbered);
            let ended = |&place: &usize| self.list[place].info.state != StepState::Pending;
            if !self.places.get(&key).is_some_and(ended) {
                return self.entry(key, kind);
            }
            number += 1;
        }
    }

    fn take(&mut self, record: Record, time: i64) {
        let now = Some(timestamp(time));
        match record {
            Record::Input(_)
            | Record::Patched { .. }
            | Record::StateBegun { .. }
            | Record::Undoing { .. }
            | Record::UndoOf { .. } => {}
            Record::Intent { step, attempt, .. } => {
                let entry = self.here(&step, "step");
                entry.intended = true;
                entry.info.state = StepState::Running;
                entry.info.attempt = attempt;
                entry.info.started_at = entry.info.started_at.or(now);
            }
            // An undo shows in what it undoes.
            Record::Done { op: Op::Undo, .. } => {}
            Record::Done { step, op, effect, attempt, started, result, .. } => {
                let info = &mut self.here(&step, kind_of(op)).info;
                let has_effect = op == Op::Step;
                (info.state, info.result, info.error) = (StepState::Completed, Some(result), None);
                (info.effect, info.attempt) = (has_effect.then_some(effect), if has_effect { attempt } else { 0 });
                info.started_at = info.started_at.or(Some(timestamp(started)));
                info.finished_at = now;
            }
            Record::Failed { step, effect, attempt, started, last, error } => {
                if let Some(undone) = self.undo_of(&step) {
                    if last {
                        (undone.info.state, undone.info.error) = (StepState::UndoFailed, Some(error));
                    }
                    return;
                }
                let entry = self.here(&step, "step");
                entry.intended = false;
                let info = &mut entry.info;
                info.error = Some(error);
                info.started_at = info.started_at.or(Some(timestamp(started)));
                if !WAITS.contains(&&*info.kind) {
                    (info.effect, info.attempt) = (Some(effect), attempt);
                }
                info.state = if last { StepState::Failed } else { StepState::Pending };
                info.finished_at = now.filter(|_| last);
            }
            Record::InDoubt { step, effect, attempt, error } => {
                let info = &mut self.here(&step, "step").info;
                (info.state, info.effect) = (StepState::InDoubt, Some(effect));
                (info.attempt, info.error) = (attempt, Some(error));
            }
            Record::Decided { step, decision, reason, .. } => self.decide(&step, decision, reason, now),
            Record::Checkpoint { part, .. } => self.part = part,
            Record::Reopened { resumed } => self.reopen(resumed),
            Record::Wait { step, op, .. } => {
                let info = &mut self.here(&step, kind_of(op)).info;
                (info.state, info.error, info.finished_at) = (StepState::Pending, None, None);
                info.started_at = info.started_at.or(now);
            }
            Record::Arrived { at, message, .. } => self.arrive(&at, message, now),
            Record::Undone { part, step } => {
                let info = &mut self.entry((part, step), "step").info;
                (info.state, info.error) = (StepState::Undone, None);
            }
            Record::Withdrawn { part, step } => {
                let info = &mut self.entry((part, step), "step").info;
                let gone_on = TaskError::fatal("withdrawn", "the handler went on without it");
                (info.state, info.error, info.finished_at) = (StepState::Failed, Some(gone_on), now);
            }
            Record::Earlier { part, record } => {
                let newest = std::mem::replace(&mut self.part, part);
                self.take(*record, time);
                self.part = newest;
            }
            Record::Inherited { part, step, op, result } => {
                let info = &mut self.entry((part, step), kind_of(op)).info;
                (info.state, info.result, info.finished_at) = (StepState::Completed, Some(result), now);
            }
        }
    }

    /// The step that an undo of this name is for.
    fn undo_of(&mut self, name: &str) -> Option<&mut Entry> {
        let step = name.strip_prefix("undo ")?;
        let key = match step.split_once('/').and_then(|(part, step)| Some((part.parse().ok()?, step))) {
            Some((part, step)) if self.places.contains_key(&(part, step.to_owned())) => (part, step.to_owned()),
            _ => (0, step.to_owned()),
        };
        self.places.get(&key).map(|&place| &mut self.list[place])
    }

    fn decide(&mut self, step: &str, decision: Decision, reason: Option<String>, now: Option<Timestamp>) {
        let Some(entry) = self.newest(step) else { return };
        let info = &mut entry.info;
        match decision {
            Decision::Retry => (info.state, entry.intended) = (StepState::Pending, false),
            Decision::Done(result) => {
                (info.state, info.result, info.error) = (StepState::Completed, Some(result), None);
                info.finished_at = now;
            }
            Decision::Fail => {
                let error = decided_to_have_failed(step, reason.as_deref());
                (info.state, info.error) = (StepState::Failed, Some(error));
                info.finished_at = now;
                entry.given_up = true;
            }
        }
    }

    /// What failed may be tried again; after a resume, what was undone too.
    fn reopen(&mut self, resumed: bool) {
        for entry in &mut self.list {
            let info = &mut entry.info;
            info.state = match info.state {
                StepState::Failed if entry.given_up => StepState::InDoubt,
                StepState::Failed => StepState::Pending,
                StepState::Undone if resumed => StepState::Pending,
                StepState::UndoFailed if resumed => {
                    // The error was the undo's.
                    info.error = None;
                    StepState::Completed
                }
                other => other,
            };
            entry.given_up = false;
            if info.state == StepState::Pending {
                (info.result, info.finished_at) = (None, None);
                if resumed {
                    info.started_at = None;
                }
            }
        }
    }

    fn arrive(&mut self, at: &str, message: Box<RawValue>, now: Option<Timestamp>) {
        let own = |place: &str| {
            let (part, step) = at.strip_prefix(place)?.split_once('/')?;
            Some((part.parse().ok()?, step.to_owned()))
        };
        let (entry, outcome) = if let Some(name) = at.strip_prefix(SIGNAL) {
            (self.open(&format!("signal {name}"), "signal"), Ok(()))
        } else if let Some(child) = at.strip_prefix(CHILD) {
            let outcome = match serde_json::from_str::<ChildEnded>(message.get()) {
                Ok(ended) if ended.state != State::Completed => Err(ended.error.unwrap_or_else(|| {
                    TaskError::fatal("child_failed", format!("child {child} {}", ended.state))
                })),
                _ => Ok(()),
            };
            (self.here(&format!("join {child}"), "child"), outcome)
        } else if let Some(key) = own(APPROVAL) {
            let outcome = match serde_json::from_str::<DecidedApproval>(message.get()) {
                Ok(decided) if !decided.approve => {
                    Err(TaskError::fatal("denied", format!("{} denied it", decided.by)))
                }
                _ => Ok(()),
            };
            (self.entry(key, "approval"), outcome)
        } else if let Some(key) = own(QUESTION) {
            (self.entry(key, "question"), Ok(()))
        } else if let Some(key) = own(LOCK) {
            let outcome = match serde_json::from_str::<News>(message.get()) {
                Ok(News::TimedOut) => Err(TaskError::retryable("lock_timeout", "the lock was not free in time")),
                Ok(News::Deadlock { .. }) => Err(TaskError::fatal("deadlock", "waiting for it would never end")),
                _ => Ok(()),
            };
            (self.entry(key, "lock"), outcome)
        } else {
            return;
        };
        let info = &mut entry.info;
        info.started_at = info.started_at.or(now);
        info.finished_at = now;
        (info.state, info.result, info.error) = match outcome {
            Ok(()) => (StepState::Completed, Some(message), None),
            Err(error) => (StepState::Failed, None, Some(error)),
        };
    }
}

/// The step and try whose end a record tells of.
fn settles(record: &Record) -> Option<(String, u32)> {
    match record {
        Record::Done { step, attempt, .. }
        | Record::Failed { step, attempt, .. }
        | Record::InDoubt { step, attempt, .. } => Some((step.clone(), *attempt)),
        _ => None,
    }
}

fn kind_of(op: Op) -> &'static str {
    match op {
        Op::Join => "child",
        other => other.name(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use serde_json::value::to_raw_value;

    use super::*;
    use crate::event::{LogEntry, NewEvent};

    /// A log in the making.
    #[derive(Default)]
    struct Log(Vec<LogRow>);

    impl Log {
        fn row(mut self, run: u64, events: &[NewEvent], records: &[Record]) -> Self {
            let events =
                if events.is_empty() { vec![NewEvent::new("progress", json!({}))] } else { events.to_vec() };
            let entry = LogEntry::new(&events, records);
            let seq = self.0.last().map_or(1, |row| row.last_seq() + 1);
            let time = i64::try_from(seq).expect("small") * 1_000_000;
            let LogEntry { count, events, records } = entry;
            self.0.push(LogRow { seq, count, time, run, events, records });
            self
        }

        fn record(self, record: Record) -> Self {
            self.row(1, &[], &[record])
        }

        fn steps(&self) -> Vec<StepInfo> {
            steps_of(TaskId::new(), &self.0)
        }

        fn states(&self) -> Vec<(String, StepState)> {
            self.steps().into_iter().map(|step| (step.name, step.state)).collect()
        }

        fn only(&self) -> StepInfo {
            let mut steps = self.steps();
            assert_eq!(steps.len(), 1, "{steps:?}");
            steps.remove(0)
        }
    }

    fn raw(value: serde_json::Value) -> Box<RawValue> {
        to_raw_value(&value).expect("JSON")
    }

    fn done(step: &str) -> Record {
        let (step, result) = (step.to_owned(), raw(json!({"ok": step})));
        Record::Done {
            step,
            op: Op::Step,
            effect: Effect::Idempotent,
            attempt: 2,
            started: 500,
            result,
            undoable: true,
            given_after: None,
        }
    }

    fn failed(step: &str, last: bool) -> Record {
        let error = TaskError::retryable("e", "no");
        Record::Failed { step: step.into(), effect: Effect::Read, attempt: 1, started: 500, last, error }
    }

    fn intent(step: &str) -> Record {
        Record::Intent { step: step.into(), attempt: 1, undoable: false }
    }

    fn started(step: &str, attempt: u32) -> NewEvent {
        NewEvent::of_step("step.started", step, json!({"attempt": attempt})).at(700)
    }

    fn waiting(kind: &str, id: &str) -> NewEvent {
        NewEvent::new("task.waiting", json!({"kind": kind, "id": id}))
    }

    fn arrived(at: &str, message: serde_json::Value) -> Record {
        Record::Arrived { at: at.into(), message: raw(message), id: None }
    }

    #[test]
    fn a_completed_step_has_everything_the_contract_names() {
        let step = Log::default().record(done("a")).only();
        assert_eq!(
            serde_json::to_value(&step).expect("JSON"),
            json!({"name": "a", "kind": "step", "effect": "idempotent", "state": "completed", "attempt": 2,
               "result": {"ok": "a"}, "error": null, "started_at": "1970-01-01T00:00:00.0005Z",
               "finished_at": "1970-01-01T00:00:01Z"})
        );
    }

    #[test]
    fn a_step_runs_from_its_start_to_its_record() {
        let log = Log::default().row(1, &[started("a", 1)], &[]);
        assert_eq!((log.only().state, log.only().attempt), (StepState::Running, 1));
        let log = log.record(failed("a", false));
        assert_eq!((log.only().state, log.only().finished_at), (StepState::Pending, None));
        assert!(log.only().error.is_some());
        let log = log.row(1, &[started("a", 2)], &[]);
        assert_eq!((log.only().state, log.only().attempt), (StepState::Running, 2));
        assert_eq!(log.record(done("a")).only().state, StepState::Completed);
        let log = Log::default().row(1, &[started("a", 2)], &[done("a")]);
        assert_eq!(log.only().state, StepState::Completed, "both in one row");
        assert_eq!(Log::default().record(failed("a", true)).only().state, StepState::Failed);
    }

    #[test]
    fn a_lost_worker_leaves_an_effect_in_doubt_only_when_its_intent_was_recorded() {
        let lost = NewEvent::new("progress", json!({"status": "retrying"}));
        let log = Log::default().row(1, &[started("a", 1)], &[]).record(intent("pay")).row(0, &[lost], &[]);
        assert_eq!(log.states(), [("a".into(), StepState::Pending), ("pay".into(), StepState::InDoubt)]);
        let again = Log::default().record(intent("pay")).row(2, &[NewEvent::new("task.started", json!({}))], &[]);
        assert_eq!(again.only().state, StepState::InDoubt);
    }

    #[test]
    fn a_decision_settles_a_step_in_doubt() {
        let doubt = |decision| {
            let decided = Record::Decided { step: "pay".into(), decision, by: "ann".into(), reason: None };
            Log::default().row(1, &[waiting("in_doubt", "pay")], &[intent("pay")]).row(0, &[], &[decided])
        };
        assert_eq!(doubt(Decision::Retry).only().state, StepState::Pending);
        assert_eq!(doubt(Decision::Done(raw(json!(7)))).only().result.expect("a result").get(), "7");
        let failed = doubt(Decision::Fail);
        assert_eq!(failed.only().state, StepState::Failed);
        assert!(failed.only().error.expect("why").message.contains("'pay'"));
        let reopened = failed.row(0, &[], &[Record::Reopened { resumed: true }]);
        assert_eq!(reopened.only().state, StepState::InDoubt, "the question comes back");
    }

    #[test]
    fn undo_shows_in_the_step_it_undoes() {
        let undo = |step: &str| {
            let result = RawValue::NULL.to_owned();
            let (step, effect) = (format!("undo {step}"), Effect::Read);
            Record::Done {
                step,
                op: Op::Undo,
                effect,
                attempt: 1,
                started: 0,
                result,
                undoable: false,
                given_after: None,
            }
        };
        let undone = Record::Undone { part: 0, step: "a".into() };
        let log = Log::default()
            .record(done("a"))
            .record(done("b"))
            .record(failed("undo b", false))
            .record(failed("undo b", true))
            .row(1, &[], &[undo("a"), undone]);
        assert_eq!(log.states(), [("a".into(), StepState::Undone), ("b".into(), StepState::UndoFailed)]);
        let resumed = log.row(0, &[], &[Record::Reopened { resumed: true }]);
        assert_eq!(resumed.states(), [("a".into(), StepState::Pending), ("b".into(), StepState::Completed)]);
        let steps = resumed.steps();
        assert_eq!((&steps[0].started_at, &steps[0].result.is_some()), (&None, &false), "it begins anew");
        assert!(steps[1].error.is_none() && steps[1].result.is_some(), "its undo's error is not its own");
    }

    #[test]
    fn waits_are_pending_until_what_they_wait_for_arrives() {
        let wait = |step: &str, op| Record::Wait { step: step.into(), op, until: None, id: Some("x".into()) };
        let child = TaskId::new();
        let log = Log::default()
            .record(wait("approve", Op::Approval))
            .record(wait("approve#2", Op::Approval))
            .record(wait("ask", Op::Question))
            .record(wait("sleep", Op::Sleep))
            .row(1, &[waiting("signal", "go")], &[])
            .row(1, &[waiting("child", &child.to_string())], &[])
            .row(1, &[waiting("lock", "disk")], &[]);
        let steps = log.steps();
        let kinds: Vec<&str> = steps.iter().map(|step| &*step.kind).collect();
        assert_eq!(kinds, ["approval", "approval", "question", "sleep", "signal", "child", "lock"]);
        assert!(log.steps().iter().all(|step| step.state == StepState::Pending && step.attempt == 0));
        let decided = |approve| json!({"id": "x", "approve": approve, "by": "ann", "reason": null});
        let result = RawValue::NULL.to_owned();
        let (effect, started) = (Effect::Read, 0);
        let slept = Record::Done {
            step: "sleep".into(),
            op: Op::Sleep,
            effect,
            attempt: 1,
            started,
            result,
            undoable: false,
            given_after: None,
        };
        let log = log
            .record(arrived("approval/0/approve", decided(true)))
            .record(arrived("approval/0/approve#2", decided(false)))
            .record(arrived("question/0/ask", json!({"id": "x", "answer": "yes", "by": "ann"})))
            .record(slept)
            .record(arrived("signal/go", json!(1)))
            .record(arrived("signal/go", json!(2)))
            .record(arrived(&format!("child/{child}"), json!({"state": "failed", "result": null, "error": null})))
            .record(arrived("lock/0/lock disk", json!({"granted": {"token": 1, "until": 5}})));
        let ended: Vec<(String, StepState)> = log.states();
        let completed = |name: &str| (name.to_owned(), StepState::Completed);
        assert_eq!(
            ended,
            [
                completed("approve"),
                ("approve#2".to_owned(), StepState::Failed),
                completed("ask"),
                completed("sleep"),
                completed("signal go"),
                (format!("join {child}"), StepState::Failed),
                completed("lock disk"),
                completed("signal go#2"),
            ]
        );
    }

    #[test]
    fn names_after_a_checkpoint_are_steps_of_their_own() {
        let log = Log::default()
            .row(1, &[], &[done("think"), Record::Checkpoint { part: 1, kept: Vec::new() }])
            .row(1, &[started("think", 1)], &[]);
        assert_eq!(log.states(), [("think".into(), StepState::Completed), ("think".into(), StepState::Running)]);
    }

    #[test]
    fn what_failed_waits_for_its_next_run_after_a_new_attempt() {
        let log = Log::default().record(done("a")).record(failed("b", true));
        let log = log.row(1, &[], &[Record::Reopened { resumed: false }]);
        assert_eq!(log.states(), [("a".into(), StepState::Completed), ("b".into(), StepState::Pending)]);
    }

    #[test]
    fn a_damaged_row_hides_only_itself() {
        let mut log = Log::default().record(done("a")).record(done("b"));
        log.0[0].records = Some("not json".to_owned());
        assert_eq!(log.states(), [("b".into(), StepState::Completed)]);
    }
}
