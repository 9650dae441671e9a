//! What is due: bounded, by anyone, once.

use jiff::Timestamp;

use super::bed::{Bed, LEASE, completed, secs, suspended, write};
use crate::store::{Beat, CommitRefused, Swept};
use crate::task::{NewTask, State, TaskId};

async fn ended_by_its_deadline(bed: &Bed, id: TaskId) {
    let task = bed.task(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "deadline_exceeded"));
    assert!(task.finished_at.is_some() && task.waiting_for.is_none());
    assert_eq!(bed.kinds(id).await.last().map(String::as_str), Some("task.failed"));
}

async fn with_nothing_due_a_sweep_does_nothing(bed: Bed) {
    bed.submit_many(3).await;
    bed.claim(1).await;
    let swept = bed.sweep().await;
    assert_eq!((swept.expired, swept.due, swept.removed), (0, 0, 0));
}

async fn a_deadline_ends_a_task_in_the_queue(bed: Bed) {
    let ready = bed.submit(NewTask::new("h", &1).timeout(secs(10))).await;
    let later = bed.submit(NewTask::new("h", &2).timeout(secs(10)).run_at(Timestamp::MAX)).await;
    let at = Timestamp::from_microsecond(bed.store.clock().now().as_microsecond() + 10_000_000).expect("in range");
    let fixed = bed.submit(NewTask::new("h", &3).deadline(at)).await;
    bed.pass(8).await;
    for id in [ready, later, fixed] {
        assert_eq!(bed.state(id).await, State::Pending);
    }
    assert_eq!(bed.pass(3).await.due, 3);
    for id in [ready, later, fixed] {
        ended_by_its_deadline(&bed, id).await;
    }
    assert_eq!(bed.queue("default").await.pending, 0);
    assert!(bed.claim(5).await.is_empty());
}

async fn a_deadline_ends_a_task_that_waits(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(100))).await;
    bed.end(&lease, suspended("approval", "go", Some(1_000))).await;
    bed.pass(99).await;
    assert_eq!(bed.state(lease.task).await, State::Waiting);
    assert_eq!(bed.pass(2).await.due, 1);
    ended_by_its_deadline(&bed, lease.task).await;
    assert_eq!(bed.pass(2_000).await.due, 0, "its timer does not wake it any more");
}

async fn a_deadline_leaves_a_running_task_to_its_worker_for_a_while_and_then_fences_it(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(20))).await;
    for _ in 0..4 {
        bed.pass(10).await;
        assert!(matches!(bed.heartbeat(&[&lease]).await[..], [Beat::Held { .. }]), "within its grace of 30 s");
    }
    bed.commit(write(&lease, 1).step("under way").backward()).await.expect("still its own");
    bed.advance(11);
    bed.heartbeat(&[&lease]).await;
    assert_eq!(bed.sweep().await.due, 1);
    ended_by_its_deadline(&bed, lease.task).await;
    let refused = bed.commit(write(&lease, 2).step("late").backward()).await;
    assert_eq!(refused, Err(CommitRefused::Fenced { held: lease.fence }));
    assert_eq!(bed.heartbeat(&[&lease]).await, [Beat::Lost]);
    assert_eq!(bed.queue("default").await.running, 0);
}

async fn a_lost_lease_past_the_deadline_ends_the_task(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(10))).await;
    bed.lose(&lease).await;
    ended_by_its_deadline(&bed, lease.task).await;
}

async fn a_finished_task_is_left_alone_by_its_deadline(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(100))).await;
    bed.end(&lease, completed()).await;
    assert_eq!(bed.pass(1_000).await.due, 0);
    assert_eq!(bed.state(lease.task).await, State::Completed);
}

async fn a_sweep_is_bounded_and_the_next_one_goes_on(bed: Bed) {
    bed.submit_many(25).await;
    assert_eq!(bed.claim(25).await.len(), 25);
    let batch: Vec<NewTask> =
        (0..25).map(|n| NewTask::new("g", &n).timeout(secs(5)).run_at(Timestamp::MAX)).collect();
    assert!(bed.store.submit(&batch).await.expect("the store answers").iter().all(Result::is_ok));
    bed.advance(LEASE.as_secs() + 1);
    let (mut total, mut sweeps) = (Swept::default(), 0);
    loop {
        let swept = bed.store.sweep(10, true).await.expect("the store answers");
        assert!(swept.expired <= 10 && swept.due <= 10, "{swept:?}");
        total.expired += swept.expired;
        total.due += swept.due;
        sweeps += 1;
        if !swept.is_full(10) {
            break;
        }
        assert!(sweeps < 10, "it comes to an end");
    }
    assert_eq!((total.expired, total.due), (25, 25));
    assert_eq!(sweeps, 3);
}

