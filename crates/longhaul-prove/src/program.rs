//! Random programs: what a task of the suite does, and what its client does with it. Both are drawn from a
//! seed, so that the same seed gives the same tasks; the program itself is the task's input.

use std::time::Duration;

use longhaul::{Effect, NewTask};
use serde::{Deserialize, Serialize};

use crate::chance::Chance;

/// The handler that interprets programs.
pub const HANDLER: &str = "prove";
/// The tenants; each has a marker that no answer to the other may carry.
pub const TENANTS: [&str; 2] = ["default", "beta"];
/// The concurrency keys and how many tasks of each may run at once.
pub const KEYS: [(&str, u32); 3] = [("one", 1), ("two", 2), ("three", 3)];
/// The locks.
pub const LOCKS: [&str; 3] = ["left", "middle", "right"];
/// So many tasks share them; the next ones have locks of their own, or the lines before them would grow for as long as a run lasts.
const SHARE_LOCKS: u64 = 200;
/// How long an equal submit is the same task, where that is asked for.
pub const WINDOW: Duration = Duration::from_secs(600);
/// How often a step is tried, and the first pause and the longest in between.
pub const TRIES: u32 = 3;
/// See [`TRIES`].
pub const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(80));

/// What a task does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Its number among those of the seed.
    pub number: u64,
    /// Its tenant's.
    pub marker: String,
    /// One after another.
    pub ops: Vec<Op>,
    /// How it ends.
    pub ends: Ends,
}

/// One thing that a program does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// A step.
    Step(Step),
    /// Steps side by side.
    Together(Vec<Step>),
    /// A timer.
    Sleep {
        /// Milliseconds.
        ms: u64,
    },
    /// Waits for a signal.
    Signal {
        /// Its name.
        name: String,
    },
    /// Asks a person.
    Ask,
    /// A dangerous step, which needs an approval for its amount.
    Dangerous {
        /// The step.
        step: Step,
        /// What is approved.
        amount: u64,
    },
    /// A child, waited for.
    Child(Box<Program>),
    /// An event of its own.
    Publish,
    /// A step that is done under a lock.
    Locked {
        /// The lock.
        lock: String,
        /// The step.
        step: Step,
    },
    /// Begins a state, which others patch.
    Note,
    /// Many events of its own, for readers.
    Tell {
        /// How many.
        count: u64,
        /// How large each is.
        bytes: usize,
        /// The pause between them, milliseconds.
        every_ms: u64,
    },
}

/// A step of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Its name, its own in the program.
    pub name: String,
    /// Its class.
    pub effect: Effect,
    /// How long its effect takes, milliseconds.
    pub ms: u64,
    /// So many tries fail first, and it is known that nothing happened.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fails: u32,
    /// How it is undone, if it can be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undo: Option<Undo>,
    /// It can find out itself whether it happened.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
    /// Its record may wait for the next one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deferred: bool,
}

/// How a step is undone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Undo {
    /// So many tries fail first.
    pub fails: u32,
}

/// How a program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ends {
    /// With a result.
    Well,
    /// With an error in so many runs, then with a result.
    Badly {
        /// How many.
        runs: u32,
    },
    /// With an error that trying again cannot mend.
    Fatally,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Program {
    /// All steps with effects of its own, those of its children not.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.ops.iter().flat_map(|op| match op {
            Op::Step(step) | Op::Dangerous { step, .. } | Op::Locked { step, .. } => std::slice::from_ref(step),
            Op::Together(steps) => steps.as_slice(),
            _ => &[],
        })
    }

    /// The step of this name.
    pub fn step(&self, name: &str) -> Option<&Step> {
        self.steps().find(|step| step.name == name)
    }

    /// The dangerous step of this name and what must have been approved for it.
    pub fn dangerous(&self, name: &str) -> Option<u64> {
        self.ops.iter().find_map(|op| match op {
            Op::Dangerous { step, amount } if step.name == name => Some(*amount),
            _ => None,
        })
    }
}

/// A task to be submitted, and what its client does with it afterwards.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The task; its id is the client's to make.
    pub program: Program,
    /// Its owner.
    pub tenant: &'static str,
    /// How many runs may end with its error.
    pub max_attempts: u32,
    /// How urgent it is.
    pub priority: u8,
    /// In how many milliseconds it must be over.
    pub timeout_ms: Option<u64>,
    /// What it shares a limit with.
    pub concurrency_key: Option<&'static str>,
    /// What else makes it the same task.
    pub same: Same,
    /// After how many milliseconds it is cancelled.
    pub cancel_after_ms: Option<u64>,
    /// With how many reconnects its events are read.
    pub reconnects: Option<u32>,
    /// How often it is opened again when it has failed or was cancelled.
    pub resumes: u32,
    /// Whether it is undone by request when it has ended.
    pub undo: bool,
    /// Whether it is forked when it has ended, and the number that says from which step on.
    pub fork: Option<u64>,
    /// How often its state is patched.
    pub patches: u32,
    /// Which of its events a webhook is told, if there is a receiver.
    pub hook: Option<Hook>,
}

