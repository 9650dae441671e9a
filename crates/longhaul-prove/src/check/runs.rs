//! I2, I3, I4, I8 and I11: what runs wrote, recorded and called.

use std::collections::{BTreeMap, BTreeSet};

use longhaul::Event;

use super::{Found, View};
use crate::handler::Given;
use crate::history::Fact;
use crate::ledger::What;
use crate::program::{PAUSES, TRIES};

/// How much earlier than it should have been something may seem to be, microseconds: two clocks are compared.
const TOLERANCE: i64 = 5_000;

/// How far apart the times of one clock may seem to be, microseconds: a run tells when a step began by what it heard of the
/// store's clock, which can be as old as its newest heartbeat was slow.
const ONE_CLOCK: i64 = 10_000_000;

fn is(event: &Event, kind: &str) -> bool {
    event.kind == kind
}

fn micros(event: &Event) -> i64 {
    event.time.as_microsecond()
}

/// Whether an event says that a lease was taken back and the task goes on.
pub(super) fn lease_lost(event: &Event) -> bool {
    event.run == 0 && is(event, "progress") && event.data["status"] == "retrying"
}

/// Whether an event is of the undo of a step.
pub(super) fn of_undo(event: &Event) -> bool {
    event.data["kind"] == "undo"
}

/// I2: fences grow strictly, everything that a run tells it tells while its lease is the current one, and no lease is taken
/// back before its time, by one clock, whatever the machines' clocks say.
pub(super) fn fences(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        let (mut newest, mut current, mut since, mut latest) = (0, None, 0, i64::MIN);
        for event in &task.events {
            if micros(event) + ONE_CLOCK < latest {
                let back = latest - micros(event);
                found.of(
                    task.id,
                    format!("event {}: time went back by {back} µs; leases are by one clock", event.seq),
                );
            }
            latest = latest.max(micros(event));
            if is(event, "task.started") {
                if event.run <= newest {
                    found.of(task.id, format!("fence {} after {newest}", event.run));
                }
                (newest, current, since) = (event.run, Some(event.run), micros(event));
                continue;
            }
            if event.run != 0 && current != Some(event.run) {
                let (seq, kind, run) = (event.seq, &event.kind, event.run);
                found.of(
                    task.id,
                    format!("event {seq} ({kind}) is of run {run} while the current one is {current:?}"),
                );
            }
            if lease_lost(event) && current.is_some() {
                let held = micros(event) - since;
                if held + TOLERANCE < view.history.setup.lease {
                    found.of(task.id, format!("event {}: the lease was taken back after {held} µs", event.seq));
                }
            }
            if lease_lost(event) || is(event, "task.waiting") || event.is_final() {
                current = None;
            }
        }
    }
}

/// Which run recorded the result of each step, and with which event.
fn recorded(task: &Fact) -> BTreeMap<&str, &Event> {
    let mut recorded = BTreeMap::new();
    for event in task.events.iter().filter(|event| is(event, "step.completed") && !of_undo(event)) {
        if let Some(step) = &event.step {
            recorded.entry(step.as_str()).or_insert(event);
        }
    }
    recorded
}

/// I3: at most one recorded result per step; who runs the handler again is given what was recorded.
pub(super) fn results(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        let mut names = BTreeSet::new();
        for event in task.events.iter().filter(|event| is(event, "step.completed")) {
            if !names.insert(event.step.as_deref()) {
                found.of(task.id, format!("step {:?} was recorded twice", event.step));
            }
        }
        let recorded = recorded(task);
        for line in view.lines(task.id) {
            let What::Given { fence, step, result, .. } = &line.what else { continue };
            // Before its record is written a result can be given that is lost with the run.
            let Some(record) = recorded.get(step.as_str()).filter(|record| *fence >= record.run) else { continue };
            let stored = task.results.get(step).and_then(|text| serde_json::from_str::<Given>(text).ok());
            match stored {
                Some(stored) if stored.result == *result => {}
                Some(stored) => found.of(
                    task.id,
                    format!(
                        "step {step}: run {fence} was given {result}, and run {} recorded {}",
                        record.run, stored.result
                    ),
                ),
                None => found.of(task.id, format!("step {step} was completed, and its result is not to be had")),
            }
        }
    }
}

