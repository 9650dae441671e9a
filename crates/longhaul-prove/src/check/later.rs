//! What others did with tasks: forks (I3 and I4) and changes of their state (I2).

use std::collections::{BTreeMap, BTreeSet};

use longhaul::TaskId;

use super::lives::{is_resumed, undoes};
use super::{Found, View};
use crate::handler::Given;
use crate::history::Fact;
use crate::ledger::What;
use crate::records::{Answer, Ask};

/// The forks of which it is known from which step on, with what they were forked from.
fn forks<'a>(view: &View<'a>) -> Vec<(&'a Fact, &'a Fact, &'a str)> {
    let known = view.history.asked.iter().filter_map(|asked| {
        let (Ask::Fork { task, from }, Answer::Done { task: fork, .. }) = (&asked.ask, &asked.answer) else {
            return None;
        };
        let tasks = &view.history.tasks;
        Some((tasks.get(fork)?, tasks.get(task)?, from.as_str()))
    });
    known.collect()
}

/// The steps that a fork takes over: completed before the one it begins with was started, and not undone.
fn taken_over<'a>(original: &'a Fact, fork: &Fact, from: &str) -> BTreeSet<&'a str> {
    // Someone may have opened it again since.
    let known = original
        .events
        .iter()
        .position(|event| is_resumed(event) && event.time.as_microsecond() > fork.created_at);
    let events = &original.events[..known.unwrap_or(original.events.len())];
    let of_it = |event: &&longhaul::Event| event.step.as_deref() == Some(from);
    let resumed = events.iter().rfind(|event| is_resumed(event)).map_or(0, |event| event.seq);
    let again = events.iter().filter(of_it).find(|event| event.seq > resumed);
    let Some(cut) = again.or_else(|| events.iter().find(of_it)) else { return BTreeSet::new() };
    let undone: BTreeSet<&str> = original.events.iter().filter_map(undoes).collect();
    let done = events.iter().filter(|event| event.kind == "step.completed" && event.seq < cut.seq);
    let names = done.filter_map(|event| event.step.as_deref());
    names.filter(|step| !undone.contains(step) && original.program.step(step).is_some()).collect()
}

/// I3: a fork is given what was recorded of the steps that it took over.
pub(super) fn forks_are_given_what_was(view: &View<'_>, found: &mut Found<'_>) {
    for (fork, original, from) in forks(view) {
        let taken = taken_over(original, fork, from);
        for line in view.lines(fork.id) {
            let What::Given { step, result, .. } = &line.what else { continue };
            let stored = original.results.get(step).and_then(|text| serde_json::from_str::<Given>(text).ok());
            if taken.contains(step.as_str()) && stored.as_ref().map(|stored| stored.result) != Some(*result) {
                found.of(
                    fork.id,
                    format!("step {step} of {} gave {stored:?}, and the fork has {result}", original.id),
                );
            }
        }
    }
}

/// I4: what a fork took over is not started again.
pub(super) fn forks_start_nothing_again(view: &View<'_>, found: &mut Found<'_>) {
    for (fork, original, from) in forks(view) {
        let begun = view.begun(fork.id);
        for step in taken_over(original, fork, from).into_iter().filter(|step| begun.contains_key(step)) {
            found
                .of(fork.id, format!("step {step}, recorded before {from} in {}, was started again", original.id));
        }
    }
}

/// I2: a change of a state that named a version was made to that very version. Each counts one up from what was read: were one
/// lost, the last would have counted less than there were.
pub(super) fn no_lost_update(view: &View<'_>, found: &mut Found<'_>) {
    let mut patches: BTreeMap<TaskId, (BTreeSet<u64>, u64, u64)> = BTreeMap::new();
    for asked in &view.history.asked {
        let Ask::Patch { task, version, .. } = &asked.ask else { continue };
        let (versions, done, unknown) = patches.entry(*task).or_default();
        match &asked.answer {
            Answer::Done { .. } => {
                *done += 1;
                if !versions.insert(*version) {
                    found.of(*task, format!("two changes of version {version} of its state were taken"));
                }
            }
            Answer::Unknown { .. } => *unknown += 1,
            Answer::Refused { .. } => {}
        }
    }
    for (task, (_, done, unknown)) in patches {
        let Some(fact) = view.history.tasks.get(&task) else { continue };
        let goal = fact.goal.as_ref().and_then(|(_, goal)| goal.parse::<u64>().ok());
        if !goal.is_some_and(|goal| (done..=done + unknown).contains(&goal)) {
            let goal = &fact.goal;
            found.of(
                task,
                format!("{done} changes of its state were taken, {unknown} perhaps, and it is {goal:?}"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::history::History;
    use crate::ledger::Line;
    use crate::records::Asked;
    use longhaul::{Effect, State};
    use serde_json::json;

    const NONE: [u8; 0] = [];

    fn asked(ask: Ask, answer: Answer) -> Asked {
        Asked { ask, answer, began: 0, ended: Some(1) }
    }

    #[test]
    fn a_fork_that_starts_again_what_it_took_over_or_has_another_result_breaks_i3_or_i4() {
        let steps = || vec![step("a", Effect::Idempotent), step("b", Effect::Idempotent)];
        let mut original =
            fact(steps(), State::Completed).submitted().started(1).done(1, "a").done(1, "b").ended(1);
        original.results.insert("a".into(), json!({"result": 7, "marker": "m"}).to_string());
        let mut fork = fact(steps(), State::Completed).submitted().started(1).done(1, "b").ended(1);
        fork.fork_of = Some(original.id);
        fork.results.insert("b".into(), json!({"result": 9, "marker": "m"}).to_string());
        let run = |lines: Vec<Line>| {
            let ask = Ask::Fork { task: original.id, from: "b".into() };
            let asked = vec![asked(ask, Answer::Done { task: fork.id, state: None })];
            broken(&History { asked, ..history([original.clone(), fork.clone()], lines) })
        };
        let given = |result| line(0, What::Given { task: fork.id, fence: 1, step: "a".into(), result });
        let begin = |step: &str| line(0, What::Begin(fork.call(step, 1, 1)));
        assert_eq!(run(vec![given(7), begin("b")]), NONE);
        assert_eq!(run(vec![given(8), begin("b")]), [3]);
        assert_eq!(run(vec![begin("a")]), [4]);
    }

    #[test]
    fn a_lost_update_and_two_changes_of_one_version_break_i2() {
        let with = |goal: &str, patches: &[(u64, bool)]| {
            let mut task = fact(vec![], State::Completed).submitted().started(1).ended(1);
            task.goal = Some((9, goal.into()));
            let ask = |(version, known): &(u64, bool)| {
                let unknown = Answer::Unknown { why: String::new() };
                let answer = if *known { Answer::Done { task: task.id, state: None } } else { unknown };
                asked(Ask::Patch { task: task.id, version: *version, goal: 0 }, answer)
            };
            let asked = patches.iter().map(ask).collect();
            broken(&History { asked, ..history([task], vec![]) })
        };
        assert_eq!(with("2", &[(1, true), (2, true)]), NONE);
        assert_eq!(with("1", &[(1, true), (2, true)]), [2], "one was lost");
        assert_eq!(with("2", &[(1, true), (1, true)]), [2], "both changed the same");
        assert_eq!(with("1", &[(1, true), (2, false)]), NONE, "it was not made");
        assert_eq!(with("2", &[(1, true), (2, false)]), NONE, "or it was");
        assert_eq!(with("3", &[(1, true), (2, false)]), [2], "nobody asked for a third");
    }
}
