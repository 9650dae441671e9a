//! I11: what may not happen at the same time, and who comes first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use longhaul::TaskId;

use super::lives::{generation_in, is_resumed, recorded};
use super::{Found, View};
use crate::history::Fact;
use crate::ledger::{Call, What};
use crate::program::Op;

/// How much waiting one step of priority is worth, microseconds: what queues have unless they are told otherwise.
const AGEING: i64 = 86_400_000_000;
/// For how long one that came first may be passed over, microseconds: a claim does not see what was written a moment ago, and
/// leaves rows alone that others hold. (Longer where a process is stopped while it holds them: `Setup::held`.)
const PASSED_OVER: i64 = 2_000_000;

/// I11: no more tasks of a key are at work than may be, a lock has one holder at a time and its tokens grow, and of two tasks
/// that are ready the one of lower rank is started first.
pub(super) fn shared(view: &View<'_>, found: &mut Found<'_>) {
    limits(view, found);
    locks(view, found);
    order(view, found);
}

/// The calls of a task whose result their own run recorded, with when they began and ended: those happened while the task held
/// its place for certain.
fn at_work<'a>(view: &View<'a>, task: &Fact) -> Vec<(&'a Call, i64, i64)> {
    let recorded = recorded(task);
    let begun = view.begun(task.id);
    let mut calls = Vec::new();
    for line in view.lines(task.id) {
        let What::Did(call) = &line.what else { continue };
        let step = call.step.as_str();
        let record = recorded.get(&(step, generation_in(task, step, call.fence)));
        if record.is_none_or(|record| record.run != call.fence) {
            continue;
        }
        let others = begun.get(step).into_iter().flatten();
        let of_run = others.filter(|(other, at)| other.fence == call.fence && *at <= line.at);
        calls.extend(of_run.map(|(_, at)| *at).max().map(|began| (call, began, line.at)));
    }
    calls
}

/// No more tasks of a tenant with one concurrency key are at work at once than may be.
fn limits(view: &View<'_>, found: &mut Found<'_>) {
    let tenants: BTreeSet<&str> = view.tasks().map(|task| task.tenant.as_str()).collect();
    let limits = view.history.setup.limits.iter();
    for (tenant, (key, max)) in limits.flat_map(|limit| tenants.iter().map(move |tenant| (*tenant, limit))) {
        // When each call began and ended, and of which task.
        let mut edges: Vec<(i64, i32, usize)> = Vec::new();
        let shares = |task: &&Fact| task.tenant == tenant && task.concurrency_key.as_deref() == Some(key);
        let tasks: Vec<&Fact> = view.tasks().filter(shares).collect();
        for (number, task) in tasks.iter().enumerate() {
            for (_, began, ended) in at_work(view, task) {
                edges.extend([(began, 1, number), (ended, -1, number)]);
            }
        }
        // An end comes before a begin at the same moment.
        edges.sort_by_key(|(at, change, _)| (*at, *change));
        let mut working: BTreeMap<usize, i32> = BTreeMap::new();
        for (_, change, task) in edges {
            *working.entry(task).or_default() += change;
            working.retain(|_, calls| *calls > 0);
            if working.len() > *max as usize {
                let ids: Vec<String> = working.keys().map(|number| tasks[*number].id.to_string()).collect();
                found.of(tasks[task].id, format!("'{key}' allows {max} at once; at work were {}", ids.join(", ")));
                break;
            }
        }
    }
}

/// What is done under a lock: one call.
struct Under<'a> {
    task: TaskId,
    call: &'a Call,
    token: u64,
    began: i64,
    ended: i64,
}