/// I4: all calls of one step carry one key; nothing starts after its record; what must not happen twice starts again only
/// when it is known that it did not happen.
pub(super) fn calls(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        let recorded = recorded(task);
        for (step, calls) in view.begun(task.id) {
            let keys: BTreeSet<&str> = calls.iter().map(|(call, _)| call.key.as_str()).collect();
            if keys.len() > 1 {
                found.of(task.id, format!("step {step} was called with several keys: {keys:?}"));
            }
            if let Some(record) = recorded.get(step) {
                let attempt = record.data["attempt"].as_u64().unwrap_or(0);
                for (call, _) in &calls {
                    let later = (call.fence, u64::from(call.attempt)) > (record.run, attempt);
                    if call.fence > record.run || (call.fence == record.run && later) {
                        let (run, tried) = (call.fence, call.attempt);
                        found.of(
                            task.id,
                            format!("step {step}, recorded by run {} with try {attempt}, was called by run {run} with try {tried}", record.run),
                        );
                    }
                }
            }
            let careful = task.program.step(step).is_some_and(|step| step.effect.needs_intent());
            let allowed = 1 + known_not_to_have_happened(view, task, step);
            if careful && calls.len() > allowed {
                found.of(
                    task.id,
                    format!("step {step}, which must not happen twice, was called {} times; {allowed} were known to be safe", calls.len()),
                );
            }
        }
    }
}

/// How often it was found that a call of a step had not had its effect.
fn known_not_to_have_happened(view: &View<'_>, task: &Fact, step: &str) -> usize {
    let said = view.lines(task.id).iter().filter(|line| match &line.what {
        What::Failed(call) => call.step == step,
        What::Verified { call, happened } => call.step == step && !happened,
        _ => false,
    });
    let decided = task.events.iter().filter(|event| {
        is(event, "step.decided") && event.step.as_deref() == Some(step) && event.data["decision"] == "retry"
    });
    said.count() + decided.count()
}

/// I8: no step has more tries than its policy allows, nor a task more attempts; a pause is neither shorter nor longer than it
/// may be, and it is kept.
pub(super) fn policy(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        if task.attempts > task.max_attempts {
            found.of(task.id, format!("{} attempts, and {} are allowed", task.attempts, task.max_attempts));
        }
        // The pause after each failed try, by run, step and try.
        let mut pauses: BTreeMap<(u64, &str, u64), i64> = BTreeMap::new();
        let decided = task.events.iter().filter(|event| is(event, "step.decided")).count() as u64;
        for event in &task.events {
            // Those that the engine makes for itself (a child's) have policies of their own.
            let own = |step: &&str| task.program.step(step.trim_start_matches("undo ")).is_some();
            let Some(step) = event.step.as_deref().filter(own) else { continue };
            let tried = event.data["attempt"].as_u64().unwrap_or(1);
            if is(event, "step.failed") && event.data["last"] != true {
                let pause = event.data["retry_in_ms"].as_i64().unwrap_or(0) * 1_000;
                let (least, most) = bounds(u32::try_from(tried).unwrap_or(u32::MAX));
                // It is told in whole milliseconds.
                if pause < least - 1_000 || pause > most {
                    let seq = event.seq;
                    found
                        .of(task.id, format!("event {seq}: step {step} pauses {pause} µs, not {least} to {most}"));
                }
                pauses.insert((event.run, step, tried), pause);
            }
            if is(event, "step.started") && tried > u64::from(TRIES) + decided {
                found.of(task.id, format!("event {}: try {tried} of step {step}", event.seq));
            }
        }
        kept(view, task, &pauses, found);
    }
}

/// Whether pauses were kept, by the clock of those who were called: between a call that failed and the next in the same run.
fn kept(view: &View<'_>, task: &Fact, pauses: &BTreeMap<(u64, &str, u64), i64>, found: &mut Found<'_>) {
    let mut failed: BTreeMap<(u64, String), (u64, i64)> = BTreeMap::new();
    for line in view.lines(task.id) {
        let (call, undo, begins) = match &line.what {
            What::Begin(call) => (call, "", true),
            What::Failed(call) => (call, "", false),
            What::UndoBegin(call) => (call, "undo ", true),
            What::UndoFailed(call) => (call, "undo ", false),
            _ => continue,
        };
        let name = format!("{undo}{}", call.step);
        if !begins {
            failed.insert((call.fence, name), (call.attempt.into(), line.at));
            continue;
        }
        let Some((tried, at)) = failed.remove(&(call.fence, name.clone())) else { continue };
        let (waited, pause) =
            (line.at - at, pauses.get(&(call.fence, name.as_str(), tried)).copied().unwrap_or(0));
        if waited < pause {
            found.of(
                task.id,
                format!("{name}: try {} came {waited} µs after the one before, not {pause}", call.attempt),
            );
        }
    }
}

