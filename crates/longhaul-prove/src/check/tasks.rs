//! I1, I10, I12 and I14: the tasks as a whole.

use std::collections::{BTreeMap, BTreeSet};

use longhaul::{State, TaskId};

use super::lives::is_resumed;
use super::runs::lease_lost;
use super::{Found, View};
use crate::records::{Answer, Ask, Sight};

/// I1: every acknowledged task is there and has one final state, the one that its last event tells. An unknown submit made
/// none or one; nobody else made any.
pub(super) fn acknowledged(view: &View<'_>, found: &mut Found<'_>) {
    let tasks = &view.history.tasks;
    let (mut asked_for, mut posted, mut copies) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for asked in &view.history.asked {
        match &asked.ask {
            Ask::Post { number, tenant, .. } => {
                posted.insert((tenant.as_str(), *number));
                // Over HTTP, nothing that the suite submits is wrong.
                if let Answer::Refused { why } = &asked.answer {
                    found.any(format!("a submit of {tenant} was refused: {why}"));
                }
            }
            Ask::Undo { task } | Ask::Fork { task, .. } => drop(copies.insert(*task)),
            Ask::Submit { id, .. } => drop(asked_for.insert(*id)),
            Ask::Resume { task } => {
                let fact = tasks.get(task);
                let opened = fact.is_some_and(|fact| fact.events.iter().any(is_resumed));
                let done = matches!(&asked.answer, Answer::Done { state, .. } if *state == Some(State::Pending));
                if done && !opened {
                    found.of(*task, "it was opened again, and no event tells of it");
                }
                continue;
            }
            _ => continue,
        }
        if let Answer::Done { task, .. } = &asked.answer
            && !tasks.contains_key(task)
        {
            found.of(*task, "it was acknowledged, and is not in the store");
        }
        if let (Ask::Submit { id, .. }, Answer::Refused { why }) = (&asked.ask, &asked.answer)
            && tasks.contains_key(id)
        {
            found.of(*id, format!("it was refused ({why}), and is in the store"));
        }
    }
    for task in view.tasks() {
        let known = asked_for.contains(&task.id)
            || task.parent.is_some_and(|parent| tasks.contains_key(&parent))
            || task.undo_of.or(task.fork_of).is_some_and(|of| copies.contains(&of))
            || (task.is_root() && posted.contains(&(task.tenant.as_str(), task.program.number)))
            || (task.tags.contains_key("schedule") && view.history.setup.ticks.contains_key(&task.tenant));
        let anything = !asked_for.is_empty() || !posted.is_empty();
        if anything && !known {
            found.of(task.id, "nobody asked for it");
        }
        // Those that are not over are for I14.
        let last = task.events.iter().rev().find(|event| event.is_final());
        let told = last.map(|event| event.kind.trim_start_matches("task."));
        if task.state.is_final() && told != Some(task.state.name()) {
            found.of(task.id, format!("it is {}, and its last final event tells {told:?}", task.state));
        }
        let finals = task.events.iter().filter(|event| event.is_final()).count();
        let resumed = task.events.iter().filter(|event| is_resumed(event));
        if finals > 1 + resumed.count() {
            found.of(task.id, format!("it ended {finals} times"));
        }
    }
}

/// I10: all acknowledged submits with one key, or equal ones within their window, mean one task, and no other has it.
pub(super) fn one_key_one_task(view: &View<'_>, found: &mut Found<'_>) {
    // The tasks that each key stands for, and the ids that were asked for under it.
    type Ids = BTreeSet<TaskId>;
    let mut meant: BTreeMap<(&str, String), (Ids, Ids)> = BTreeMap::new();
    for asked in &view.history.asked {
        let (id, tenant, key, equal) = match &asked.ask {
            Ask::Submit { id, tenant, key, equal } => (Some(*id), tenant, key, equal),
            Ask::Post { tenant, key, equal, .. } => (None, tenant, key, equal),
            _ => continue,
        };
        let Some(name) = key.clone().or(equal.map(|digest| format!("equal to {digest:x}"))) else { continue };
        let (tasks, ids) = meant.entry((tenant, name)).or_default();
        ids.extend(id);
        if let Answer::Done { task, .. } = &asked.answer {
            tasks.insert(*task);
        }
    }
    for ((tenant, key), (tasks, ids)) in meant {
        // One that was made, and of which nobody was told, counts too.
        let made: BTreeSet<TaskId> = ids.into_iter().filter(|id| view.history.tasks.contains_key(id)).collect();
        let all: Vec<&TaskId> = tasks.union(&made).collect();
        if all.len() > 1 {
            found.of(*all[0], format!("'{key}' of {tenant} stands for {} tasks: {all:?}", all.len()));
        }
    }
    one_submit_one_task(view, found);
    one_tick_one_task(view, found);
}

