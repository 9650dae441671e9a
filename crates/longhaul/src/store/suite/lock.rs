//! Locks: one holder at a time, in the order of asking, with tokens that only grow.

use std::time::Duration;

use super::bed::{Bed, LEASE, completed, failed, secs, suspended, write};
use crate::record::Record;
use crate::store::locks::{LOOK, Link, News};
use crate::store::{Action, CommitRefused, LOG_PAGE, Lease, LockAction, LockChange, Locked, Outcome, Settings};
use crate::task::{NewTask, Phase, State, TaskId};

const HOUR: Duration = Duration::from_secs(3_600);

pub(super) fn change(lease: &Lease, name: &str, address: &str, action: LockAction) -> LockChange {
    LockChange {
        tenant: lease.tenant.clone(),
        task: lease.task,
        fence: lease.fence,
        known_seq: lease.last_seq,
        address: address.to_owned(),
        name: name.to_owned(),
        action,
    }
}

fn asking(lease: &Lease, name: &str) -> LockChange {
    let action = LockAction::Acquire { max_hold: HOUR, within: None };
    change(lease, name, &format!("lock/0/lock {name}"), action)
}

pub(super) async fn make(bed: &Bed, change: &LockChange) -> Result<Locked, CommitRefused> {
    bed.store.lock(change).await.expect("the store answers")
}

/// Asks for a lock that is free or not.
pub(super) async fn ask(bed: &Bed, lease: &Lease, name: &str) {
    make(bed, &asking(lease, name)).await.expect("the lease is current");
}

pub(super) async fn release(bed: &Bed, lease: &Lease, name: &str, token: u64) {
    let change = change(lease, name, &format!("lock/0/release {name}"), LockAction::Release { token });
    make(bed, &change).await.expect("the lease is current");
}

/// Everything that arrived for a task, with its address.
async fn arrived(bed: &Bed, task: TaskId) -> Vec<(String, News)> {
    let records = bed.records(task).await.into_iter();
    let arrived = records.filter_map(|record| match record {
        Record::Arrived { at, message, .. } => Some((at, serde_json::from_str(message.get()).expect("news"))),
        _ => None,
    });
    arrived.collect()
}

/// The tokens a task was given for a lock.
pub(super) async fn tokens(bed: &Bed, task: TaskId) -> Vec<u64> {
    let arrived = arrived(bed, task).await.into_iter();
    let granted = arrived.filter_map(|(_, news)| match news {
        News::Granted { token, .. } => Some(token),
        _ => None,
    });
    granted.collect()
}

pub(super) async fn token(bed: &Bed, lease: &Lease) -> u64 {
    let tokens = tokens(bed, lease.task).await;
    assert_eq!(tokens.len(), 1, "it has the lock, once");
    tokens[0]
}

pub(super) async fn waits(bed: &Bed, lease: &Lease) -> bool {
    tokens(bed, lease.task).await.is_empty()
}

/// So many tasks, each leased.
pub(super) async fn several(bed: &Bed, count: usize) -> Vec<Lease> {
    let mut leases = Vec::new();
    for _ in 0..count {
        leases.push(bed.running().await);
    }
    leases
}

async fn a_free_lock_is_had_at_once_and_told_in_the_log(bed: Bed) {
    let lease = bed.running().await;
    let locked = make(&bed, &asking(&lease, "db")).await.expect("the lease is current");
    let events = bed.events(lease.task).await;
    let last = events.last().expect("one");
    assert_eq!((last.kind.as_str(), last.seq), ("lock.acquired", locked.last_seq));
    assert_eq!(last.step.as_deref(), Some("lock db"));
    assert_eq!(last.data["token"], token(&bed, &lease).await);
    assert_eq!(bed.state(lease.task).await, State::Running);
    bed.commit(write(&lease, 1).step("a")).await.expect("the run goes on");
}

