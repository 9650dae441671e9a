//! The checker: decides over a [`History`] whether what is promised held. Each invariant is a function of its own over
//! data, and has a test in which a good history passes and a bad one does not.
//!
//! | | what holds |
//! |---|---|
//! | I1 | every acknowledged task is there, with one final state; an unknown submit made none or one |
//! | I2 | fences grow strictly, every accepted write carried the current one (changes of a state: its version), no lease is taken back before its time |
//! | I3 | at most one recorded result per step, and replay gives the same bytes |
//! | I4 | all calls of one step carry one key; nothing starts after its record; what must not happen twice starts again only when it is known that it did not happen |
//! | I5 | undo is exactly the completed undoable steps in reverse; "compensated" is said only when all succeeded |
//! | I6 | events are 1..n, the final one last unless a resume follows it, and what readers read is the log |
//! | I7 | every event is delivered to a subscriber and to webhooks, and published to a broker, as it is in the log, in order per task |
//! | I8 | tries and pauses are within policy |
//! | I9 | nothing forward after a deadline or an acknowledged cancel; cancel against complete has one winner |
//! | I10 | one key, one task; one tick of a schedule, one task |
//! | I11 | limits are never exceeded, a lock has one holder and its tokens grow, who is first in line is started first |
//! | I12 | nothing carries another tenant's marker |
//! | I13 | every dangerous effect has an earlier, matching approval of its own |
//! | I14 | when faults stop, everything settles within a bound, and no lease is lost any more; what nothing holds up starts in time |

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use longhaul::TaskId;

use crate::history::{Fact, History};
use crate::ledger::{Call, Line, What};

mod events;
mod hooks;
mod later;
mod limits;
mod lives;
mod people;
mod runs;
mod tasks;
mod undo;

/// Something that was promised did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Of which invariant.
    pub invariant: u8,
    /// Of which task.
    pub task: Option<TaskId>,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "I{}", self.invariant)?;
        if let Some(task) = self.task {
            write!(f, " task {task}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// What was found so far of one invariant.
struct Found<'a> {
    invariant: u8,
    into: &'a mut Vec<Violation>,
}

impl Found<'_> {
    fn of(&mut self, task: TaskId, what: impl Into<String>) {
        self.into.push(Violation { invariant: self.invariant, task: Some(task), what: what.into() });
    }

    /// Of no task alone.
    fn any(&mut self, what: impl Into<String>) {
        self.into.push(Violation { invariant: self.invariant, task: None, what: what.into() });
    }
}

/// A history with its ledger sorted by task.
struct View<'a> {
    history: &'a History,
    lines: HashMap<TaskId, Vec<&'a Line>>,
    undos: HashMap<TaskId, Vec<&'a Fact>>,
}

impl<'a> View<'a> {
    fn new(history: &'a History) -> Self {
        let mut lines: HashMap<TaskId, Vec<&Line>> = HashMap::new();
        for line in &history.ledger {
            lines.entry(task_of(&line.what)).or_default().push(line);
        }
        let mut undos: HashMap<TaskId, Vec<&Fact>> = HashMap::new();
        for undo in history.tasks.values() {
            if let Some(task) = undo.undo_of {
                undos.entry(task).or_default().push(undo);
            }
        }
        Self { history, lines, undos }
    }

    fn tasks(&self) -> impl Iterator<Item = &'a Fact> {
        self.history.tasks.values()
    }

    /// The tasks that undo a task by request.
    fn undos(&self, task: TaskId) -> &[&'a Fact] {
        self.undos.get(&task).map_or(&[], Vec::as_slice)
    }

    fn lines(&self, task: TaskId) -> &[&'a Line] {
        self.lines.get(&task).map_or(&[], Vec::as_slice)
    }

    /// The calls of a task's steps that began, by step.
    fn begun(&self, task: TaskId) -> BTreeMap<&'a str, Vec<(&'a Call, i64)>> {
        let mut begun: BTreeMap<&str, Vec<(&Call, i64)>> = BTreeMap::new();
        for line in self.lines(task) {
            if let What::Begin(call) = &line.what {
                begun.entry(&call.step).or_default().push((call, line.at));
            }
        }
        begun
    }
}

fn task_of(what: &What) -> TaskId {
    match what {
        What::Begin(call)
        | What::Failed(call)
        | What::Did(call)
        | What::Verified { call, .. }
        | What::UndoBegin(call)
        | What::UndoFailed(call)
        | What::Undid(call) => call.task,
        What::Given { task, .. }
        | What::Heard { task, .. }
        | What::Arrived { task, .. }
        | What::Locked { task, .. }
        | What::Released { task, .. }
        | What::Hooked { task, .. } => *task,
    }
}

type Check = fn(&View<'_>, &mut Found<'_>);

