//! Whether the demo's promises held, judged from the effects' own ledger and the sandbox against what was accepted.
//!
//! Pure: evidence in, rows out. What the engine tells is used only against it: a step that it told was done must not
//! have been run again, and a final state that it told must be what the effects show.
//!
//! From the ledger alone follows what was on record: the engine starts nothing that could follow from a result before
//! that result is on disk. So once a step has begun, all steps before it are recorded, and beginning one of them again
//! is a fault. Only the newest one may be repeated by another run, under the same key: a worker can die between an
//! effect and its record.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::ledger::{Line, Mark, What};
use super::model::ModelCall;
use super::world::{PLACES, RESTARTS, Sandbox};

/// What was submitted and accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Accepted {
    pub(super) id: String,
    /// The app, for people and for the sandbox.
    pub(super) app: String,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Deploy {
        /// Its last step cannot succeed.
        broken: bool,
    },
    Hotfix,
    Agent {
        goal: String,
        /// It wants to do something dangerous.
        asks: bool,
    },
}

/// A step that clients were told is done, and by which run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) task: String,
    /// As the ledger has it.
    pub(super) step: String,
    pub(super) undo: bool,
    pub(super) run: u64,
}

/// How a task ended, as clients were told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) state: String,
    pub(super) at: Instant,
}

/// A worker was killed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Killed {
    pub(super) worker: u32,
    /// As in the ledger.
    pub(super) at: i64,
    /// How many lines the ledger had.
    pub(super) lines: usize,
}

/// A worker was stopped past its leases and continued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paused {
    /// How many of its runs ended because a write was refused.
    pub(super) refused: usize,
}

/// A person decided about the dangerous call.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) task: String,
    pub(super) approved: bool,
    /// How many lines the ledger had.
    pub(super) lines: usize,
}

/// When the hotfix was submitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Overtaking {
    /// How many deployments had begun.
    pub(super) begun: usize,
    /// How many more may begin before it: workers hold so many already.
    pub(super) room: usize,
}

/// Everything there is to judge by.
pub(super) struct Evidence<'a> {
    pub(super) submitted: usize,
    pub(super) accepted: &'a [Accepted],
    /// How many were submitted a second time with the same key, and how many tasks that made.
    pub(super) again: (usize, usize),
    pub(super) ledger: &'a [Line],
    pub(super) sandbox: &'a Sandbox,
    pub(super) told: &'a [Told],
    pub(super) ended: &'a BTreeMap<String, Ended>,
    pub(super) calls: &'a [ModelCall],
    pub(super) killed: Option<Killed>,
    pub(super) paused: Option<Paused>,
    pub(super) decided: Option<Decided>,
    pub(super) overtaking: Option<Overtaking>,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Row {
    /// For programs; does not change.
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) expected: String,
    pub(super) actual: String,
    pub(super) ok: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Judgement {
    pub(super) rows: Vec<Row>,
    /// What is wrong, a sentence each.
    pub(super) faults: Vec<String>,
}

impl Judgement {
    pub(super) fn is_ok(&self) -> bool {
        self.faults.is_empty() && self.rows.iter().all(|row| row.ok)
    }

    /// A row that is right when what was found is what was expected and nobody complains.
    fn row(
        &mut self,
        name: &'static str,
        what: &'static str,
        expected: impl ToString,
        actual: impl ToString,
        complaints: Vec<String>,
    ) {
        let (expected, actual) = (expected.to_string(), actual.to_string());
        let ok = expected == actual && complaints.is_empty();
        if !ok && complaints.is_empty() {
            self.faults.push(format!("{what}: {actual} instead of {expected}"));
        }
        self.faults.extend(complaints);
        self.rows.push(Row { name, what, expected, actual, ok });
    }

    /// A row that is right when nobody complains, whatever was found.
    fn shown(
        &mut self,
        name: &'static str,
        what: &'static str,
        expected: impl ToString,
        actual: impl ToString,
        complaints: Vec<String>,
    ) {
        let ok = complaints.is_empty();
        self.faults.extend(complaints);
        let (expected, actual) = (expected.to_string(), actual.to_string());
        self.rows.push(Row { name, what, expected, actual, ok });
    }
}

/// The lines of one task, each with its place in the ledger.
type Lines<'a> = Vec<(usize, &'a Line)>;

struct Judge<'a> {
    evidence: &'a Evidence<'a>,
    by_task: BTreeMap<&'a str, Lines<'a>>,
}