async fn a_lock_has_one_holder_and_goes_to_who_asked_first(bed: Bed) {
    let leases = several(&bed, 5).await;
    for lease in &leases {
        ask(&bed, lease, "db").await;
    }
    let mut last = 0;
    for (index, lease) in leases.iter().enumerate() {
        for other in &leases[index + 1..] {
            assert!(waits(&bed, other).await);
        }
        let token = token(&bed, lease).await;
        assert!(token > last, "tokens grow");
        last = token;
        release(&bed, lease, "db", token).await;
        assert_eq!(bed.kinds(lease.task).await.last().map(String::as_str), Some("lock.released"));
    }
}

async fn a_task_that_waits_is_woken_by_the_lock(bed: Bed) {
    let (holder, waiter) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    ask(&bed, &waiter, "db").await;
    bed.end(&waiter, suspended("lock", "db", None)).await;
    assert!(bed.claim(5).await.is_empty());
    release(&bed, &holder, "db", token(&bed, &holder).await).await;
    assert_eq!(bed.claim_one().await.task, waiter.task);
    token(&bed, &waiter).await;
}

async fn other_names_and_other_tenants_are_other_locks(bed: Bed) {
    let (one, two) = (bed.running().await, bed.running().await);
    let mut foreign = NewTask::new("h", &1);
    foreign.tenant = "other".to_owned();
    let foreign = bed.running_as(foreign).await;
    ask(&bed, &one, "db").await;
    ask(&bed, &two, "disk").await;
    ask(&bed, &foreign, "db").await;
    for lease in [&one, &two] {
        token(&bed, lease).await;
    }
    let log = bed.store.log(foreign.task, 0, LOG_PAGE).await.expect("the store answers");
    assert!(log.iter().any(|row| row.events.contains("lock.acquired")));
}

async fn a_lost_answer_changes_nothing(bed: Bed) {
    let (holder, next) = (bed.running().await, bed.running().await);
    for lease in [&holder, &next] {
        ask(&bed, lease, "db").await;
        ask(&bed, lease, "db").await;
    }
    let first = token(&bed, &holder).await;
    for _ in 0..2 {
        release(&bed, &holder, "db", first).await;
    }
    let news = arrived(&bed, holder.task).await;
    assert_eq!(news.len(), 2, "{news:?}");
    assert_eq!(news[1], ("lock/0/release db".to_owned(), News::Released { held: true }));
    let second = token(&bed, &next).await;
    // Also when it was taken away in the meantime.
    bed.advance(3_601);
    bed.heartbeat(&[&holder, &next]).await;
    bed.sweep().await;
    ask(&bed, &next, "db").await;
    assert_eq!(token(&bed, &next).await, second);
    let last = bed.running().await;
    ask(&bed, &last, "db").await;
    assert!(token(&bed, &last).await > second);
}

async fn a_lock_that_is_not_held_cannot_be_given_back(bed: Bed) {
    let (holder, other) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    let held = token(&bed, &holder).await;
    release(&bed, &other, "db", held).await;
    assert_eq!(arrived(&bed, other.task).await[0].1, News::Released { held: false });
    assert_eq!(bed.kinds(other.task).await.last().map(String::as_str), Some("lock.not_held"));
    let waiter = bed.running().await;
    ask(&bed, &waiter, "db").await;
    assert!(waits(&bed, &waiter).await, "it is held still");
}

async fn who_holds_a_lock_has_it_again_with_the_same_token_and_for_longer(bed: Bed) {
    let (holder, waiter) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    ask(&bed, &waiter, "db").await;
    bed.advance(3_000);
    bed.heartbeat(&[&holder, &waiter]).await;
    let action = LockAction::Acquire { max_hold: HOUR, within: None };
    make(&bed, &change(&holder, "db", "lock/0/lock db#2", action)).await.expect("the lease is current");
    let tokens = tokens(&bed, holder.task).await;
    assert_eq!(tokens.len(), 2);
    assert_eq!(tokens[0], tokens[1]);
    bed.pass(3_000).await;
    assert!(waits(&bed, &waiter).await, "max_hold began anew");
    bed.pass(700).await;
    assert!(!waits(&bed, &waiter).await);
}