/// What is done under one lock of a tenant never overlaps, and comes with tokens that grow from one holder to the next. Who gives a
/// lock back had it until then.
fn locks(view: &View<'_>, found: &mut Found<'_>) {
    let mut locks: BTreeMap<(&str, &str), Vec<Under<'_>>> = BTreeMap::new();
    for task in view.tasks() {
        let mut tokens: BTreeMap<(u64, &str), u64> = BTreeMap::new();
        for line in view.lines(task.id) {
            match &line.what {
                What::Locked { fence, step, token, .. } => {
                    let known = tokens.entry((*fence, step)).or_insert(*token);
                    if known != token {
                        found.of(
                            task.id,
                            format!("run {fence} was given {known} and {token} for the lock of {step}"),
                        );
                    }
                }
                What::Released { lock, held: false, .. } => {
                    found.of(task.id, format!("lock '{lock}' was not the task's any more when it gave it back"));
                }
                _ => {}
            }
        }
        let lock_of = |step: &str| {
            task.program.ops.iter().find_map(|op| match op {
                Op::Locked { lock, step: under } if under.name == step => Some(lock.as_str()),
                _ => None,
            })
        };
        for (call, began, ended) in at_work(view, task) {
            let Some(lock) = lock_of(&call.step) else { continue };
            let Some(token) = tokens.get(&(call.fence, call.step.as_str())).copied() else {
                found.of(task.id, format!("step {} was called without its lock", call.step));
                continue;
            };
            let under = Under { task: task.id, call, token, began, ended };
            locks.entry((&task.tenant, lock)).or_default().push(under);
        }
    }
    for ((_, lock), mut holders) in locks {
        holders.sort_by_key(|under| under.began);
        for pair in holders.windows(2) {
            let (before, after) = (&pair[0], &pair[1]);
            let (one, two) = (&before.call.step, &after.call.step);
            if before.ended > after.began {
                found.of(
                    after.task,
                    format!("under '{lock}', step {two} began while {one} of {} went on", before.task),
                );
            }
            let (was, is) = (before.token, after.token);
            if is < was || (is == was && before.task != after.task) {
                found.of(after.task, format!("'{lock}' was held with token {is} after {was}, by {}", before.task));
            }
        }
    }
}

