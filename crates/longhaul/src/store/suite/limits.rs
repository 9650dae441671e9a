//! Bounds on running tasks, per queue, tenant and concurrency key: never exceeded, and a slot
//! that is free is used.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::bed::{Bed, LEASE, cancelled, completed, failed, retry, secs, suspended, write};
use crate::store::{Action, Lease, Outcome, QueueSettings, Settings};
use crate::task::{NewTask, State};

fn keyed(key: &str) -> NewTask {
    NewTask::new("h", &1).concurrency_key(key)
}

fn at_most(max_running: u32) -> QueueSettings {
    QueueSettings { max_running: Some(max_running), ..QueueSettings::default() }
}

async fn one_task_per_concurrency_key_runs_at_once(bed: Bed) {
    let first = bed.submit(keyed("a")).await;
    let second = bed.submit(keyed("a")).await;
    let other = bed.submit(keyed("b")).await;
    let theirs = bed.submit(keyed("a").tenant("acme")).await;
    assert_eq!(bed.claim_ids(1).await, [first]);
    assert_eq!(bed.claim_ids(10).await, [other, theirs], "keys of two tenants never meet");
    assert!(bed.claim(10).await.is_empty());
    assert_eq!(bed.state(second).await, State::Pending);
}

async fn one_claim_takes_no_more_than_a_limit_allows(bed: Bed) {
    bed.configure_queue("q", at_most(2)).await;
    for n in 0..5 {
        bed.submit(NewTask::new("h", &n).queue("q")).await;
        bed.submit(keyed("a")).await;
    }
    let leases = bed.claim(100).await;
    assert_eq!(leases.iter().filter(|lease| lease.queue == "q").count(), 2);
    assert_eq!(leases.len(), 3);
}

async fn a_concurrency_key_that_a_setting_names_has_its_bound(bed: Bed) {
    bed.configure(Settings { key_max_running: [("gpu".to_owned(), 3)].into(), ..Settings::default() }).await;
    for _ in 0..5 {
        bed.submit(keyed("gpu")).await;
    }
    assert_eq!(bed.claim(10).await.len(), 3);
}

async fn a_tenant_has_its_bound_across_queues_and_others_are_not_concerned(bed: Bed) {
    bed.configure(Settings { tenant_max_running: [("acme".to_owned(), 2)].into(), ..Settings::default() }).await;
    for n in 0..4 {
        let queue = if n % 2 == 0 { "q" } else { "r" };
        bed.submit(NewTask::new("h", &n).tenant("acme").queue(queue)).await;
    }
    let ours = bed.submit(NewTask::new("h", &1)).await;
    let leases = bed.claim(10).await;
    assert_eq!(leases.iter().filter(|lease| lease.tenant == "acme").count(), 2);
    assert_eq!(leases.last().map(|lease| lease.task), Some(ours));
}

async fn a_bound_of_nothing_lets_nothing_run(bed: Bed) {
    bed.configure_queue("q", at_most(0)).await;
    bed.submit(NewTask::new("h", &1).queue("q")).await;
    assert!(bed.claim(10).await.is_empty());
    bed.configure_queue("q", QueueSettings::default()).await;
    assert_eq!(bed.claim(10).await.len(), 1, "lifting the bound lets it go");
}

async fn a_raised_bound_is_used_at_once_and_a_lowered_one_takes_nothing_away(bed: Bed) {
    bed.configure_queue("q", at_most(1)).await;
    for n in 0..6 {
        bed.submit(NewTask::new("h", &n).queue("q")).await;
    }
    assert_eq!(bed.claim(10).await.len(), 1);
    bed.configure_queue("q", at_most(3)).await;
    let leases = bed.claim(10).await;
    assert_eq!(leases.len(), 2);
    bed.configure_queue("q", at_most(2)).await;
    assert_eq!(bed.queue("q").await.running, 3);
    bed.end(&leases[0], completed()).await;
    assert!(bed.claim(10).await.is_empty());
    bed.end(&leases[1], completed()).await;
    assert_eq!(bed.claim(10).await.len(), 1);
}

async fn a_bound_set_while_tasks_run_counts_those_too(bed: Bed) {
    for n in 0..4 {
        bed.submit(NewTask::new("h", &n).queue("q")).await;
    }
    assert_eq!(bed.claim(2).await.len(), 2);
    bed.configure_queue("q", at_most(2)).await;
    assert!(bed.claim(10).await.is_empty(), "two run already");
}