async fn one_release_ends_it_however_often_it_was_asked_for(bed: Bed) {
    let (holder, waiter) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    let action = LockAction::Acquire { max_hold: HOUR, within: None };
    make(&bed, &change(&holder, "db", "lock/0/lock db#2", action)).await.expect("the lease is current");
    ask(&bed, &waiter, "db").await;
    let token = tokens(&bed, holder.task).await[0];
    release(&bed, &holder, "db", token).await;
    assert!(!waits(&bed, &waiter).await);
}

async fn a_lock_is_kept_over_suspension_retry_and_a_lost_worker(bed: Bed) {
    let (holder, waiter) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    ask(&bed, &waiter, "db").await;
    bed.end(&waiter, suspended("lock", "db", None)).await;
    bed.lose(&holder).await;
    let holder = bed.claim_one().await;
    bed.end(&holder, super::bed::retry(0)).await;
    let holder = bed.claim_one().await;
    bed.end(&holder, suspended("timer", "sleep", Some(60))).await;
    bed.pass(30).await;
    assert!(waits(&bed, &waiter).await);
    bed.pass(31).await;
    let holder = bed.claim_one().await;
    // The new run gives it back.
    release(&bed, &holder, "db", token(&bed, &holder).await).await;
    assert!(!waits(&bed, &waiter).await);
}

async fn a_final_state_passes_the_lock_on_by_request_or_by_the_sweep(bed: Bed) {
    for outcome in [completed(), failed()] {
        for by_sweep in [false, true] {
            let (holder, waiter) = (bed.running().await, bed.running().await);
            ask(&bed, &holder, "db").await;
            ask(&bed, &waiter, "db").await;
            bed.store.let_go(&[holder.task]).await.expect("the store answers");
            assert!(waits(&bed, &waiter).await, "it has not ended");
            bed.end(&holder, outcome.clone()).await;
            let events = bed.events(holder.task).await.len();
            if by_sweep {
                assert_eq!(bed.sweep().await.locks, 1);
            } else {
                bed.store.let_go(&[holder.task]).await.expect("the store answers");
            }
            let token = token(&bed, &waiter).await;
            assert_eq!(bed.events(holder.task).await.len(), events, "nothing is told after the end");
            release(&bed, &waiter, "db", token).await;
            bed.end(&waiter, completed()).await;
            bed.sweep().await;
            assert_eq!(bed.sweep().await.locks, 0, "once is enough");
        }
    }
}

async fn a_cancelled_or_expired_holder_passes_the_lock_on(bed: Bed) {
    let deadline = NewTask::new("h", &1).timeout(secs(50));
    for (task, cancel) in [(NewTask::new("h", &1), true), (deadline, false)] {
        let (holder, waiter) = (bed.running_as(task).await, bed.running().await);
        ask(&bed, &holder, "db").await;
        ask(&bed, &waiter, "db").await;
        bed.end(&holder, suspended("signal", "go", None)).await;
        bed.end(&waiter, suspended("lock", "db", None)).await;
        if cancel {
            bed.cancel(holder.task).await.expect("cancelled");
        } else {
            bed.pass(51).await;
        }
        assert!(bed.state(holder.task).await.is_final());
        let waiter = bed.claim_one().await;
        release(&bed, &waiter, "db", token(&bed, &waiter).await).await;
        bed.end(&waiter, completed()).await;
    }
}