/// However often it was repeated, what a client submitted over HTTP is one task: also where nobody was told of it.
fn one_submit_one_task(view: &View<'_>, found: &mut Found<'_>) {
    let mut made: BTreeMap<(&str, u64), Vec<TaskId>> = BTreeMap::new();
    for task in view.tasks().filter(|task| task.is_root()) {
        made.entry((&task.tenant, task.program.number)).or_default().push(task.id);
    }
    let posted = view.history.asked.iter().filter_map(|asked| match &asked.ask {
        Ask::Post { tenant, number, .. } => Some((tenant.as_str(), *number)),
        _ => None,
    });
    for posted in posted.collect::<BTreeSet<_>>() {
        if let Some(tasks) = made.get(&posted).filter(|tasks| tasks.len() > 1) {
            found.of(tasks[0], format!("submit {} of {} made {tasks:?}", posted.1, posted.0));
        }
    }
}

/// Every tick of a schedule has one task, from the first to the last that there is.
fn one_tick_one_task(view: &View<'_>, found: &mut Found<'_>) {
    for (tenant, (first, every)) in &view.history.setup.ticks {
        let mut ticks: BTreeMap<i64, Vec<TaskId>> = BTreeMap::new();
        for task in view.tasks().filter(|task| task.tenant == *tenant && task.undo_of.or(task.fork_of).is_none()) {
            let Some(tick) = task.tags.get("tick") else { continue };
            match tick.parse::<jiff::Timestamp>() {
                Ok(tick) => ticks.entry(tick.as_microsecond()).or_default().push(task.id),
                Err(_) => found.of(task.id, format!("its tick is '{tick}'")),
            }
        }
        for (tick, tasks) in ticks.iter().filter(|(_, tasks)| tasks.len() > 1) {
            found.of(tasks[0], format!("tick {tick} of {tenant} has {} tasks: {tasks:?}", tasks.len()));
        }
        let Some(last) = ticks.keys().next_back() else { continue };
        let (mut tick, mut missing) = (*first, 0);
        while tick <= *last {
            missing += u32::from(!ticks.contains_key(&tick));
            tick += every;
        }
        if missing > 0 || ticks.keys().any(|tick| (tick - first) % every != 0) {
            found.any(format!("{missing} ticks of {tenant} have no task: {} do, from {first} on", ticks.len()));
        }
    }
}

/// I12: nothing that a tenant can see carries another's marker.
pub(super) fn no_foreign_marker(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        for other in task.carries.iter().filter(|other| **other != task.tenant) {
            found.of(task.id, format!("a task of {} carries the marker of {other}", task.tenant));
        }
    }
    for task in &view.history.seen_by_others {
        found.of(*task, "another tenant was given it");
    }
    for Sight { tenant, what, status, foreign, carries } in &view.history.sights {
        if let Some(other) = carries.iter().find(|other| *other != tenant) {
            found.any(format!("{tenant} asked for {what}, and the answer carries the marker of {other}"));
        }
        // As for any that is not there. 5xx: nobody looked.
        if *foreign && *status != 404 && *status < 500 {
            found.any(format!("{tenant} asked for {what} of another tenant, and was answered {status}"));
        }
    }
}

/// I14: when faults stop, everything settles within a bound, and from then on no lease is lost any more, unless the host itself
/// stood still.
pub(super) fn settles(view: &View<'_>, found: &mut Found<'_>) {
    let setup = &view.history.setup;
    for task in view.tasks().filter(|task| !task.state.is_final()) {
        let newest = task.events.last().map(|event| (&event.kind, &event.step));
        found.of(task.id, format!("it is still {}, and its newest event is {newest:?}", task.state));
    }
    if !setup.settled && view.tasks().all(|task| task.state.is_final()) {
        // Tasks ended between the last look and the reading of all: too late all the same.
        let Some(last) = view.tasks().max_by_key(|task| task.events.last().map(|event| event.time)) else {
            return;
        };
        found.of(last.id, "not everything had settled within the bound");
    }
    // What was held when the faults stopped may still be lost, for two leases: one to notice, one that was taken meanwhile.
    let calm = setup.calm_at.saturating_add(setup.lease.saturating_mul(3)).saturating_add(setup.grace);
    for task in view.tasks() {
        for event in task.events.iter().filter(|event| lease_lost(event) && event.time.as_microsecond() > calm) {
            let (at, seq) = (event.time.as_microsecond(), event.seq);
            if setup.slow.iter().any(|(from, to)| *from <= at && at - 2 * setup.lease <= *to) {
                continue;
            }
            let begun = task.events.iter().rfind(|event| event.seq < seq && event.kind == "task.started");
            let since = begun.map_or(0, |begun| at - begun.time.as_microsecond());
            let after = at - setup.calm_at;
            found.of(
                task.id,
                format!("event {seq}: a lease of {since} µs before was lost {after} µs after the last fault"),
            );
        }
    }
    starts_in_time(view, found);
}