async fn a_slot_is_free_again_however_its_run_ended(bed: Bed) {
    for outcome in [completed(), failed(), cancelled(), suspended("signal", "go", None), retry(1_000)] {
        let first = bed.submit(keyed("a")).await;
        let second = bed.submit(keyed("a")).await;
        let lease = bed.claim_one().await;
        assert_eq!(lease.task, first);
        let ended = outcome.state();
        bed.end(&lease, outcome).await;
        let lease = bed.claim_one().await;
        assert_eq!(lease.task, second, "after {ended}, without a sweep");
        bed.end(&lease, completed()).await;
    }
}

async fn tasks_with_and_without_a_limit_end_in_one_batch(bed: Bed) {
    for round in 0..3 {
        let held = bed.submit(keyed("a")).await;
        let free = bed.submit(NewTask::new("h", &1)).await;
        let leases = bed.claim(10).await;
        let ends = leases.iter().map(|lease| write(lease, 1).step("s").outcome(completed())).collect();
        let answers = bed.commit_all(ends).await;
        assert!(answers.iter().all(Result::is_ok), "round {round}: {answers:?}");
        for task in [held, free] {
            assert_eq!(bed.state(task).await, State::Completed);
            assert_eq!(bed.kinds(task).await.len(), 4, "written once");
        }
        // With nothing but tasks without limits in between.
        let lease = bed.running().await;
        bed.end(&lease, completed()).await;
    }
}

async fn a_slot_is_free_again_when_its_lease_was_lost_or_handed_back(bed: Bed) {
    let first = bed.submit(keyed("a")).await;
    bed.submit(keyed("a")).await;
    let lease = bed.claim_one().await;
    bed.end(&lease, Outcome::Released).await;
    let lease = bed.claim_one().await;
    assert_eq!(lease.task, first, "back in line with its old rank");
    bed.lose(&lease).await;
    let lease = bed.claim_one().await;
    bed.end(&lease, completed()).await;
    let lease = bed.claim_one().await;
    bed.end(&lease, completed()).await;
}

async fn what_a_limit_holds_back_can_be_cancelled_and_expires_like_anything_else(bed: Bed) {
    let lease = bed.running_as(keyed("a")).await;
    let cancelled = bed.submit(keyed("a")).await;
    let late = bed.submit(keyed("a").timeout(secs(5))).await;
    let last = bed.submit(keyed("a")).await;
    assert!(bed.claim(10).await.is_empty());
    bed.cancel(cancelled).await.expect("cancelled");
    bed.pass(6).await;
    assert_eq!(bed.state(late).await, State::Failed);
    bed.end(&lease, completed()).await;
    assert_eq!(bed.claim_ids(10).await, [last]);
}

async fn what_a_limit_holds_back_goes_in_its_order_and_a_raised_priority_counts(bed: Bed) {
    let lease = bed.running_as(keyed("a")).await;
    let first = bed.submit(keyed("a")).await;
    let second = bed.submit(keyed("a")).await;
    let third = bed.submit(keyed("a")).await;
    assert!(bed.claim(10).await.is_empty());
    bed.control(third, Action::Priority(9)).await.expect("changed");
    let mut order = Vec::new();
    let mut lease = lease;
    for _ in 0..3 {
        bed.end(&lease, completed()).await;
        lease = bed.claim_one().await;
        order.push(lease.task);
    }
    assert_eq!(order, [third, first, second]);
}

async fn many_tasks_held_back_in_front_do_not_block_what_comes_after_them(bed: Bed) {
    let lease = bed.running_as(keyed("a")).await;
    let batch: Vec<NewTask> = (0..300).map(|_| keyed("a")).collect();
    assert!(bed.store.submit(&batch).await.expect("the store answers").iter().all(Result::is_ok));
    let free = bed.submit(NewTask::new("h", &1)).await;
    let mut claimed = Vec::new();
    for _ in 0..10 {
        claimed.extend(bed.claim_ids(1).await);
    }
    assert_eq!(claimed, [free]);
    bed.end(&lease, completed()).await;
    assert_eq!(bed.claim_ids(10).await, [batch[0].id]);
}

async fn a_task_held_back_by_one_limit_does_not_count_in_its_others(bed: Bed) {
    bed.configure_queue("q", at_most(2)).await;
    for key in ["a", "a", "b"] {
        bed.submit(keyed(key).queue("q")).await;
    }
    assert_eq!(bed.claim(10).await.len(), 2, "one of a, one of b");
    let queue = bed.queue("q").await;
    assert_eq!((queue.pending, queue.running), (1, 2));
}