async fn who_was_cancelled_failed_or_deleted_in_line_is_passed_over(bed: Bed) {
    let leases = several(&bed, 5).await;
    for lease in &leases {
        ask(&bed, lease, "db").await;
    }
    let [holder, cancelled, ended, deleted, last] = &leases[..] else { panic!("five") };
    bed.end(cancelled, suspended("lock", "db", None)).await;
    bed.cancel(cancelled.task).await.expect("cancelled");
    for lease in [ended, deleted] {
        bed.end(lease, failed()).await;
    }
    bed.control(deleted.task, Action::Delete).await.expect("deleted");
    release(&bed, holder, "db", token(&bed, holder).await).await;
    assert!(!waits(&bed, last).await);
    for lease in [cancelled, ended] {
        assert!(waits(&bed, lease).await);
    }
}

async fn a_long_row_of_tasks_that_ended_does_not_keep_the_lock_from_the_next(bed: Bed) {
    let leases = several(&bed, 2 * LOOK + 3).await;
    for lease in &leases {
        ask(&bed, lease, "db").await;
    }
    let (holder, last) = (&leases[0], &leases[leases.len() - 1]);
    for lease in &leases[1..leases.len() - 1] {
        bed.end(lease, failed()).await;
    }
    release(&bed, holder, "db", token(&bed, holder).await).await;
    let late = bed.running().await;
    ask(&bed, &late, "db").await;
    assert!(waits(&bed, &late).await, "it does not overtake");
    bed.sweep().await;
    assert!(!waits(&bed, last).await);
    assert!(waits(&bed, &late).await);
}

async fn a_task_that_undoes_leaves_the_line_but_keeps_what_it_holds(bed: Bed) {
    let leases = several(&bed, 3).await;
    let [first, undoing, last] = &leases[..] else { panic!("three") };
    ask(&bed, first, "db").await;
    ask(&bed, undoing, "disk").await;
    ask(&bed, undoing, "db").await;
    ask(&bed, last, "db").await;
    let backward =
        write(undoing, 1).event("progress").backward().with(|commit| commit.phase = Some(Phase::Compensating));
    bed.commit(backward).await.expect("it undoes");
    release(&bed, first, "db", token(&bed, first).await).await;
    assert!(!waits(&bed, last).await, "the line goes on without it");
    ask(&bed, last, "disk").await;
    assert_eq!(tokens(&bed, last.task).await.len(), 1, "it holds what it held");
    assert!(matches!(make(&bed, &asking(undoing, "more")).await, Err(CommitRefused::Cancelled)));
    bed.commit(write(undoing, 2).backward().outcome(failed())).await.expect("it ends");
    bed.sweep().await;
    assert_eq!(tokens(&bed, last.task).await.len(), 2);
}

async fn max_hold_passes_the_lock_on_with_a_larger_token(bed: Bed) {
    let (holder, waiter) = (bed.running().await, bed.running().await);
    ask(&bed, &holder, "db").await;
    ask(&bed, &waiter, "db").await;
    let old = token(&bed, &holder).await;
    bed.end(&holder, suspended("signal", "go", None)).await;
    bed.end(&waiter, suspended("lock", "db", None)).await;
    let due = bed.sweep().await.next_due_in.expect("known");
    assert!((1..=3_600_000_000).contains(&due), "{due}");
    bed.pass(3_599).await;
    assert!(waits(&bed, &waiter).await);
    bed.pass(2).await;
    assert!(token(&bed, &waiter).await > old);
    assert_eq!(bed.kinds(holder.task).await.last().map(String::as_str), Some("lock.expired"));
    assert_eq!(bed.state(holder.task).await, State::Waiting, "it is not woken by that");
    let claimed = bed.claim_one().await;
    assert_eq!(claimed.task, waiter.task);
}

