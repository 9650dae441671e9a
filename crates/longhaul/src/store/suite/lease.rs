//! Holding a lease: heartbeats, and what becomes of those who stop.

use super::bed::{Bed, LEASE, cancelled, completed, secs, write};
use crate::store::{Beat, Cancel, Claim, Heartbeat};
use crate::task::{NewTask, State, TaskId};

fn held(last_seq: u64) -> Beat {
    Beat::Held { cancel: None, last_seq }
}

async fn a_heartbeat_extends_the_lease(bed: Bed) {
    let lease = bed.running().await;
    for _ in 0..3 {
        assert_eq!(bed.pass(10).await.expired, 0);
        assert_eq!(bed.heartbeat(&[&lease]).await, [held(2)]);
    }
    bed.commit(write(&lease, 1).step("a")).await.expect("still current");
    assert_eq!(bed.heartbeat(&[&lease]).await, [held(3)]);
    assert_eq!(bed.pass(LEASE.as_secs() + 1).await.expired, 1);
    assert_eq!(bed.heartbeat(&[&lease]).await, [Beat::Lost]);
}

async fn a_lease_lasts_as_long_as_was_asked_for(bed: Bed) {
    bed.submit_many(2).await;
    let short = bed.claim_as(&Claim { lease: secs(5), ..bed.ask(1) }).await.leases.remove(0);
    let long = bed.claim_as(&Claim { lease: secs(60), ..bed.ask(1) }).await.leases.remove(0);
    assert_eq!(bed.pass(6).await.expired, 1);
    assert_eq!((bed.state(short.task).await, bed.state(long.task).await), (State::Pending, State::Running));
    let beat = Heartbeat { worker: bed.worker, leases: vec![(long.task, long.fence)], lease: secs(1_000) };
    bed.store.heartbeat(&beat).await.expect("the store answers");
    assert_eq!(bed.pass(900).await.expired, 0);
    assert_eq!(bed.pass(200).await.expired, 1);
}

async fn a_heartbeat_holds_an_expired_lease_that_nobody_took_back(bed: Bed) {
    let lease = bed.running().await;
    bed.advance(100);
    assert_eq!(bed.heartbeat(&[&lease]).await, [held(2)], "expiry alone loses nothing");
    assert_eq!(bed.sweep().await.expired, 0);
}

async fn the_answers_are_in_the_order_of_the_leases(bed: Bed) {
    bed.submit_many(4).await;
    let leases = bed.claim(4).await;
    bed.end(&leases[1], completed()).await;
    let mut unknown = leases[0].clone();
    unknown.task = TaskId::new();
    let mut stale = leases[2].clone();
    stale.fence -= 1;
    let beats = bed.heartbeat(&[&leases[3], &unknown, &leases[1], &stale, &leases[0]]).await;
    assert_eq!(beats, [held(2), Beat::Lost, Beat::Lost, Beat::Lost, held(2)]);
    assert_eq!(bed.state(leases[2].task).await, State::Running, "a stale fence takes nothing from the holder");
}

async fn a_stale_heartbeat_does_not_extend_the_lease_of_another(bed: Bed) {
    let old = bed.running().await;
    bed.lose(&old).await;
    let new = bed.another_worker().await.claim_one().await;
    bed.advance(10);
    assert_eq!(bed.heartbeat(&[&old]).await, [Beat::Lost]);
    assert_eq!(bed.pass(6).await.expired, 1, "the lease of {} ran out", new.fence);
}

async fn a_heartbeat_tells_of_a_cancel_and_who_asked_for_it(bed: Bed) {
    let lease = bed.running().await;
    bed.cancel(lease.task).await.expect("asked");
    let cancel = Cancel { undo: false, by: "ann".into(), reason: Some("enough".into()) };
    assert_eq!(bed.heartbeat(&[&lease]).await, [Beat::Held { cancel: Some(cancel), last_seq: 3 }]);
    bed.commit(write(&lease, 1).outcome(cancelled()).backward()).await.expect("written");
    assert_eq!(bed.heartbeat(&[&lease]).await, [Beat::Lost]);
}