/// Which events a webhook is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// The final ones.
    Final,
    /// All.
    All,
}

impl Hook {
    /// The label of a task that has one: it says what is to be delivered.
    pub const TAG: &str = "hook";

    /// The label's value.
    pub fn name(self) -> &'static str {
        match self {
            Self::Final => "final",
            Self::All => "all",
        }
    }
}

/// What makes two submits one task, beside the id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Same {
    /// Nothing.
    Nothing,
    /// A key.
    Key,
    /// Being equal, within [`WINDOW`].
    Equal,
}

/// The marker of a tenant.
pub fn marker(tenant: &str) -> String {
    format!("mark-of-{tenant}")
}

impl Plan {
    /// Task `number` of `seed`. So many out of a hundred share a limit.
    pub fn draw(seed: u64, number: u64, limited: u64) -> Self {
        let mut chance = Chance::of(seed, number);
        let tenant = if chance.percent(15) { TENANTS[1] } else { TENANTS[0] };
        let limited = chance.percent(limited).then(|| chance.one_of(&KEYS).0);
        let mut draw = Draw { chance, steps: 0, tenant, longer: limited.is_some() };
        let mut program = draw.program(number, 0);
        let mut chance = draw.chance;
        let patches = if chance.percent(6) { chance.between(1, 4) as u32 } else { 0 };
        if patches > 0 {
            program.ops.insert(0, Op::Note);
            // Others have a moment to change the state before it ends.
            program.ops.push(Op::Sleep { ms: 200 });
        }
        let same = match chance.between(1, 100) {
            1..=8 => Same::Key,
            9..=12 => Same::Equal,
            _ => Same::Nothing,
        };
        Self {
            program,
            tenant,
            max_attempts: if chance.percent(80) { 3 } else { 1 },
            priority: chance.between(0, 9) as u8,
            timeout_ms: chance.percent(6).then(|| chance.between(50, 4_000)),
            concurrency_key: limited,
            same,
            cancel_after_ms: chance.percent(10).then(|| chance.between(0, 600)),
            reconnects: chance.percent(10).then(|| chance.between(0, 8) as u32),
            resumes: if chance.percent(40) { chance.between(1, 2) as u32 } else { 0 },
            undo: chance.percent(15),
            fork: chance.percent(6).then(|| chance.draw()),
            patches,
            hook: chance.percent(12).then(|| *chance.one_of(&[Hook::Final, Hook::All])),
        }
    }

    /// The step from which on it is forked.
    pub fn fork_from(&self) -> Option<&str> {
        let names: Vec<&str> = self.program.steps().map(|step| step.name.as_str()).collect();
        let at = self.fork?.checked_rem(names.len() as u64)?;
        names.get(at as usize).copied()
    }

    /// The task, with a new id, and with its webhook if there is a receiver at `url`.
    pub fn task_told_to(&self, url: Option<&str>) -> NewTask {
        let mut task = self.task();
        if let (Some(hook), Some(url)) = (self.hook, url) {
            let events = if hook == Hook::All { vec!["*".to_owned()] } else { Vec::new() };
            task.webhook = Some(longhaul::Webhook { url: url.to_owned(), events });
            task.tags.insert(Hook::TAG.to_owned(), hook.name().to_owned());
        }
        task
    }

    /// The task, with a new id.
    pub fn task(&self) -> NewTask {
        let mut task = NewTask::new(HANDLER, &self.program)
            .tenant(self.tenant)
            .priority(self.priority)
            .max_attempts(self.max_attempts);
        if let Some(key) = self.key() {
            task = task.key(key);
        }
        if let Some(ms) = self.timeout_ms {
            task = task.timeout(Duration::from_millis(ms));
        }
        task.dedupe_window = (self.same == Same::Equal).then_some(WINDOW);
        task.concurrency_key = self.concurrency_key.map(str::to_owned);
        task
    }

    /// Its key, if it has one.
    pub fn key(&self) -> Option<String> {
        (self.same == Same::Key).then(|| format!("key-{}", self.program.number))
    }
}

/// A draw in progress.
struct Draw {
    chance: Chance,
    /// How many steps were named so far.
    steps: u32,
    tenant: &'static str,
    /// Effects take long enough for two that should not overlap to be seen.
    longer: bool,
}