async fn a_wait_with_a_bound_ends_there_and_leaves_the_line(bed: Bed) {
    let leases = several(&bed, 3).await;
    let [holder, patient, hasty] = &leases[..] else { panic!("three") };
    ask(&bed, holder, "db").await;
    let action = LockAction::Acquire { max_hold: HOUR, within: Some(secs(30)) };
    make(&bed, &change(hasty, "db", "lock/0/lock db", action)).await.expect("the lease is current");
    ask(&bed, patient, "db").await;
    bed.end(hasty, suspended("lock", "db", None)).await;
    bed.pass(10).await;
    assert!(bed.claim(5).await.is_empty());
    bed.heartbeat(&[holder, patient]).await;
    bed.advance(10);
    bed.heartbeat(&[holder, patient]).await;
    bed.pass(11).await;
    assert_eq!(arrived(&bed, hasty.task).await, [("lock/0/lock db".to_owned(), News::TimedOut)]);
    assert_eq!(bed.claim_one().await.task, hasty.task);
    release(&bed, holder, "db", token(&bed, holder).await).await;
    assert!(!waits(&bed, patient).await);
}

async fn tokens_grow_although_the_lock_was_free_and_its_tasks_are_gone(bed: Bed) {
    let mut last = 0;
    bed.configure(Settings { retention: Some(secs(10)), ..Settings::default() }).await;
    for _ in 0..3 {
        let holder = bed.running().await;
        ask(&bed, &holder, "db").await;
        let token = token(&bed, &holder).await;
        assert!(token > last);
        last = token;
        bed.end(&holder, completed()).await;
        bed.pass(1_000_000).await;
        bed.sweep().await;
        assert!(bed.find(holder.task).await.is_none(), "removed");
    }
}

async fn tasks_that_would_wait_for_each_other_are_told_so(bed: Bed) {
    let leases = several(&bed, 3).await;
    let [a, b, c] = &leases[..] else { panic!("three") };
    for (lease, held) in [(a, "x"), (b, "y"), (c, "z")] {
        ask(&bed, lease, held).await;
    }
    ask(&bed, a, "y").await;
    ask(&bed, b, "z").await;
    ask(&bed, c, "x").await;
    let news = arrived(&bed, c.task).await;
    let link = |lease: &Lease, lock: &str| Link { task: lease.task, lock: lock.to_owned() };
    let cycle = vec![link(c, "x"), link(a, "y"), link(b, "z")];
    assert_eq!(news[1], ("lock/0/lock x".to_owned(), News::Deadlock { cycle }));
    assert_eq!(bed.kinds(c.task).await.last().map(String::as_str), Some("lock.deadlock"));
    // It is not in line: the lock goes on without it, and what it holds resolves the rest.
    bed.end(c, failed()).await;
    bed.store.let_go(&[c.task]).await.expect("the store answers");
    assert_eq!(tokens(&bed, b.task).await.len(), 2);
}

async fn who_waits_in_line_before_a_task_blocks_it_too(bed: Bed) {
    let leases = several(&bed, 3).await;
    let [holder, both, last] = &leases[..] else { panic!("three") };
    ask(&bed, holder, "y").await;
    ask(&bed, last, "w").await;
    // Waits for two at once: it has y before `last` has it, and wants w, which `last` holds.
    ask(&bed, both, "y").await;
    ask(&bed, both, "w").await;
    ask(&bed, last, "y").await;
    let news = arrived(&bed, last.task).await;
    assert!(matches!(&news[1].1, News::Deadlock { cycle } if cycle.len() == 2), "{news:?}");
}

async fn a_wait_with_a_bound_is_no_deadlock(bed: Bed) {
    let (a, b) = (bed.running().await, bed.running().await);
    ask(&bed, &a, "x").await;
    ask(&bed, &b, "y").await;
    let action = LockAction::Acquire { max_hold: HOUR, within: Some(secs(5)) };
    make(&bed, &change(&a, "y", "lock/0/lock y", action)).await.expect("the lease is current");
    ask(&bed, &b, "x").await;
    assert_eq!(arrived(&bed, b.task).await.len(), 1, "it waits");
    bed.pass(6).await;
    assert_eq!(arrived(&bed, a.task).await[1].1, News::TimedOut);
}