/// Judges.
pub(super) fn judge(evidence: &Evidence<'_>) -> Judgement {
    let mut by_task: BTreeMap<&str, Lines<'_>> = BTreeMap::new();
    for (place, line) in evidence.ledger.iter().enumerate() {
        by_task.entry(&line.task).or_default().push((place, line));
    }
    let judge = Judge { evidence, by_task };
    let mut judgement = Judgement::default();
    judge.acceptance(&mut judgement);
    judge.outcomes(&mut judgement);
    judge.steps(&mut judgement);
    judge.workers(&mut judgement);
    judge.model(&mut judgement);
    judge.approval(&mut judgement);
    judge.overtaking(&mut judgement);
    judgement
}

impl<'a> Judge<'a> {
    fn lines(&self, task: &Accepted) -> &[(usize, &'a Line)] {
        self.by_task.get(task.id.as_str()).map(Vec::as_slice).unwrap_or_default()
    }

    /// All that deploys, the hotfix included.
    fn deploys(&self) -> impl Iterator<Item = (&'a Accepted, bool)> {
        self.evidence.accepted.iter().filter_map(|task| match task.kind {
            Kind::Deploy { broken } => Some((task, broken)),
            Kind::Hotfix => Some((task, false)),
            Kind::Agent { .. } => None,
        })
    }

    fn agents(&self) -> impl Iterator<Item = (&'a Accepted, &'a str, bool)> {
        self.evidence.accepted.iter().filter_map(|task| match &task.kind {
            Kind::Agent { goal, asks } => Some((task, goal.as_str(), *asks)),
            _ => None,
        })
    }

    fn acceptance(&self, judgement: &mut Judgement) {
        let ids: BTreeSet<&str> = self.evidence.accepted.iter().map(|task| task.id.as_str()).collect();
        judgement.row(
            "accepted",
            "tasks accepted, each with an id of its own",
            self.evidence.submitted,
            ids.len(),
            vec![],
        );
        let (times, made) = self.evidence.again;
        let what = "second tasks made by impatient users who sent the same again";
        judgement.row("duplicates", what, format!("0 of {times}"), format!("{made} of {times}"), vec![]);
        let strangers: BTreeSet<&str> = self.by_task.keys().copied().filter(|id| !ids.contains(id)).collect();
        let complaints = strangers
            .iter()
            .map(|id| format!("the ledger has effects of task {id}, which nobody submitted"))
            .collect();
        judgement.row("strangers", "tasks with effects that nobody submitted", 0, strangers.len(), complaints);
    }

    /// What became of each task, by its effects; and whether clients were told the same.
    fn outcomes(&self, judgement: &mut Judgement) {
        let (mut live, mut back, mut answered, mut lost) = (0, 0, 0, Vec::new());
        for (task, broken) in self.deploys() {
            match (self.missing(task, broken), broken) {
                (None, false) => live += 1,
                (None, true) => back += 1,
                (Some(missing), _) => lost.push(format!("{} (task {}) is lost: {missing}", task.app, task.id)),
            }
        }
        for (task, goal, _) in self.agents() {
            let last = self.evidence.calls.iter().filter(|call| call.goal == goal).map(|call| call.turn).max();
            let looked = self.lines(task).iter().any(|(_, line)| line.step == "look" && line.mark == Mark::Done);
            if last >= Some(2) && looked {
                answered += 1;
            } else {
                lost.push(format!(
                    "the agent run '{goal}' (task {}) is lost: it did not get to its answer",
                    task.id
                ));
            }
        }
        let broken = self.deploys().filter(|(_, broken)| *broken).count();
        let whole = self.deploys().count() - broken;
        judgement.row("completed", "deployments live, every step done", whole, live, vec![]);
        judgement.row("rolled_back", "broken deployments rolled back, nothing of them left", broken, back, vec![]);
        judgement.row("answered", "agent runs that got to their answer", self.agents().count(), answered, vec![]);
        judgement.row("lost", "tasks lost", 0, lost.len(), lost);
        let mut disagree = Vec::new();
        for task in self.evidence.accepted {
            let expected = if task.kind == (Kind::Deploy { broken: true }) { "failed" } else { "completed" };
            let told = self.evidence.ended.get(&task.id).map_or("nothing", |ended| &ended.state);
            if told != expected {
                disagree.push(format!(
                    "clients were told '{told}' of {} (task {}), not '{expected}'",
                    task.app, task.id
                ));
            }
        }
        judgement.row("told", "tasks of which clients were told something else", 0, disagree.len(), disagree);
    }

    /// What a deployment lacks to be live, or to be rolled back.
    fn missing(&self, task: &Accepted, broken: bool) -> Option<String> {
        let has = |what: What, mark: Mark, step: &str| {
            self.lines(task).iter().any(|(_, line)| line.what == what && line.mark == mark && line.step == step)
        };
        let mine = |place: &str| {
            let found = self.evidence.sandbox.get(&(place.to_owned(), task.app.clone()));
            found.is_some_and(|thing| thing.task == task.id)
        };
        let last = PLACES.len() - 1;
        for (number, (step, place)) in PLACES.iter().enumerate() {
            let fails = broken && number == last;
            if !fails && !has(What::Do, Mark::Done, step) {
                return Some(format!("the ledger does not say that {step} was done"));
            }
            if fails && has(What::Do, Mark::Done, step) {
                return Some(format!("{step} cannot be done, and the ledger says that it was"));
            }
            if broken && !fails && !has(What::Undo, Mark::Done, step) {
                return Some(format!("the ledger does not say that {step} was undone"));
            }
            if !broken && has(What::Undo, Mark::Begin, step) {
                return Some(format!("{step} was undone, although nothing failed"));
            }
            if mine(place) == broken {
                let state = if broken { "still" } else { "not" };
                return Some(format!("{place}/{} is {state} in the sandbox", task.app));
            }
        }
        None
    }

    /// What was run again although it was on record, what was repeated because it was not, and in which order things
    /// were undone.
    fn steps(&self, judgement: &mut Judgement) {
        let (mut again, mut repeated, mut reversed, mut order) = (Vec::new(), 0, 0, Vec::new());
        for (task, broken) in self.deploys() {
            let lines = self.lines(task);
            let found = self.run_again(task, lines, true);
            again.extend(found.0);
            repeated += found.1;
            if broken {
                match undone_in_reverse(lines) {
                    Ok(()) => reversed += 1,
                    Err(why) => order.push(format!("{} (task {}): {why}", task.app, task.id)),
                }
            }
        }
        for (task, ..) in self.agents() {
            let found = self.run_again(task, self.lines(task), false);
            again.extend(found.0);
            repeated += found.1;
        }
        let broken = self.deploys().filter(|(_, broken)| *broken).count();
        judgement.row("undone_in_reverse", "rolled back exactly in reverse", broken, reversed, order);
        judgement.row("recorded_run_again", "steps run again although they were on record", 0, again.len(), again);
        let keys = self.key_faults();
        let what = "steps cut off before their record and repeated, with the same key";
        judgement.shown(
            "repeated",
            what,
            "same key",
            format!("{repeated}, {} with another key", keys.len()),
            keys,
        );
    }

    /// The steps of a task that were begun again although they were on record, and how many were repeated otherwise.
    /// `in_line`: its steps follow each other, so that each proves those before it.
    fn run_again(&self, task: &Accepted, lines: &[(usize, &Line)], in_line: bool) -> (Vec<String>, usize) {
        let (mut faults, mut repeated) = (Vec::new(), 0);
        // Begun so far, in the order of their first beginning; an undo is after all that is undone.
        let mut begun: Vec<(What, &str)> = Vec::new();
        for (place, line) in lines.iter().filter(|(_, line)| line.mark == Mark::Begin) {
            let this = (line.what, line.step.as_str());
            let Some(known) = begun.iter().position(|other| *other == this) else {
                begun.push(this);
                continue;
            };
            let before = lines.iter().take_while(|(other, _)| other < place).filter(|(_, other)| {
                (other.what, other.step.as_str()) == this && other.mark != Mark::Begin && other.fence == line.fence
            });
            let done_in_this_run = before.last().is_some_and(|(_, other)| other.mark == Mark::Done);
            let told = self.evidence.told.iter().find(|told| {
                told.task == line.task && told.step == line.step && told.undo == (line.what == What::Undo)
            });
            let name = step_name(line);
            let who = format!("{} (task {}): {name}", task.app, task.id);
            if let Some(told) = told.filter(|told| told.run < line.fence) {
                let (run, fence) = (told.run, line.fence);
                faults.push(format!("{who} was told to be done by run {run}, and was run again by run {fence}"));
            } else if in_line && known + 1 < begun.len() {
                let next = begun[known + 1].1;
                faults.push(format!(
                    "{who} was on record, because {next} had begun, and was run again by run {}",
                    line.fence
                ));
            } else if done_in_this_run {
                faults.push(format!("{who} was done by run {} and begun by it once more", line.fence));
            } else {
                repeated += usize::from(lines.iter().any(|(other, earlier)| {
                    other < place && (earlier.what, earlier.step.as_str()) == this && earlier.fence < line.fence
                }));
            }
        }
        (faults, repeated)
    }

    /// One step has one key, and one key is of one step.
    fn key_faults(&self) -> Vec<String> {
        let mut keys: BTreeMap<(&str, What, &str), &str> = BTreeMap::new();
        let mut owners: BTreeMap<&str, (&str, What, &str)> = BTreeMap::new();
        let mut faults = BTreeSet::new();
        for line in self.evidence.ledger {
            let step = (line.task.as_str(), line.what, line.step.as_str());
            let key = *keys.entry(step).or_insert(&line.key);
            if key != line.key {
                let name = step_name(line);
                faults.insert(format!("task {}: {name} was given the keys {key} and {}", line.task, line.key));
            }
            if *owners.entry(&line.key).or_insert(step) != step {
                faults.insert(format!("the key {} was given to two steps", line.key));
            }
        }
        faults.into_iter().collect()
    }

    /// What a worker that lost its tasks did, and what became of those tasks.
    fn workers(&self, judgement: &mut Judgement) {
        let mut stale = Vec::new();
        for (id, lines) in &self.by_task {
            let mut newest = 0;
            for (_, line) in lines.iter().filter(|(_, line)| line.mark == Mark::Begin) {
                if line.fence < newest {
                    stale.push(format!(
                        "task {id}: {} was begun under fence {} by process {}, after fence {newest} had begun",
                        step_name(line),
                        line.fence,
                        line.worker
                    ));
                }
                newest = newest.max(line.fence);
            }
        }
        let what = "steps begun under an old fence after a newer one";
        judgement.row("stale_fences", what, 0, stale.len(), stale);
        let refused = self.evidence.paused.map_or(0, |paused| paused.refused);
        let complaints = match self.evidence.paused {
            None => vec!["no worker was stopped past its leases".to_owned()],
            Some(Paused { refused: 0 }) => {
                vec!["the worker that came back after its leases was not refused a single write".to_owned()]
            }
            Some(_) => vec![],
        };
        let what = "runs of the worker that came back, ended by a refused write";
        judgement.shown("late_writes_refused", what, "1 or more", refused, complaints);
        self.resumed(judgement);
    }

    fn resumed(&self, judgement: &mut Judgement) {
        let what = "tasks in the hands of the killed worker, resumed by others";
        let Some(killed) = self.evidence.killed else {
            return judgement.shown("resumed", what, "all", "none", vec!["no worker was killed".to_owned()]);
        };
        let (mut held, mut resumed, mut last, mut left) = (0, 0, 0, Vec::new());
        for (task, broken) in self.deploys() {
            let lines = self.lines(task);
            let before = lines.partition_point(|(place, _)| *place < killed.lines);
            let (before, after) = lines.split_at(before);
            let its = before.last().is_some_and(|(_, line)| line.worker == killed.worker);
            if !its || is_over(before, broken) {
                continue;
            }
            held += 1;
            match after.iter().find(|(_, line)| line.worker != killed.worker) {
                Some((_, line)) => {
                    resumed += 1;
                    last = last.max(line.at - killed.at);
                }
                None => {
                    left.push(format!("nobody took {} (task {}) over from the killed worker", task.app, task.id))
                }
            }
        }
        if held == 0 {
            left.push("the worker was killed when it had nothing to do".to_owned());
        }
        let seconds = last as f64 / 1e6;
        let actual = format!("{resumed} of {held}, the last {seconds:.1} s after the kill");
        judgement.shown("resumed", what, format!("{held} of {held}"), actual, left);
    }

    /// A call with turn n+1 shows the answer of turn n, which is on record then: asking for turn n once more is paying
    /// twice. So is every call after the task has ended.
    fn model(&self, judgement: &mut Judgement) {
        let (mut twice, mut lost) = (Vec::new(), 0);
        for (task, goal, _) in self.agents() {
            let mut newest = None;
            for call in self.evidence.calls.iter().filter(|call| call.goal == goal) {
                if Some(call.turn) < newest {
                    twice.push(format!(
                        "'{goal}' (task {}): turn {} was on record and was paid again",
                        task.id, call.turn
                    ));
                } else if self.evidence.ended.get(&task.id).is_some_and(|ended| ended.at < call.at) {
                    twice.push(format!("'{goal}' (task {}): the model was asked after the end", task.id));
                } else if Some(call.turn) == newest {
                    lost += 1;
                }
                newest = newest.max(Some(call.turn));
            }
        }
        let calls = self.evidence.calls.len();
        let actual = format!("{} of {calls}", twice.len());
        judgement.row(
            "paid_twice",
            "model calls on record that were paid again",
            format!("0 of {calls}"),
            actual,
            twice,
        );
        let what = "model calls whose answer was lost with its worker, asked again";
        judgement.shown("answers_lost", what, "any", lost, vec![]);
    }

    fn approval(&self, judgement: &mut Judgement) {
        let what = "the dangerous call, which needs a person's yes";
        let Some(decided) = &self.evidence.decided else {
            let complaint = "nobody was asked for an approval".to_owned();
            return judgement.shown("approval", what, "asked", "not asked", vec![complaint]);
        };
        let mut complaints = Vec::new();
        let lines = self.by_task.get(decided.task.as_str()).map(Vec::as_slice).unwrap_or_default();
        let calls: Lines<'_> = lines.iter().filter(|(_, line)| line.step == "restart").copied().collect();
        if calls.iter().any(|(place, _)| *place < decided.lines) {
            complaints.push(format!("task {}: the restart began before anyone had approved it", decided.task));
        }
        let done = calls.iter().filter(|(_, line)| line.mark == Mark::Done).count();
        let restarts = self.evidence.sandbox.keys().filter(|(place, _)| place == RESTARTS).count();
        match decided.approved {
            true if done == 0 || restarts != 1 => {
                complaints.push(format!("task {}: the restart was approved and did not happen", decided.task));
            }
            false if !calls.is_empty() || restarts > 0 => {
                complaints.push(format!("task {}: the restart was denied and happened", decided.task));
            }
            _ => {}
        }
        let expected = if decided.approved { "only after the yes" } else { "never: it was denied" };
        let actual = if complaints.is_empty() { expected } else { "otherwise" };
        judgement.shown("approval", what, expected, actual, complaints);
    }

    /// How many deployments had begun when the hotfix did.
    fn overtaking(&self, judgement: &mut Judgement) {
        let first = |task: &Accepted| self.lines(task).first().map(|(place, _)| *place);
        let hotfix = self.evidence.accepted.iter().find(|task| task.kind == Kind::Hotfix).and_then(first);
        let all = self.deploys().count().saturating_sub(1);
        let what = "the hotfix, submitted after all others, began";
        let (Some(place), Some(overtaking)) = (hotfix, self.evidence.overtaking) else {
            let complaint = "the hotfix never began".to_owned();
            return judgement.shown("hotfix", what, "before the others", "never", vec![complaint]);
        };
        let before = self.deploys().filter_map(|(task, _)| first(task)).filter(|first| *first < place).count();
        let most = overtaking.begun + overtaking.room;
        let complaints = match before > most || before >= all {
            true => {
                vec![format!("the hotfix began after {before} of {all}, and should have after {most} at most")]
            }
            false => vec![],
        };
        let expected = format!("after at most {most} of {all}");
        judgement.shown("hotfix", what, expected, format!("after {before} of {all}"), complaints);
    }
}

fn step_name(line: &Line) -> String {
    match line.what {
        What::Undo => format!("the undo of {}", line.step),
        _ => line.step.clone(),
    }
}

/// Whether a deployment did all it has to do.
fn is_over(lines: &[(usize, &Line)], broken: bool) -> bool {
    let done = |what: What, step: &str| {
        lines.iter().any(|(_, line)| line.what == what && line.step == step && line.mark == Mark::Done)
    };
    match broken {
        true => PLACES[..PLACES.len() - 1].iter().all(|(step, _)| done(What::Undo, step)),
        false => PLACES.iter().all(|(step, _)| done(What::Do, step)),
    }
}

/// Exactly what was done was undone, the last first. What was repeated counts when it first began.
fn undone_in_reverse(lines: &[(usize, &Line)]) -> Result<(), String> {
    let firsts = |what: What, mark: Mark| {
        let mut steps: Vec<&str> = Vec::new();
        for (_, line) in lines.iter().filter(|(_, line)| line.what == what && line.mark == mark) {
            if !steps.contains(&line.step.as_str()) {
                steps.push(&line.step);
            }
        }
        steps
    };
    let mut expected = firsts(What::Do, Mark::Done);
    expected.reverse();
    let (begun, done) = (firsts(What::Undo, Mark::Begin), firsts(What::Undo, Mark::Done));
    if begun == expected && done == expected {
        return Ok(());
    }
    let list = |steps: &[&str]| if steps.is_empty() { "nothing".to_owned() } else { steps.join(", ") };
    Err(format!(
        "to be undone: {}; undone: {}",
        list(&expected),
        list(if begun == expected { &done } else { &begun })
    ))
}

#[cfg(test)]
mod tests;
