//! How runs end and what the task is then.

use super::bed::{Bed, LEASE, cancelled, completed, failed, retry, secs, suspended, write};
use crate::error::TaskError;
use crate::record::Decision;
use crate::store::{Action, CommitRefused, Outcome};
use crate::task::{NewTask, State};

async fn a_completed_task_has_its_result_and_its_end(bed: Bed) {
    let lease = bed.running().await;
    bed.advance(5);
    bed.end(&lease, completed()).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Completed, 0, 0));
    assert_eq!(task.result.expect("kept").get(), r#"{"ok":true}"#);
    assert!(task.error.is_none() && task.waiting_for.is_none());
    let took = task.finished_at.expect("it ended").as_microsecond() - task.created_at.as_microsecond();
    assert!(took >= 5_000_000, "by the store's clock");
    assert!(bed.claim_idle(5).await.is_empty());
    assert_eq!(bed.pass(1_000).await.expired, 0, "it has no lease any more");
    assert_eq!(bed.kinds(lease.task).await, ["task.submitted", "task.started", "task.completed"]);
}

async fn a_failure_counts_as_an_attempt_only_when_it_was_the_handlers(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, failed()).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Failed, 1, 0));
    assert_eq!(task.error.expect("kept"), TaskError::fatal("broken", "it broke"));
    assert!(task.finished_at.is_some() && task.result.is_none());

    let lease = bed.running().await;
    let error = TaskError::fatal("deadline_exceeded", "too late").detail("step", "a");
    bed.end(&lease, Outcome::Failed { error: error.clone(), attempt: false }).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts), (State::Failed, 0));
    assert_eq!(task.error.expect("kept"), error);
}

async fn a_cancelled_run_ends_the_task_as_cancelled(bed: Bed) {
    let lease = bed.running().await;
    bed.cancel(lease.task).await.expect("asked");
    bed.commit(write(&lease, 1).outcome(cancelled()).backward()).await.expect("written");
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts), (State::Cancelled, 0));
    assert_eq!(task.error.expect("says who").code, "cancelled");
    assert!(task.finished_at.is_some());
}

async fn a_retry_counts_as_an_attempt_and_comes_back_after_its_time(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, retry(30)).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 1, 0));
    assert_eq!(task.error.expect("why it is retried").code, "flaky");
    assert!(task.finished_at.is_none());
    bed.pass(29).await;
    assert!(bed.claim(5).await.is_empty());
    assert_eq!(bed.pass(2).await.due, 1);
    let lease = bed.claim_one().await;
    assert_eq!((lease.attempts, lease.crashes), (1, 0));
    bed.end(&lease, completed()).await;
    let task = bed.task(lease.task).await;
    assert!(task.error.is_none(), "what went well in the end has no error: {:?}", task.error);
}

async fn a_retry_of_what_was_interrupted_is_no_attempt(bed: Bed) {
    let lease = bed.running().await;
    let error = TaskError::retryable("unavailable", "not just now");
    bed.end(&lease, Outcome::Retry { error, after: secs(30), attempt: false }).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 0));
    assert_eq!(task.error.expect("kept").code, "unavailable");
    bed.advance(31);
    bed.pass(1_000).await;
    assert_eq!(bed.claim_idle(5).await.first().map(|lease| lease.attempts), Some(0));
}

async fn a_retry_without_a_wait_is_ready_at_once_with_its_old_rank(bed: Bed) {
    let first = bed.submit(NewTask::new("h", &1)).await;
    let lease = bed.claim_one().await;
    let second = bed.submit(NewTask::new("h", &2)).await;
    bed.end(&lease, retry(0)).await;
    assert_eq!(bed.claim_ids(5).await, [first, second]);
}

async fn a_suspended_task_says_what_it_waits_for_and_holds_no_worker(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, suspended("approval", "Go live?", None)).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Waiting, 0, 0));
    let waiting = task.waiting_for.expect("says what for");
    assert_eq!((waiting.kind.as_str(), waiting.id.as_str()), ("approval", "Go live?"));
    let queue = bed.queue("default").await;
    assert_eq!((queue.pending, queue.running), (0, 0));
    let swept = bed.pass(1_000_000).await;
    assert_eq!((swept.expired, swept.due), (0, 0), "it waits for ever if need be");
    assert!(bed.claim_idle(5).await.is_empty());
}

async fn a_suspended_task_is_woken_by_the_time_with_its_old_rank(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, suspended("timer", "nap", Some(60))).await;
    let later = bed.submit(NewTask::new("h", &2)).await;
    bed.pass(59).await;
    assert_eq!(bed.state(lease.task).await, State::Waiting);
    assert_eq!(bed.pass(2).await.due, 1);
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 0));
    assert!(task.waiting_for.is_none());
    assert_eq!(bed.claim_ids(5).await, [lease.task, later]);
}