async fn two_who_close_a_circle_at_the_same_time_do_not_miss_each_other(bed: Bed) {
    let other = bed.another_process().await;
    let (mut pairs, mut asks) = (Vec::new(), Vec::new());
    for number in 0..20 {
        let (a, b) = (bed.running().await, bed.running().await);
        let (x, y) = (format!("x{number}"), format!("y{number}"));
        ask(&bed, &a, &x).await;
        ask(&bed, &b, &y).await;
        asks.extend([(bed.clone(), asking(&a, &y)), (other.clone(), asking(&b, &x))]);
        pairs.push([a.task, b.task]);
    }
    let asked = asks.into_iter().map(|(bed, asking)| {
        tokio::spawn(async move { make(&bed, &asking).await.expect("the lease is current") })
    });
    for asked in asked.collect::<Vec<_>>() {
        asked.await.expect("no panic");
    }
    for pair in pairs {
        let mut told = 0;
        for task in pair {
            let news = arrived(&bed, task).await;
            told += news.iter().filter(|(_, news)| matches!(news, News::Deadlock { .. })).count();
        }
        assert_eq!(told, 1, "one of them, not both");
    }
}

async fn only_the_current_run_of_a_live_task_asks(bed: Bed) {
    let lease = bed.running().await;
    bed.lose(&lease).await;
    assert!(matches!(make(&bed, &asking(&lease, "db")).await, Err(CommitRefused::Fenced { .. })));
    let lease = bed.claim_one().await;
    bed.cancel(lease.task).await.expect("asked to stop");
    assert!(matches!(make(&bed, &asking(&lease, "db")).await, Err(CommitRefused::Cancelled)));
    bed.commit(write(&lease, 1).backward().outcome(super::bed::cancelled())).await.expect("it ends");
    let late = bed.running_as(NewTask::new("h", &1).timeout(secs(5))).await;
    bed.advance(6);
    assert!(matches!(make(&bed, &asking(&late, "db")).await, Err(CommitRefused::DeadlineExceeded)));
    let free = bed.running().await;
    ask(&bed, &free, "db").await;
    token(&bed, &free).await;
}

async fn a_resumed_task_asks_anew(bed: Bed) {
    let lease = bed.running().await;
    ask(&bed, &lease, "db").await;
    let first = token(&bed, &lease).await;
    bed.end(&lease, failed()).await;
    // Nobody has looked after its locks yet.
    bed.control(lease.task, Action::Resume).await.expect("resumed");
    let lease = bed.claim_one().await;
    ask(&bed, &lease, "db").await;
    assert!(tokens(&bed, lease.task).await[1] > first);
}

async fn many_processes_at_once_never_share_a_lock(bed: Bed) {
    const TASKS: usize = 24;
    let leases = several(&bed, TASKS).await;
    let other = bed.another_process().await;
    let mut asked = Vec::new();
    for (index, lease) in leases.iter().cloned().enumerate() {
        let bed = if index % 2 == 0 { bed.clone() } else { other.clone() };
        asked.push(tokio::spawn(async move {
            ask(&bed, &lease, "db").await;
            bed.end(&lease, suspended("lock", "db", None)).await;
        }));
    }
    for asked in asked {
        // A run that got the lock meanwhile suspends all the same here; it is claimed below.
        asked.await.expect("no panic");
    }
    // Each holder in turn: it and nobody else has a token that was not given back.
    let mut seen = Vec::new();
    while seen.len() < TASKS {
        let mut holders = Vec::new();
        for lease in &leases {
            let tokens = tokens(&bed, lease.task).await;
            if !tokens.is_empty() && !seen.contains(&lease.task) {
                holders.push((lease.clone(), tokens[0]));
            }
        }
        assert_eq!(holders.len(), 1, "exactly one");
        let (holder, _) = holders.remove(0);
        seen.push(holder.task);
        bed.cancel(holder.task).await.expect("cancelled");
    }
}

