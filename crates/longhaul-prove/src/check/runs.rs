//! I2, I3, I4 and I8: what runs wrote, recorded and called.

use std::collections::{BTreeMap, BTreeSet};

use longhaul::Event;

use super::lives::{Generation, forgotten, generation_at, generation_in, is_resumed, recorded};
use super::{Found, View};
use crate::handler::Given;
use crate::history::Fact;
use crate::ledger::{Call, What};
use crate::program::{PAUSES, TRIES};

/// How much earlier than it should have been something may seem to be, microseconds: two clocks are compared.
const TOLERANCE: i64 = 5_000;

/// How far apart the times of one clock may seem to be, microseconds: a run tells when a step began by its idea of the store's
/// clock, and a transaction has the time at which it began, not the one at which its locks were free.
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
        let (mut newest, mut current, mut since, mut latest) = (0, None, i64::MIN, i64::MIN);
        for event in &task.events {
            // What a run tells of a step has the time at which it happened there, and is written when the store lets it;
            // what others tell meanwhile can come before it.
            let not_before = if event.run != 0 && event.step.is_some() { since } else { latest };
            if micros(event) + ONE_CLOCK < not_before {
                let back = not_before - micros(event);
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

/// I3: at most one recorded result per step; who runs the handler again is given what was recorded.
pub(super) fn results(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        let mut names = BTreeSet::new();
        for event in task.events.iter().filter(|event| is(event, "step.completed")) {
            let step = event.step.as_deref().unwrap_or_default();
            // What the engine does for itself (asking for an approval) it does again in every life.
            let own = task.program.step(step.trim_start_matches("undo ")).is_some();
            let resumes = task.events.iter().filter(|other| is_resumed(other) && other.seq < event.seq).count();
            let generation = if own { generation_at(task, step, event.seq) } else { resumes };
            if !names.insert((step, generation)) {
                found.of(task.id, format!("step {step} was recorded twice"));
            }
        }
        let recorded = recorded(task);
        for line in view.lines(task.id) {
            let What::Given { fence, step, result, .. } = &line.what else { continue };
            let generation = generation_in(task, step, *fence);
            // Before its record is written a result can be given that is lost with the run.
            let record = recorded.get(&(step.as_str(), generation)).filter(|record| *fence >= record.run);
            let Some(record) = record else { continue };
            // What was undone before a resume is forgotten: the store shows what is there now.
            if generation < forgotten(task, step) {
                continue;
            }
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
        let mut begun: BTreeMap<Generation<'_>, Vec<&Call>> = BTreeMap::new();
        for (step, calls) in view.begun(task.id) {
            for (call, _) in calls {
                begun.entry((step, generation_in(task, step, call.fence))).or_default().push(call);
            }
        }
        for (of, calls) in begun {
            let step = of.0;
            let keys: BTreeSet<&str> = calls.iter().map(|call| call.key.as_str()).collect();
            if keys.len() > 1 {
                found.of(task.id, format!("step {step} was called with several keys: {keys:?}"));
            }
            if let Some(record) = recorded.get(&of) {
                let attempt = record.data["attempt"].as_u64().unwrap_or(0);
                for call in &calls {
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
            let allowed = 1 + known_not_to_have_happened(view, task, of);
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
fn known_not_to_have_happened(view: &View<'_>, task: &Fact, (step, generation): Generation<'_>) -> usize {
    let of_it = |call: &Call| call.step == step && generation_in(task, step, call.fence) == generation;
    let said = view.lines(task.id).iter().filter(|line| match &line.what {
        What::Failed(call) => of_it(call),
        What::Verified { call, happened } => of_it(call) && !happened,
        _ => false,
    });
    let decided = task.events.iter().filter(|event| {
        let of_it = event.step.as_deref() == Some(step) && generation_at(task, step, event.seq) == generation;
        is(event, "step.decided") && of_it && event.data["decision"] == "retry"
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
    fn what_a_run_tells_of_a_step_has_the_time_of_the_step_and_not_one_before_the_run() {
        let seconds = jiff::SignedDuration::from_secs;
        let begun = fact(vec![step("a", Effect::Idempotent)], State::Completed).submitted().started(1);
        let mut late = begun.told(0, "task.reprioritised", None, json!({})).done(1, "a").ended(1);
        late.events[2].time += seconds(20);
        late.events[5].time += seconds(20);
        assert_eq!(broken(&history([late.clone()], vec![])), NONE, "the store let it wait");
        late.events[3].time = late.events[1].time - seconds(20);
        assert_eq!(broken(&history([late], vec![])), [2]);
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
    fn what_was_undone_may_start_again_when_the_task_is_resumed_and_only_under_a_new_key() {
        let first = fact(vec![undoable("a")], State::Completed).submitted().started(1).done(1, "a").undone(1, "a");
        let ended = first.told(1, "task.failed", None, json!({}));
        let first_life = ended.clone();
        let mut task = ended.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).done(3, "a").ended(3);
        task.results.insert("a".into(), json!({"result": 8, "marker": "m"}).to_string());
        let call = |fence, key: &str| Call { key: key.into(), ..task.call("a", 1, fence) };
        let given = |fence, result| line(0, What::Given { task: task.id, fence, step: "a".into(), result });
        let run = |calls: Vec<Call>, result| {
            let mut lines: Vec<_> = calls.into_iter().map(|call| line(0, What::Begin(call))).collect();
            lines.extend([given(1, 7), given(3, result)]);
            broken(&history([task.clone()], lines))
        };
        assert_eq!(run(vec![call(1, "a"), call(3, "a~2")], 8), NONE);
        assert_eq!(run(vec![call(1, "a"), call(3, "a~2"), call(4, "a~2")], 8), [4], "after its second record");
        assert_eq!(run(vec![call(1, "a"), call(3, "a~2")], 7), [3], "the result of the first life");
        let mut cut_short = first_life.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).ended(3);
        cut_short.state = State::Completed;
        let given = line(0, What::Given { task: cut_short.id, fence: 1, step: "a".into(), result: 7 });
        assert_eq!(broken(&history([cut_short], vec![given])), NONE, "it is forgotten, and did not start again");
        let kept = fact(vec![undoable("a")], State::Completed).submitted().started(1).done(1, "a");
        let kept = kept.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).done(3, "a").ended(3);
        assert!(!found(3, &history([kept], vec![])).is_empty(), "it was not undone");
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
}