/// What nothing holds up starts in time, also when nobody hears of it.
fn starts_in_time(view: &View<'_>, found: &mut Found<'_>) {
    let setup = &view.history.setup;
    let Some(within) = setup.starts_within else { return };
    for task in view.tasks().filter(|task| task.parent.is_none() && task.concurrency_key.is_none()) {
        let [submitted, started, ..] = task.events.as_slice() else { continue };
        if started.kind != "task.started" {
            continue;
        }
        let (from, at) = (submitted.time.as_microsecond(), started.time.as_microsecond());
        let host = setup.slow.iter().any(|(slow, to)| *slow <= at && from <= *to);
        if at - from > within && !host {
            found.of(task.id, format!("it started {} µs after it was submitted", at - from));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::history::{Fact, History, carried};
    use crate::program::marker;
    use crate::records::Asked;

    const NONE: [u8; 0] = [];

    fn good() -> Fact {
        fact(vec![], State::Completed).submitted().started(1).ended(1)
    }

    fn submit(id: TaskId, key: Option<&str>, answer: Answer) -> Asked {
        let ask = Ask::Submit { id, tenant: "default".into(), key: key.map(str::to_owned), equal: None };
        Asked { ask, answer, began: 0, ended: Some(1) }
    }

    fn done(task: TaskId) -> Answer {
        Answer::Done { task, state: None }
    }

    #[test]
    fn a_lost_a_refused_and_an_unasked_task_break_i1() {
        let task = good();
        let with = |asked: Vec<Asked>, tasks: Vec<Fact>| History { asked, ..history(tasks, vec![]) };
        assert_eq!(broken(&with(vec![submit(task.id, None, done(task.id))], vec![task.clone()])), NONE);
        assert_eq!(broken(&with(vec![submit(task.id, None, done(task.id))], vec![])), [1]);
        let unknown = || Answer::Unknown { why: String::new() };
        assert_eq!(broken(&with(vec![submit(task.id, None, unknown())], vec![])), NONE, "none");
        assert_eq!(broken(&with(vec![submit(task.id, None, unknown())], vec![task.clone()])), NONE, "or one");
        let refused = Answer::Refused { why: "full".into() };
        assert_eq!(broken(&with(vec![submit(task.id, None, refused)], vec![task.clone()])), [1]);
        assert_eq!(broken(&with(vec![submit(task.id, None, done(task.id))], vec![task, good()])), [1]);
    }

    #[test]
    fn a_state_that_the_last_event_does_not_tell_breaks_i1() {
        let mut other = good();
        other.state = State::Failed;
        assert_eq!(broken(&history([other], vec![])), [1]);
        let twice = good().ended(1);
        assert!(found(1, &history([twice], vec![])).len() == 1);
    }

    #[test]
    fn two_tasks_of_one_key_break_i10() {
        let (one, two) = (good(), good());
        let with = |answer: Answer, tasks: [Fact; 2]| {
            let asked = vec![submit(one.id, Some("k"), done(one.id)), submit(two.id, Some("k"), answer)];
            History { asked, ..history(tasks, vec![]) }
        };
        let alone = History {
            asked: vec![submit(one.id, Some("k"), done(one.id)), submit(two.id, Some("k"), done(one.id))],
            ..history([one.clone()], vec![])
        };
        assert_eq!(broken(&alone), NONE);
        assert_eq!(broken(&with(done(two.id), [one.clone(), two.clone()])), [10]);
        let unknown = Answer::Unknown { why: String::new() };
        assert_eq!(broken(&with(unknown, [one.clone(), two.clone()])), [10], "made, and nobody was told");
    }

    fn post(number: u64, answer: Answer) -> Asked {
        let (tenant, key) = ("default".into(), Some(format!("k{number}")));
        Asked { ask: Ask::Post { number, tenant, key, equal: None }, answer, began: 0, ended: Some(1) }
    }

    #[test]
    fn what_is_submitted_over_http_and_lost_refused_or_made_twice_breaks_i1_or_i10() {
        let (one, two) = (good(), good());
        let with = |asked: Vec<Asked>, tasks: Vec<Fact>| broken(&History { asked, ..history(tasks, vec![]) });
        let unknown = || Answer::Unknown { why: "cut".into() };
        assert_eq!(with(vec![post(0, unknown()), post(0, done(one.id))], vec![one.clone()]), NONE);
        assert_eq!(with(vec![post(0, unknown())], vec![]), NONE, "none");
        assert_eq!(with(vec![post(0, done(one.id))], vec![]), [1], "it was acknowledged");
        assert_eq!(with(vec![post(0, Answer::Refused { why: "401".into() })], vec![]), [1]);
        assert_eq!(with(vec![post(1, unknown())], vec![one.clone()]), [1], "another one was asked for");
        assert_eq!(with(vec![post(0, unknown()), post(0, done(two.id))], vec![one, two]), [10]);
    }

    #[test]
    fn a_tick_without_a_task_and_one_with_two_break_i10() {
        let tick = |second: i64| {
            let mut task = good();
            let at = jiff::Timestamp::from_second(second).expect("a time").to_string();
            task.tags = [("schedule", "s"), ("tick", at.as_str())].map(|(k, v)| (k.into(), v.into())).into();
            task
        };
        let with = |ticks: &[i64]| {
            let mut history = history(ticks.iter().map(|second| tick(*second)), vec![]);
            history.setup.ticks.insert("default".into(), (5_000_000, 1_000_000));
            broken(&history)
        };
        assert_eq!(with(&[5, 6, 7]), NONE);
        assert_eq!(with(&[5, 6, 6, 7]), [10]);
        assert_eq!(with(&[5, 7]), [10]);
        assert_eq!(with(&[6, 7]), [10], "the first is missing");
    }

    #[test]
    fn an_answer_with_another_tenants_marker_and_another_tenants_task_break_i12() {
        let with = |status, foreign, carries: &[&str]| {
            let (tenant, what) = ("default".into(), "/v1/tasks".into());
            let carries = carries.iter().map(|tenant| (*tenant).to_owned()).collect();
            let sights = vec![Sight { tenant, what, status, foreign, carries }];
            broken(&History { sights, ..history([good()], vec![]) })
        };
        assert_eq!(with(200, false, &["default"]), NONE);
        assert_eq!(with(404, true, &[]), NONE);
        assert_eq!(with(503, true, &[]), NONE, "nobody looked");
        assert_eq!(with(200, false, &["default", "beta"]), [12]);
        assert_eq!(with(200, true, &[]), [12]);
        assert_eq!(with(409, true, &[]), [12], "it says that there is one");
    }

    #[test]
    fn a_task_that_starts_late_breaks_i14_unless_it_is_held_up() {
        // A second passes between two events.
        let with = |task: Fact, within| {
            let mut history = history([task], vec![]);
            history.setup.starts_within = within;
            history
        };
        assert_eq!(broken(&with(good(), Some(1_000_000))), NONE);
        assert_eq!(broken(&with(good(), Some(999_999))), [14]);
        assert_eq!(broken(&with(good(), None)), NONE);
        let limited = Fact { concurrency_key: Some("k".into()), ..good() };
        assert_eq!(broken(&with(limited, Some(1))), NONE);
        let mut slow = with(good(), Some(1));
        slow.setup.slow = vec![(1_500_000, 1_600_000)];
        assert_eq!(broken(&slow), NONE, "the host stood still");
    }

    #[test]
    fn a_foreign_marker_breaks_i12() {
        let mut task = good();
        task.carries = carried(&format!("result {}", marker("default")));
        assert_eq!(broken(&history([task.clone()], vec![])), NONE);
        task.carries = carried(&format!("result {}", marker("beta")));
        assert_eq!(broken(&history([task.clone()], vec![])), [12]);
        let seen = History { seen_by_others: vec![TaskId::new()], ..history([good()], vec![]) };
        assert_eq!(broken(&seen), [12]);
    }

    #[test]
    fn a_task_that_is_not_over_and_a_lease_lost_in_the_calm_break_i14() {
        let running = fact(vec![], State::Running).submitted().started(1);
        assert_eq!(broken(&history([running], vec![])), [14]);
        let lost = fact(vec![], State::Completed).submitted().started(1).lost().started(3).ended(3);
        let calm_at = |at| {
            let mut history = history([lost.clone()], vec![]);
            history.setup.calm_at = at;
            history
        };
        assert_eq!(broken(&calm_at(2_000_000)), NONE);
        assert_eq!(broken(&calm_at(-1_000_000)), [14]);
        let mut slow = calm_at(-1_000_000);
        slow.setup.slow = vec![(1_500_000, 2_500_000)];
        assert_eq!(broken(&slow), NONE, "the host stood still");
        slow.setup.slow = vec![(0, 500_000)];
        assert_eq!(broken(&slow), [14], "long before");
        let mut late = history([good()], vec![]);
        late.setup.settled = false;
        assert_eq!(broken(&late), [14]);
    }
}