/// The shortest and the longest pause after so many failures, microseconds.
fn bounds(failures: u32) -> (i64, i64) {
    let (first, cap) = (PAUSES.0.as_micros() as i64, PAUSES.1.as_micros() as i64);
    let most = first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(cap);
    (most / 2, most)
}

/// I11: no more tasks of a tenant with one concurrency key are at work at once than may be. Only calls whose result their own run
/// recorded count: those happened while the task held its place for certain.
pub(super) fn limits(view: &View<'_>, found: &mut Found<'_>) {
    let tenants: BTreeSet<&str> = view.tasks().map(|task| task.tenant.as_str()).collect();
    let limits = view.history.setup.limits.iter();
    for (tenant, (key, max)) in limits.flat_map(|limit| tenants.iter().map(move |tenant| (*tenant, limit))) {
        // When each call began and ended, and of which task.
        let mut edges: Vec<(i64, i32, usize)> = Vec::new();
        let shares = |task: &&Fact| task.tenant == tenant && task.concurrency_key.as_deref() == Some(key);
        let tasks: Vec<&Fact> = view.tasks().filter(shares).collect();
        for (number, task) in tasks.iter().enumerate() {
            let recorded = recorded(task);
            let begun = view.begun(task.id);
            for line in view.lines(task.id) {
                let What::Did(call) = &line.what else { continue };
                if recorded.get(call.step.as_str()).is_none_or(|record| record.run != call.fence) {
                    continue;
                }
                let calls = begun.get(call.step.as_str()).into_iter().flatten();
                let began = calls
                    .filter(|(other, at)| other.fence == call.fence && *at <= line.at)
                    .map(|(_, at)| *at)
                    .max();
                edges.extend(began.map(|at| (at, 1, number)));
                edges.extend(began.map(|_| (line.at, -1, number)));
            }
        }
        // An end comes before a begin at the same moment.
        edges.sort_by_key(|(at, change, _)| (*at, *change));
        let mut at_work: BTreeMap<usize, i32> = BTreeMap::new();
        for (_, change, task) in edges {
            *at_work.entry(task).or_default() += change;
            at_work.retain(|_, calls| *calls > 0);
            if at_work.len() > *max as usize {
                let ids: Vec<String> = at_work.keys().map(|number| tasks[*number].id.to_string()).collect();
                found.of(tasks[task].id, format!("'{key}' allows {max} at once; at work were {}", ids.join(", ")));
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use longhaul::{Effect, State};
    use serde_json::json;

    const NONE: [u8; 0] = [];

    fn good() -> Fact {
        let steps = vec![step("a", Effect::Idempotent)];
        fact(steps, State::Completed).submitted().started(1).lost().started(3).done(3, "a").ended(3)
    }

    #[test]
    fn a_fence_that_does_not_grow_a_lost_run_that_writes_and_a_lease_cut_short_break_i2() {
        assert_eq!(broken(&history([good()], vec![])), NONE);
        let steps = || vec![step("a", Effect::Idempotent)];
        let same = fact(steps(), State::Completed).submitted().started(2).lost().started(2).ended(2);
        assert_eq!(broken(&history([same], vec![])), [2]);
        let zombie =
            fact(steps(), State::Completed).submitted().started(1).lost().started(3).done(1, "a").ended(3);
        assert_eq!(broken(&history([zombie], vec![])), [2]);
        let ended = fact(steps(), State::Completed).submitted().started(1).lost().done(1, "a").started(3).ended(3);
        assert_eq!(broken(&history([ended], vec![])), [2]);
        let mut short = history([good()], vec![]);
        short.setup.lease = 30_000_000;
        assert_eq!(broken(&short), [2]);
        let mut clocks = good();
        clocks.events[2].time += jiff::SignedDuration::from_hours(1);
        assert_eq!(broken(&history([clocks], vec![])), [2], "of two clocks");
    }

    #[test]
    fn a_second_record_and_another_result_in_replay_break_i3() {
        let twice = good().done(3, "a");
        assert!(!found(3, &history([twice], vec![])).is_empty());
        let mut task = good();
        task.results.insert("a".into(), json!({"result": 7, "marker": "m"}).to_string());
        let given = |fence, result| {
            let what = What::Given { task: task.id, fence, step: "a".into(), result };
            history([task.clone()], vec![line(0, what)])
        };
        assert_eq!(broken(&given(3, 7)), NONE);
        assert_eq!(broken(&given(1, 8)), NONE, "it was lost with its run");
        assert_eq!(broken(&given(3, 8)), [3]);
        assert_eq!(broken(&given(4, 8)), [3]);
    }

    #[test]
    fn other_keys_calls_after_the_record_and_repeated_effects_break_i4() {
        let task = good();
        let begin = |attempt, fence| line(0, What::Begin(task.call("a", attempt, fence)));
        assert_eq!(broken(&history([task.clone()], vec![begin(1, 1), begin(1, 3)])), NONE);
        assert_eq!(broken(&history([task.clone()], vec![begin(1, 3), begin(1, 4)])), [4]);
        assert_eq!(broken(&history([task.clone()], vec![begin(1, 3), begin(2, 3)])), [4]);
        let mut other = task.call("a", 1, 3);
        other.key.push('x');
        assert_eq!(broken(&history([task.clone()], vec![begin(1, 1), line(0, What::Begin(other))])), [4]);

        let mut careful = good();
        careful.program.ops = vec![crate::program::Op::Step(step("a", Effect::Irreversible))];
        let begin = |fence| line(0, What::Begin(careful.call("a", 1, fence)));
        assert_eq!(broken(&history([careful.clone()], vec![begin(1), begin(3)])), [4]);
        let no = line(0, What::Verified { call: careful.call("a", 1, 3), happened: false });
        assert_eq!(broken(&history([careful.clone()], vec![begin(1), no, begin(3)])), NONE);
    }

    #[test]
    fn too_many_tries_and_pauses_that_are_not_kept_break_i8() {
        let failed = |attempt: u32, pause: u64| {
            fact(vec![step("a", Effect::Idempotent)], State::Completed)
                .submitted()
                .started(1)
                .told(1, "step.failed", Some("a"), json!({"attempt": attempt, "retry_in_ms": pause}))
                .told(1, "step.started", Some("a"), json!({"attempt": attempt + 1}))
                .ended(1)
        };
        assert_eq!(broken(&history([failed(1, 15)], vec![])), NONE);
        assert_eq!(broken(&history([failed(1, 50)], vec![])), [8], "longer than the policy says");
        assert_eq!(broken(&history([failed(3, 80)], vec![])), [8], "a fourth try");
        let task = failed(2, 40);
        let calls = |second: i64| {
            let lines = [(1_000, What::Failed(task.call("a", 2, 1))), (second, What::Begin(task.call("a", 3, 1)))];
            history([task.clone()], lines.into_iter().map(|(at, what)| line(at, what)).collect())
        };
        assert_eq!(broken(&calls(41_000)), NONE);
        assert_eq!(broken(&calls(40_999)), [8], "sooner than it was said");
        let mut often = good();
        often.attempts = 4;
        assert_eq!(broken(&history([often], vec![])), [8]);
    }

    #[test]
    fn two_at_work_where_one_may_be_break_i11() {
        let limited = || {
            let mut task = fact(vec![step("a", Effect::Idempotent)], State::Completed);
            task.concurrency_key = Some("one".into());
            task.submitted().started(1).done(1, "a").ended(1)
        };
        let (one, two) = (limited(), limited());
        let at_work = |task: &Fact, from, to| {
            let call = task.call("a", 1, 1);
            [line(from, What::Begin(call.clone())), line(to, What::Did(call))]
        };
        let run = |second: i64| {
            let mut lines: Vec<_> = at_work(&one, 10, 20).into_iter().collect();
            lines.extend(at_work(&two, second, second + 10));
            let mut history = history([one.clone(), two.clone()], lines);
            history.setup.limits.insert("one".into(), 1);
            history
        };
        assert_eq!(broken(&run(20)), NONE);
        assert_eq!(broken(&run(15)), [11]);
        let mut others = run(15);
        let other = others.tasks.get_mut(&two.id).expect("there");
        other.tenant = "beta".into();
        assert_eq!(broken(&others), NONE, "a tenant has its own");
    }
}