async fn a_task_handed_back_costs_nothing_and_is_ready_at_once(bed: Bed) {
    let lease = bed.running().await;
    bed.lose(&lease).await;
    let lease = bed.claim_one().await;
    bed.end(&lease, Outcome::Released).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 1));
    assert_eq!(bed.claim_one().await.task, lease.task);
}

async fn a_recorded_step_clears_the_crashes_and_anything_else_does_not(bed: Bed) {
    let lease = bed.running().await;
    bed.lose(&lease).await;
    let lease = bed.claim_one().await;
    bed.commit(write(&lease, 1).event("progress")).await.expect("written");
    assert_eq!(bed.task(lease.task).await.crashes, 1);
    bed.commit(write(&lease, 2).step("a")).await.expect("written");
    assert_eq!(bed.task(lease.task).await.crashes, 0);
    bed.lose(&lease).await;
    assert_eq!(bed.task(lease.task).await.crashes, 1);
}

async fn a_step_recorded_with_the_end_of_its_run_clears_the_crashes_too(bed: Bed) {
    let lost = bed.running().await;
    bed.lose(&lost).await;
    let lease = bed.claim_one().await;
    assert_eq!(lease.crashes, 1);
    bed.commit(write(&lease, 1).step("one").outcome(Outcome::Released)).await.expect("written");
    assert_eq!(bed.task(lease.task).await.crashes, 0);
}

async fn a_cancelled_task_that_is_handed_back_goes_forward_no_more(bed: Bed) {
    for outcome in [Outcome::Released, retry(0), suspended("signal", "go", Some(1))] {
        let lease = bed.running().await;
        bed.cancel(lease.task).await.expect("asked");
        bed.commit(write(&lease, 1).outcome(outcome).backward()).await.expect("written");
        bed.pass(2).await;
        for lease in bed.claim(5).await {
            let forward = bed.commit(write(&lease, 1).step("more")).await;
            assert_eq!(forward, Err(CommitRefused::Cancelled));
            bed.commit(write(&lease, 1).outcome(cancelled()).backward()).await.expect("written");
        }
        assert_eq!(bed.state(lease.task).await, State::Cancelled);
    }
}

async fn a_suspended_step_in_doubt_waits_for_a_decision_about_it(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, suspended("in_doubt", "pay", None)).await;
    let decide = |step: &str| Action::Decide { step: step.into(), decision: Decision::Retry, reason: None };
    assert!(bed.control(lease.task, decide("other")).await.is_err());
    assert_eq!(bed.state(lease.task).await, State::Waiting);
    let decided = bed.control(lease.task, decide("pay")).await.expect("decided");
    assert_eq!((decided.state, decided.changed), (State::Pending, true));
    let lease = bed.claim_one().await;
    assert_eq!((lease.attempts, lease.crashes), (0, 0));
}

async fn a_deadline_passes_for_a_task_that_waits_for_its_retry(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(60))).await;
    bed.end(&lease, retry(100)).await;
    bed.pass(61).await;
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts), (State::Failed, 1));
    assert_eq!(task.error.expect("says why").code, "deadline_exceeded");
}

async fn every_lease_that_ended_is_gone_for_the_sweep(bed: Bed) {
    bed.submit_many(4).await;
    let leases = bed.claim(4).await;
    let outcomes = [completed(), failed(), suspended("signal", "go", None), retry(1_000)];
    for (lease, outcome) in leases.iter().zip(outcomes) {
        bed.end(lease, outcome).await;
    }
    assert_eq!(bed.pass(LEASE.as_secs() + 1).await.expired, 0);
    for lease in &leases {
        assert_eq!(bed.task(lease.task).await.crashes, 0);
    }
}

on_every_store![
    a_completed_task_has_its_result_and_its_end,
    a_failure_counts_as_an_attempt_only_when_it_was_the_handlers,
    a_cancelled_run_ends_the_task_as_cancelled,
    a_retry_counts_as_an_attempt_and_comes_back_after_its_time,
    a_retry_of_what_was_interrupted_is_no_attempt,
    a_retry_without_a_wait_is_ready_at_once_with_its_old_rank,
    a_suspended_task_says_what_it_waits_for_and_holds_no_worker,
    a_suspended_task_is_woken_by_the_time_with_its_old_rank,
    a_task_handed_back_costs_nothing_and_is_ready_at_once,
    a_recorded_step_clears_the_crashes_and_anything_else_does_not,
    a_step_recorded_with_the_end_of_its_run_clears_the_crashes_too,
    a_cancelled_task_that_is_handed_back_goes_forward_no_more,
    a_suspended_step_in_doubt_waits_for_a_decision_about_it,
    a_deadline_passes_for_a_task_that_waits_for_its_retry,
    every_lease_that_ended_is_gone_for_the_sweep,
];