impl Draw {
    fn program(&mut self, number: u64, depth: u32) -> Program {
        let count = self.chance.between(1, if depth == 0 { 7 } else { 3 });
        let ops = (0..count).map(|_| self.op(number, depth)).collect();
        let ends = match self.chance.between(1, 100) {
            1..=80 => Ends::Well,
            81..=90 => Ends::Badly { runs: self.chance.between(1, 3) as u32 },
            _ => Ends::Fatally,
        };
        Program { number, marker: marker(self.tenant), ops, ends }
    }

    fn op(&mut self, number: u64, depth: u32) -> Op {
        match self.chance.between(1, 100) {
            1..=60 => Op::Step(self.step()),
            61..=66 => {
                let lock = format!("{}-{}", self.chance.one_of(&LOCKS), number / SHARE_LOCKS);
                Op::Locked { lock, step: Step { ms: self.chance.between(5, 40), ..self.step() } }
            }
            67..=74 => Op::Together((0..self.chance.between(2, 4)).map(|_| self.step()).collect()),
            75..=80 => Op::Sleep { ms: self.chance.between(1, 250) },
            81..=84 => {
                self.steps += 1;
                Op::Signal { name: format!("go{}", self.steps) }
            }
            85..=87 => Op::Ask,
            88..=92 => {
                let effect = *self.chance.one_of(&[Effect::Compensable, Effect::Irreversible]);
                let step = Step { effect, ..self.step() };
                Op::Dangerous { step, amount: self.chance.between(1, 1_000) }
            }
            93..=96 if depth == 0 => Op::Child(Box::new(self.program(number, 1))),
            _ => Op::Publish,
        }
    }

    fn step(&mut self) -> Step {
        self.steps += 1;
        let classes =
            [Effect::Read, Effect::Idempotent, Effect::Idempotent, Effect::Compensable, Effect::Irreversible];
        let effect = *self.chance.one_of(&classes);
        let undone = self.chance.percent(if effect == Effect::Compensable { 90 } else { 30 });
        let undo = (undone && effect != Effect::Read).then(|| Undo {
            fails: if self.chance.percent(5) { TRIES } else { u32::from(self.chance.percent(10)) },
        });
        Step {
            name: format!("s{}", self.steps),
            effect,
            ms: match self.chance.between(1, 100) {
                // Longer than a lease.
                1 => self.chance.between(1_200, 1_800),
                _ if self.longer => self.chance.between(20, 60),
                _ => self.chance.between(0, 15),
            },
            fails: if self.chance.percent(10) { self.chance.between(1, 3) as u32 } else { 0 },
            verify: effect.needs_intent() && self.chance.percent(60),
            deferred: !effect.needs_intent() && undo.is_none() && self.chance.percent(20),
            undo,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_same_seed_draws_the_same_tasks_and_another_others() {
        let inputs = |seed| -> Vec<String> {
            (0..50).map(|number| Plan::draw(seed, number, 8).task().input.get().to_owned()).collect()
        };
        assert_eq!(inputs(7), inputs(7));
        assert_ne!(inputs(7), inputs(8));
    }

    #[test]
    fn every_kind_of_thing_is_drawn_and_steps_have_names_of_their_own() {
        let plans: Vec<Plan> = (0..500).map(|number| Plan::draw(1, number, 8)).collect();
        let kinds: BTreeSet<String> = plans
            .iter()
            .flat_map(|plan| &plan.program.ops)
            .map(|op| serde_json::to_value(op).expect("writes").to_string())
            .map(|text| text.trim_start_matches(['{', '"']).chars().take_while(|letter| *letter != '"').collect())
            .collect();
        let all =
            ["ask", "child", "dangerous", "locked", "note", "publish", "signal", "sleep", "step", "together"];
        assert_eq!(kinds.iter().map(String::as_str).collect::<Vec<_>>(), all);
        for plan in &plans {
            let names: Vec<&str> = plan.program.steps().map(|step| step.name.as_str()).collect();
            assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        }
        assert!(plans.iter().any(|plan| plan.cancel_after_ms.is_some()));
        assert!(plans.iter().any(|plan| plan.timeout_ms.is_some()));
        assert!(plans.iter().any(|plan| plan.same == Same::Equal));
        assert!(plans.iter().any(|plan| plan.resumes > 0) && plans.iter().any(|plan| plan.undo));
        assert!(
            plans.iter().any(|plan| plan.fork_from().is_some()) && plans.iter().any(|plan| plan.hook.is_some())
        );
    }
}
