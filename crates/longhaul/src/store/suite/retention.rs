//! Removing tasks: whole ones, finished ones, in bounded batches, and by request.

use super::bed::{Bed, completed, failed, secs, suspended, write};
use crate::state::StatePatch;
use crate::store::{Action, ControlRefused, NewCheckpoint, Settings};
use crate::task::{NewTask, TaskId};

async fn keep_for(bed: &Bed, seconds: u64) {
    bed.configure(Settings { retention: Some(secs(seconds)), ..Settings::default() }).await;
}

/// A finished task that has something in every table.
async fn rich(bed: &Bed) -> TaskId {
    let lease = bed.running_as(NewTask::new("h", &1).key("rich").tag("a", "b")).await;
    let checkpoint =
        NewCheckpoint { version: 1, iteration: 1, data: "{}".into(), max_count: 3, max_age: secs(60) };
    let all = write(&lease, 1).step("a").outcome(completed()).with(|commit| {
        commit.patches.push(StatePatch { set_goal: Some("done".into()), ..StatePatch::default() }.into());
        commit.checkpoint = Some(checkpoint);
    });
    bed.commit(all).await.expect("written");
    lease.task
}

async fn is_gone(bed: &Bed, id: TaskId) {
    assert!(bed.find(id).await.is_none());
    assert!(bed.log(id).await.is_empty());
    assert!(bed.store.state(id).await.expect("the store answers").is_none());
    assert!(bed.store.checkpoints(id).await.expect("the store answers").is_empty());
    assert_eq!(bed.store.advanced(&[(id, 1)]).await.expect("the store answers"), [(id, 0)]);
    let known = bed.try_submit(&NewTask::new("h", &1).key("rich").tag("a", "b")).await.expect("accepted");
    assert!(known.new, "its key is free");
}

async fn a_finished_task_is_removed_whole_after_its_time(bed: Bed) {
    let id = rich(&bed).await;
    keep_for(&bed, 3_600).await;
    assert_eq!(bed.pass(3_500).await.removed, 0);
    assert!(bed.find(id).await.is_some());
    assert_eq!(bed.pass(200).await.removed, 1);
    is_gone(&bed, id).await;
}

async fn without_a_retention_nothing_is_removed(bed: Bed) {
    let id = rich(&bed).await;
    assert_eq!(bed.pass(86_400 * 3_650).await.removed, 0);
    assert!(bed.find(id).await.is_some());
}

async fn removal_is_bounded_and_the_next_sweep_goes_on(bed: Bed) {
    keep_for(&bed, 60).await;
    bed.submit_many(5).await;
    for lease in bed.claim(5).await {
        bed.end(&lease, completed()).await;
    }
    bed.advance(61);
    let mut removed = Vec::new();
    for _ in 0..4 {
        removed.push(bed.store.sweep(2, true).await.expect("the store answers").removed);
    }
    assert_eq!(removed, [2, 2, 1, 0]);
}

async fn what_is_not_finished_is_never_removed(bed: Bed) {
    keep_for(&bed, 60).await;
    let waiting = bed.running().await;
    bed.end(&waiting, suspended("signal", "go", None)).await;
    let reopened = bed.running().await;
    bed.end(&reopened, failed()).await;
    bed.control(reopened.task, Action::Resume).await.expect("resumed");
    let reopened = bed.claim_one().await;
    let pending = bed.submit(NewTask::new("h", &1)).await;
    let swept = bed.pass(86_400).await;
    assert_eq!(swept.removed, 0);
    for id in [waiting.task, reopened.task, pending] {
        assert!(bed.find(id).await.is_some());
    }
}

async fn a_task_that_ended_later_stays_longer(bed: Bed) {
    keep_for(&bed, 60).await;
    let early = bed.running().await;
    let late = bed.running().await;
    bed.end(&early, completed()).await;
    bed.advance(40);
    bed.end(&late, completed()).await;
    assert_eq!(bed.pass(30).await.removed, 1);
    assert!(bed.find(early.task).await.is_none());
    assert!(bed.find(late.task).await.is_some());
}

async fn settings_that_do_not_name_a_retention_leave_it_as_it_was(bed: Bed) {
    keep_for(&bed, 60).await;
    bed.configure(Settings::default()).await;
    let lease = bed.running().await;
    bed.end(&lease, completed()).await;
    assert_eq!(bed.pass(61).await.removed, 1);
}

async fn a_finished_task_is_deleted_whole_by_request(bed: Bed) {
    let id = rich(&bed).await;
    let deleted = bed.control(id, Action::Delete).await.expect("deleted");
    assert!(deleted.changed);
    assert_eq!(bed.control(id, Action::Delete).await, Err(ControlRefused::NotFound));
    is_gone(&bed, id).await;
}

async fn what_is_not_finished_cannot_be_deleted(bed: Bed) {
    let waiting = bed.running().await;
    bed.end(&waiting, suspended("signal", "go", None)).await;
    let running = bed.running().await;
    let pending = bed.submit(NewTask::new("h", &1)).await;
    for id in [waiting.task, running.task, pending] {
        assert!(matches!(bed.control(id, Action::Delete).await, Err(ControlRefused::WrongState(_))));
        assert!(bed.find(id).await.is_some());
    }
}

on_every_store![
    a_finished_task_is_removed_whole_after_its_time,
    without_a_retention_nothing_is_removed,
    removal_is_bounded_and_the_next_sweep_goes_on,
    what_is_not_finished_is_never_removed,
    a_task_that_ended_later_stays_longer,
    settings_that_do_not_name_a_retention_leave_it_as_it_was,
    a_finished_task_is_deleted_whole_by_request,
    what_is_not_finished_cannot_be_deleted,
];