async fn concurrent_sweeps_double_nothing(bed: Bed) {
    let mut ids = bed.submit_many(30).await;
    assert_eq!(bed.claim(30).await.len(), 30);
    let late: Vec<NewTask> = (0..30).map(|n| NewTask::new("g", &n).timeout(secs(5))).collect();
    assert!(bed.store.submit(&late).await.expect("the store answers").iter().all(Result::is_ok));
    bed.advance(LEASE.as_secs() + 1);
    let sweeps: Vec<_> = (0..6)
        .map(|_| {
            let bed = bed.clone();
            tokio::spawn(async move { bed.sweep().await })
        })
        .collect();
    let mut total = Swept::default();
    for sweep in sweeps {
        let swept = sweep.await.expect("no panic");
        total.expired += swept.expired;
        total.due += swept.due;
    }
    // What one sweep passes over because another holds it, that one does.
    let rest = bed.sweep().await;
    assert_eq!((total.expired + rest.expired, total.due + rest.due), (30, 30));
    for id in &ids {
        assert_eq!((bed.task(*id).await.crashes, bed.events(*id).await.len()), (1, 3));
    }
    ids.extend(late.iter().map(|task| task.id));
    for task in &late {
        assert_eq!(bed.kinds(task.id).await, ["task.submitted", "task.failed"]);
    }
    let queue = bed.queue("default").await;
    assert_eq!((queue.pending, queue.running), (30, 0));
}

async fn sweeps_and_heartbeats_at_once_never_take_a_lease_that_was_extended(bed: Bed) {
    bed.submit_many(40).await;
    let leases = bed.claim(40).await;
    bed.advance(LEASE.as_secs() + 1);
    let (beating, sweeping) = (bed.clone(), bed.clone());
    let all = leases.clone();
    let beats = tokio::spawn(async move { beating.heartbeat(&all.iter().collect::<Vec<_>>()).await });
    let swept = tokio::spawn(async move { sweeping.store.sweep(15, true).await.expect("the store answers") });
    let (beats, swept) = (beats.await.expect("no panic"), swept.await.expect("no panic"));
    let mut lost = 0;
    for (lease, beat) in leases.iter().zip(beats) {
        let state = bed.state(lease.task).await;
        match beat {
            Beat::Lost => assert_eq!(state, State::Pending),
            // Taken back after the heartbeat: impossible, it was extended.
            Beat::Held { .. } if state == State::Pending => lost += 1,
            Beat::Held { .. } => {
                bed.commit(write(lease, 1).step("a")).await.expect("held means held");
            }
        }
    }
    assert_eq!(lost, 0, "of {} taken back", swept.expired);
}

async fn a_sweep_knows_when_the_next_thing_is_due(bed: Bed) {
    let at =
        Timestamp::from_microsecond(bed.store.clock().now().as_microsecond() + 600_000_000).expect("in range");
    bed.submit(NewTask::new("h", &1).run_at(at)).await;
    let due = bed.sweep().await.next_due_in.expect("known");
    assert!((500_000_000..=600_000_000).contains(&due), "{due}");
    bed.submit(NewTask::new("h", &2)).await;
    bed.claim_one().await;
    let due = bed.sweep().await.next_due_in.expect("known");
    assert!((1..=600_000_000).contains(&due), "{due}");
}

on_every_store![
    with_nothing_due_a_sweep_does_nothing,
    a_deadline_ends_a_task_in_the_queue,
    a_deadline_ends_a_task_that_waits,
    a_deadline_leaves_a_running_task_to_its_worker_for_a_while_and_then_fences_it,
    a_lost_lease_past_the_deadline_ends_the_task,
    a_finished_task_is_left_alone_by_its_deadline,
    a_sweep_is_bounded_and_the_next_one_goes_on,
    concurrent_sweeps_double_nothing,
    sweeps_and_heartbeats_at_once_never_take_a_lease_that_was_extended,
    a_sweep_knows_when_the_next_thing_is_due,
];