const CHECKS: [(u8, Check); 18] = [
    (1, tasks::acknowledged),
    (2, runs::fences),
    (2, later::no_lost_update),
    (3, runs::results),
    (3, later::forks_are_given_what_was),
    (4, runs::calls),
    (4, later::forks_start_nothing_again),
    (5, undo::reverse),
    (6, events::gapless),
    (7, events::delivered),
    (7, hooks::webhooks),
    (8, runs::policy),
    (9, people::nothing_after_the_end),
    (10, tasks::one_key_one_task),
    (11, limits::shared),
    (12, tasks::no_foreign_marker),
    (13, people::approvals),
    (14, tasks::settles),
];

/// Everything that did not hold.
pub fn check(history: &History) -> Vec<Violation> {
    let view = View::new(history);
    let mut violations = Vec::new();
    for (invariant, check) in CHECKS {
        check(&view, &mut Found { invariant, into: &mut violations });
    }
    violations
}

#[cfg(test)]
mod testing {
    //! Small histories, made by hand.

    use super::*;
    use crate::history::Setup;
    use crate::program::{Ends, Op, Program, Step, Undo, marker};
    use longhaul::{Effect, Event, State};
    use serde_json::{Value, json};

    pub(super) fn step(name: &str, effect: Effect) -> Step {
        Step { name: name.into(), effect, ms: 1, fails: 0, undo: None, verify: false, deferred: false }
    }

    pub(super) fn undoable(name: &str) -> Step {
        Step { undo: Some(Undo { fails: 0 }), ..step(name, Effect::Idempotent) }
    }

    pub(super) fn fact(steps: Vec<Step>, state: State) -> Fact {
        let ops = steps.into_iter().map(Op::Step).collect();
        Fact {
            id: TaskId::new(),
            tenant: "default".into(),
            program: Program { number: 0, marker: marker("default"), ops, ends: Ends::Well },
            state,
            error: None,
            attempts: 0,
            max_attempts: 3,
            deadline: None,
            parent: None,
            concurrency_key: None,
            last_seq: 0,
            events: Vec::new(),
            asks: Vec::new(),
            results: BTreeMap::new(),
            carries: Vec::new(),
            priority: 5,
            created_at: 0,
            fork_of: None,
            undo_of: None,
            tags: BTreeMap::new(),
            goal: None,
        }
    }

    impl Fact {
        /// One more event, a second after the one before.
        pub(super) fn told(mut self, run: u64, kind: &str, step: Option<&str>, data: Value) -> Self {
            self.last_seq += 1;
            let seconds = i64::try_from(self.last_seq).expect("small");
            self.events.push(Event {
                seq: self.last_seq,
                task_id: self.id,
                kind: kind.into(),
                time: jiff::Timestamp::from_second(seconds).expect("a time"),
                run,
                step: step.map(str::to_owned),
                data,
            });
            self
        }

        pub(super) fn started(self, run: u64) -> Self {
            self.told(run, "task.started", None, json!({}))
        }

        pub(super) fn submitted(self) -> Self {
            self.told(0, "task.submitted", None, json!({}))
        }

        pub(super) fn done(self, run: u64, step: &str) -> Self {
            let begun = self.told(run, "step.started", Some(step), json!({"attempt": 1}));
            begun.told(run, "step.completed", Some(step), json!({"attempt": 1}))
        }

        pub(super) fn undone(self, run: u64, step: &str) -> Self {
            let name = format!("undo {step}");
            self.told(run, "step.completed", Some(&name), json!({"attempt": 1, "kind": "undo", "undoes": step}))
        }

        pub(super) fn lost(self) -> Self {
            self.told(0, "progress", None, json!({"status": "retrying", "message": "The worker was lost"}))
        }

        pub(super) fn ended(self, run: u64) -> Self {
            let kind = format!("task.{}", self.state);
            self.told(run, &kind, None, json!({}))
        }

        pub(super) fn call(&self, step: &str, attempt: u32, fence: u64) -> Call {
            let key = format!("{}/{step}", self.id);
            Call { task: self.id, step: step.into(), key, attempt, fence, approval: None }
        }
    }

    pub(super) fn line(at: i64, what: What) -> Line {
        Line { at, what }
    }

    pub(super) fn history(facts: impl IntoIterator<Item = Fact>, ledger: Vec<Line>) -> History {
        let setup = Setup { lease: 1_000_000, calm_at: i64::MAX / 2, settled: true, ..Setup::default() };
        History {
            setup,
            tasks: facts.into_iter().map(|fact| (fact.id, fact)).collect(),
            ledger,
            ..History::default()
        }
    }

    /// The numbers of the invariants that did not hold, each once.
    pub(super) fn broken(history: &History) -> Vec<u8> {
        let mut numbers: Vec<u8> = check(history).into_iter().map(|violation| violation.invariant).collect();
        numbers.dedup();
        numbers
    }

    /// What only `invariant` says of a history.
    pub(super) fn found(invariant: u8, history: &History) -> Vec<String> {
        let of_it = check(history).into_iter().filter(|violation| violation.invariant == invariant);
        of_it.map(|violation| violation.what).collect()
    }
}