/// Of two tasks that wait in a queue at the same time, the one of lower rank is started first: one that came later passes another
/// only by a higher priority, and only for as long as that is worth. What has a limit of its own may have to wait for that.
fn order(view: &View<'_>, found: &mut Found<'_>) {
    struct Waiting {
        task: TaskId,
        rank: i64,
        ready: i64,
        started: i64,
    }
    let slow = &view.history.setup.slow;
    let passed_over = PASSED_OVER + view.history.setup.held;
    let mut all: Vec<Waiting> = Vec::new();
    for task in view.tasks().filter(|task| task.concurrency_key.is_none() && task.is_root()) {
        let Some(place) = task.events.iter().position(|event| event.kind == "task.started") else { continue };
        let (before, started) = (&task.events[..place], task.events[place].time.as_microsecond());
        // One that was cancelled before it began, and opened again, comes back to the line then.
        let resumed = before.iter().rfind(|event| is_resumed(event)).map(|event| event.time.as_microsecond());
        let ready = resumed.unwrap_or(task.created_at);
        let rank = task.created_at - i64::from(task.priority) * AGEING;
        all.push(Waiting { task: task.id, rank, ready, started });
    }
    all.sort_by_key(|waiting| waiting.started);
    let mut by_ready: Vec<&Waiting> = all.iter().collect();
    by_ready.sort_by_key(|waiting| waiting.ready);
    let mut coming = by_ready.into_iter().peekable();
    // Those that have been ready for long enough, the lowest rank first.
    let mut line: BinaryHeap<Reverse<(i64, i64, i64, TaskId)>> = BinaryHeap::new();
    for one in &all {
        while let Some(other) = coming.next_if(|other| other.ready + passed_over < one.started) {
            line.push(Reverse((other.rank, other.started, other.ready, other.task)));
        }
        while line.peek().is_some_and(|Reverse((_, started, ..))| *started <= one.started + passed_over) {
            line.pop();
        }
        let Some(Reverse((rank, started, ready, task))) = line.peek().copied() else { continue };
        if rank >= one.rank || slow.iter().any(|(from, to)| *from <= started && ready <= *to) {
            continue;
        }
        let late = started - one.started;
        found.of(
            task,
            format!("it was first in line when {} was started, and was started {late} µs later", one.task),
        );
        // It is said once.
        line.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::history::History;
    use crate::ledger::Line;
    use longhaul::{Effect, State};

    const NONE: [u8; 0] = [];

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

    fn locking() -> Fact {
        let mut task = fact(vec![], State::Completed);
        task.program.ops = vec![Op::Locked { lock: "left".into(), step: step("a", Effect::Idempotent) }];
        task.submitted().started(1).done(1, "a").ended(1)
    }

    fn under(task: &Fact, token: u64, from: i64, to: i64) -> Vec<Line> {
        let (call, lock) = (task.call("a", 1, 1), "left".to_owned());
        vec![
            line(from - 1, What::Locked { task: task.id, fence: 1, step: "a".into(), lock, token }),
            line(from, What::Begin(call.clone())),
            line(to, What::Did(call)),
        ]
    }

    #[test]
    fn two_holders_at_once_a_token_that_does_not_grow_and_a_lock_lost_break_i11() {
        let (one, two) = (locking(), locking());
        let run = |first: Vec<Line>, second: Vec<Line>| -> History {
            history([one.clone(), two.clone()], first.into_iter().chain(second).collect())
        };
        assert_eq!(broken(&run(under(&one, 1, 10, 20), under(&two, 2, 21, 30))), NONE);
        assert_eq!(broken(&run(under(&one, 1, 10, 20), under(&two, 2, 15, 30))), [11], "at once");
        assert_eq!(broken(&run(under(&one, 2, 10, 20), under(&two, 1, 21, 30))), [11], "a smaller token");
        assert_eq!(broken(&run(under(&one, 1, 10, 20), under(&two, 1, 21, 30))), [11], "the same token");
        assert_eq!(broken(&run(under(&one, 1, 10, 20), under(&two, 2, 21, 30)[1..].to_vec())), [11], "without it");
        let lost = line(40, What::Released { task: one.id, lock: "left".into(), held: false });
        assert_eq!(broken(&run(under(&one, 1, 10, 20), vec![lost])), [11]);
    }

    #[test]
    fn one_that_is_first_in_line_and_is_passed_over_breaks_i11() {
        let waiting = |priority, created_at: i64, started: i64| {
            let mut task = fact(vec![], State::Completed).submitted().started(1).ended(1);
            (task.priority, task.created_at) = (priority, created_at * 1_000_000);
            for (number, event) in task.events.iter_mut().enumerate().skip(1) {
                event.time = jiff::Timestamp::from_second(started + number as i64).expect("a time");
            }
            task
        };
        let run = |one: Fact, other: Fact| broken(&history([one, other], vec![]));
        assert_eq!(run(waiting(5, 1, 20), waiting(9, 2, 10)), NONE, "the urgent one first");
        assert_eq!(run(waiting(5, 2, 20), waiting(5, 1, 10)), NONE, "the older one first");
        assert_eq!(run(waiting(5, 1, 10), waiting(9, 2, 20)), [11], "the urgent one waited");
        assert_eq!(run(waiting(5, 2, 10), waiting(5, 1, 20)), [11], "the older one waited");
        assert_eq!(run(waiting(5, 1, 10), waiting(9, 15, 20)), NONE, "it was not there yet");
        let mut limited = waiting(9, 2, 20);
        limited.concurrency_key = Some("one".into());
        assert_eq!(run(waiting(5, 1, 10), limited), NONE, "it waited for its limit");
        let resumed = |at: i64| {
            let mut task = waiting(9, 2, 20);
            let mut event = task.events[0].clone();
            (event.kind, event.time) =
                ("task.resumed".to_owned(), jiff::Timestamp::from_second(at).expect("a time"));
            task.events.insert(1, event);
            for (number, event) in task.events.iter_mut().enumerate() {
                event.seq = number as u64 + 1;
            }
            task.last_seq += 1;
            task
        };
        assert_eq!(run(waiting(5, 1, 10), resumed(15)), NONE, "it came back later");
        assert_eq!(run(waiting(5, 1, 10), resumed(5)), [11], "it came back before");
    }
}