async fn limits_are_never_exceeded_while_many_claim_and_finish(bed: Bed) {
    const TASKS: usize = 160;
    bed.configure(Settings {
        queues: [("q".to_owned(), at_most(5))].into(),
        tenant_max_running: [("acme".to_owned(), 3)].into(),
        key_max_running: [("gpu".to_owned(), 2)].into(),
        ..Settings::default()
    })
    .await;
    let batch: Vec<NewTask> = (0..TASKS)
        .map(|n| {
            let task = NewTask::new("h", &n).queue("q").priority((n % 10) as u8);
            let task = if n % 3 == 0 { task.tenant("acme") } else { task };
            match n % 4 {
                0 => task.concurrency_key("gpu"),
                1 => task.concurrency_key("one"),
                _ => task,
            }
        })
        .collect();
    assert!(bed.store.submit(&batch).await.expect("the store answers").iter().all(Result::is_ok));
    let keys: Arc<BTreeMap<_, _>> =
        Arc::new(batch.iter().map(|task| (task.id, task.concurrency_key.clone())).collect());
    let names = move |lease: &Lease| {
        let mut names = vec![("q".to_owned(), 5), (format!("tenant {}", lease.tenant), 3)];
        names.retain(|(name, _)| name != "tenant default");
        match keys[&lease.task].as_deref() {
            Some("gpu") => names.push((format!("gpu {}", lease.tenant), 2)),
            Some(key) => names.push((format!("{key} {}", lease.tenant), 1)),
            None => {}
        }
        names
    };

    // Counts what runs for sure: up after a claim was answered, down before a finish is asked for.
    let running: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    let count = move |lease: &Lease, up: bool| {
        let mut running = running.lock().expect("no panic");
        for (name, max) in names(lease) {
            let now = running.entry(name.clone()).or_default();
            *now = if up { *now + 1 } else { *now - 1 };
            assert!(*now <= max, "{name}: {now} run, {max} may");
        }
    };
    let left = Arc::new(Mutex::new(TASKS));
    let other = bed.another_process().await;
    let mut workers = Vec::new();
    for n in 0..4 {
        let bed = if n % 2 == 0 { bed.another_worker().await } else { other.another_worker().await };
        let (count, left) = (count.clone(), Arc::clone(&left));
        workers.push(tokio::spawn(async move {
            while *left.lock().expect("no panic") > 0 {
                let leases = bed.claim(3).await;
                for lease in &leases {
                    count(lease, true);
                }
                for (n, lease) in leases.iter().enumerate() {
                    count(lease, false);
                    let first = lease.last_seq == 2;
                    let outcome = if n == 1 && first { Outcome::Released } else { completed() };
                    let ended = outcome.state().is_final();
                    bed.commit(write(lease, 1).outcome(outcome)).await.expect("the lease is current");
                    *left.lock().expect("no panic") -= usize::from(ended);
                }
            }
        }));
    }
    for worker in workers {
        worker.await.expect("no limit was exceeded");
    }
    let queue = bed.queue("q").await;
    assert_eq!((queue.pending, queue.running), (0, 0));
}

async fn limits_hold_over_lost_leases_too(bed: Bed) {
    bed.configure_queue("q", at_most(2)).await;
    for n in 0..6 {
        bed.submit(NewTask::new("h", &n).queue("q")).await;
    }
    for _ in 0..2 {
        assert_eq!(bed.claim(10).await.len(), 2);
        assert_eq!(bed.pass(LEASE.as_secs() + 1).await.expired, 2);
        assert_eq!(bed.queue("q").await.running, 0);
    }
    // The first two are suspects by now and wait for a worker that runs nothing else.
    assert_eq!(bed.claim(10).await.len(), 2);
    assert!(bed.claim_idle(10).await.is_empty(), "the bound holds for suspects too");
}

on_every_store![
    one_task_per_concurrency_key_runs_at_once,
    one_claim_takes_no_more_than_a_limit_allows,
    a_concurrency_key_that_a_setting_names_has_its_bound,
    a_tenant_has_its_bound_across_queues_and_others_are_not_concerned,
    a_bound_of_nothing_lets_nothing_run,
    a_raised_bound_is_used_at_once_and_a_lowered_one_takes_nothing_away,
    a_bound_set_while_tasks_run_counts_those_too,
    a_slot_is_free_again_however_its_run_ended,
    tasks_with_and_without_a_limit_end_in_one_batch,
    a_slot_is_free_again_when_its_lease_was_lost_or_handed_back,
    what_a_limit_holds_back_can_be_cancelled_and_expires_like_anything_else,
    what_a_limit_holds_back_goes_in_its_order_and_a_raised_priority_counts,
    many_tasks_held_back_in_front_do_not_block_what_comes_after_them,
    a_task_held_back_by_one_limit_does_not_count_in_its_others,
    limits_are_never_exceeded_while_many_claim_and_finish,
    limits_hold_over_lost_leases_too,
];