async fn a_heartbeat_shows_that_the_worker_is_alive(bed: Bed) {
    bed.submit_many(3).await;
    let leases = bed.claim(2).await;
    let seen = |bed: Bed| async move {
        let workers = bed.store.workers().await.expect("the store answers");
        let worker = workers.into_iter().find(|worker| worker.id == bed.worker).expect("registered");
        (worker.seen_at, worker.running)
    };
    let (before, _) = seen(bed.clone()).await;
    bed.advance(10);
    bed.heartbeat(&[&leases[0], &leases[1]]).await;
    let (after, running) = seen(bed.clone()).await;
    assert!(after - before >= 10_000_000, "{before} {after}");
    assert_eq!(running, 2);
}

async fn a_worker_that_was_silent_for_long_hears_that_it_is_off_the_list(bed: Bed) {
    let beat = Heartbeat { worker: bed.worker, leases: Vec::new(), lease: LEASE };
    let listed = |beat: Heartbeat| {
        let store = std::sync::Arc::clone(&bed.store);
        async move { store.heartbeat(&beat).await.expect("the store answers").listed }
    };
    bed.pass(599).await;
    assert!(listed(beat.clone()).await, "it is heard of in time");
    bed.pass(601).await;
    assert!(!listed(beat.clone()).await);
    assert!(bed.store.workers().await.expect("the store answers").is_empty());
    let back = crate::store::WorkerInfo { id: bed.worker, ..super::bed::worker(&["h"]) };
    bed.store.register(&back).await.expect("registered");
    assert!(listed(beat).await);
}

async fn a_lost_lease_gives_the_task_back_with_a_crash_and_an_event(bed: Bed) {
    let lease = bed.running().await;
    assert_eq!(bed.pass(LEASE.as_secs() - 1).await.expired, 0, "not before its end");
    assert_eq!(bed.pass(2).await.expired, 1);
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 1));
    let events = bed.events(lease.task).await;
    assert_eq!(events.len(), 3);
    assert_eq!(events[2].data["status"], "retrying");
    assert_eq!(bed.heartbeat(&[&lease]).await, [Beat::Lost]);
    let queue = bed.queue("default").await;
    assert_eq!((queue.pending, queue.running), (1, 0));
}

async fn a_task_that_keeps_killing_its_worker_is_poison_and_its_neighbours_lose_nothing(bed: Bed) {
    let poison = bed.submit(NewTask::new("h", &1)).await;
    let neighbour = bed.submit(NewTask::new("g", &2)).await;
    for crash in 1..=5 {
        let lease =
            bed.claim_as(&Claim { idle: true, handlers: vec!["h".into()], ..bed.ask(1) }).await.leases.remove(0);
        assert_eq!((lease.task, lease.crashes), (poison, crash - 1));
        bed.lose(&lease).await;
    }
    let task = bed.task(poison).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Failed, 0, 5));
    assert_eq!(task.error.expect("says why").code, "poison");
    assert!(task.finished_at.is_some());
    assert_eq!(bed.kinds(poison).await.last().map(String::as_str), Some("task.failed"));
    assert_eq!(
        bed.claim_idle(5).await.iter().map(|lease| (lease.task, lease.crashes)).collect::<Vec<_>>(),
        [(neighbour, 0)]
    );
}

async fn a_cancelled_task_whose_worker_died_ends_as_cancelled(bed: Bed) {
    let lease = bed.running().await;
    bed.cancel(lease.task).await.expect("asked");
    bed.lose(&lease).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.error.expect("says who").code.as_str()), (State::Cancelled, "cancelled"));
    assert_eq!(bed.kinds(lease.task).await.last().map(String::as_str), Some("task.cancelled"));
}

on_every_store![
    a_heartbeat_extends_the_lease,
    a_lease_lasts_as_long_as_was_asked_for,
    a_heartbeat_holds_an_expired_lease_that_nobody_took_back,
    the_answers_are_in_the_order_of_the_leases,
    a_stale_heartbeat_does_not_extend_the_lease_of_another,
    a_heartbeat_tells_of_a_cancel_and_who_asked_for_it,
    a_heartbeat_shows_that_the_worker_is_alive,
    a_worker_that_was_silent_for_long_hears_that_it_is_off_the_list,
    a_lost_lease_gives_the_task_back_with_a_crash_and_an_event,
    a_task_that_keeps_killing_its_worker_is_poison_and_its_neighbours_lose_nothing,
    a_cancelled_task_whose_worker_died_ends_as_cancelled,
];