async fn sweeps_changes_and_ends_at_once_lose_nobody(bed: Bed) {
    const TASKS: usize = 16;
    let leases = several(&bed, TASKS).await;
    let other = bed.another_process().await;
    let names = ["a", "b", "c"];
    let work = leases.iter().cloned().enumerate().map(|(index, lease)| {
        let bed = if index % 2 == 0 { bed.clone() } else { other.clone() };
        tokio::spawn(async move {
            for turn in 0..names.len() {
                let name = names[(index + turn) % names.len()];
                // With a bound, so that no circle refuses anyone.
                let action = LockAction::Acquire { max_hold: HOUR, within: Some(HOUR) };
                let asking = change(&lease, name, &format!("lock/0/lock {name}"), action);
                make_patiently(&bed, &asking).await;
                if turn == 1 {
                    bed.store.sweep(5, true).await.ok();
                }
            }
            let end = write(&lease, 1)
                .outcome(Outcome::Failed { error: crate::error::TaskError::fatal("over", "over"), attempt: true });
            bed.commit(end).await.expect("the lease is current");
            bed.store.let_go(&[lease.task]).await.ok();
        })
    });
    for work in work.collect::<Vec<_>>() {
        work.await.expect("no panic");
    }
    bed.sweep().await;
    bed.sweep().await;
    // Everyone ended: all three are free again.
    let last = bed.running().await;
    for name in names {
        ask(&bed, &last, name).await;
    }
    assert_eq!(tokens(&bed, last.task).await.len(), names.len());
}

/// As runs do: a store that could not be reached is asked again.
async fn make_patiently(bed: &Bed, change: &LockChange) {
    loop {
        match bed.store.lock(change).await {
            Ok(answer) => {
                answer.expect("the lease is current");
                return;
            }
            Err(error) => assert!(error.is_unavailable(), "{error}"),
        }
    }
}

async fn a_lease_that_runs_out_leaves_the_lock_to_the_task(bed: Bed) {
    let holder = bed.running().await;
    ask(&bed, &holder, "db").await;
    bed.pass(LEASE.as_secs() + 1).await;
    let again = bed.claim_one().await;
    // The new run asks under the same address, not knowing that it was answered.
    ask(&bed, &again, "db").await;
    assert!(tokens(&bed, holder.task).await.windows(2).all(|pair| pair[0] == pair[1]));
}

on_every_store![
    a_free_lock_is_had_at_once_and_told_in_the_log,
    a_lock_has_one_holder_and_goes_to_who_asked_first,
    a_task_that_waits_is_woken_by_the_lock,
    other_names_and_other_tenants_are_other_locks,
    a_lost_answer_changes_nothing,
    a_lock_that_is_not_held_cannot_be_given_back,
    who_holds_a_lock_has_it_again_with_the_same_token_and_for_longer,
    one_release_ends_it_however_often_it_was_asked_for,
    a_lock_is_kept_over_suspension_retry_and_a_lost_worker,
    a_final_state_passes_the_lock_on_by_request_or_by_the_sweep,
    a_cancelled_or_expired_holder_passes_the_lock_on,
    who_was_cancelled_failed_or_deleted_in_line_is_passed_over,
    a_long_row_of_tasks_that_ended_does_not_keep_the_lock_from_the_next,
    a_task_that_undoes_leaves_the_line_but_keeps_what_it_holds,
    max_hold_passes_the_lock_on_with_a_larger_token,
    a_wait_with_a_bound_ends_there_and_leaves_the_line,
    tokens_grow_although_the_lock_was_free_and_its_tasks_are_gone,
    tasks_that_would_wait_for_each_other_are_told_so,
    who_waits_in_line_before_a_task_blocks_it_too,
    a_wait_with_a_bound_is_no_deadlock,
    two_who_close_a_circle_at_the_same_time_do_not_miss_each_other,
    only_the_current_run_of_a_live_task_asks,
    a_resumed_task_asks_anew,
    many_processes_at_once_never_share_a_lock,
    sweeps_changes_and_ends_at_once_lose_nobody,
    a_lease_that_runs_out_leaves_the_lock_to_the_task,
];
