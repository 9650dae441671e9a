//! Parents and children: who may have some, who is told, and what a cancel takes down.

use super::bed::{Bed, completed, failed, secs, suspended, write};
use crate::record::Record;
use crate::store::{Action, Control, Lease, QueueSettings, SubmitRefused};
use crate::task::{NewTask, Phase, State, TaskId};

fn child_of(parent: TaskId) -> NewTask {
    let mut child = NewTask::new("g", &1);
    child.parent = Some(parent);
    child
}

/// How often a task was told that a child ended.
async fn told(bed: &Bed, id: TaskId) -> usize {
    bed.kinds(id).await.iter().filter(|kind| *kind == "child.ended").count()
}

/// A task that waits, and its lease before that.
async fn waiting(bed: &Bed) -> Lease {
    let lease = bed.running().await;
    bed.end(&lease, suspended("child", "c", None)).await;
    lease
}

async fn a_child_of_a_task_that_ended_was_cancelled_or_undoes_is_refused(bed: Bed) {
    let ended = bed.running().await;
    bed.end(&ended, completed()).await;
    let cancelled = bed.running().await;
    bed.cancel(cancelled.task).await.expect("asked");
    let undoing = bed.running().await;
    let undo = write(&undoing, 1).event("progress").with(|commit| commit.phase = Some(Phase::Compensating));
    bed.commit(undo).await.expect("written");
    for parent in [ended.task, cancelled.task, undoing.task, TaskId::new()] {
        let child = child_of(parent);
        assert_eq!(bed.try_submit(&child).await, Err(SubmitRefused::ParentEnded { parent }));
        assert!(bed.find(child.id).await.is_none());
    }
    let alive = waiting(&bed).await;
    bed.submit(child_of(alive.task)).await;
}

async fn a_child_that_was_accepted_is_known_after_its_parent_has_ended(bed: Bed) {
    let parent = bed.running().await;
    let child = child_of(parent.task);
    bed.submit(child.clone()).await;
    bed.end(&parent, completed()).await;
    let again = bed.try_submit(&child).await.expect("known");
    assert_eq!((again.id, again.new), (child.id, false));
}

async fn a_full_queue_takes_the_children_of_what_it_took(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 1, ..QueueSettings::default() }).await;
    let parent = bed.running().await;
    bed.submit(NewTask::new("h", &1).queue("q")).await;
    bed.submit(child_of(parent.task).queue("q")).await;
    assert_eq!(bed.queue("q").await.pending, 2);
    assert!(bed.try_submit(&NewTask::new("h", &1).queue("q")).await.is_err());
}

async fn a_parent_is_told_once_of_each_child_however_it_ended(bed: Bed) {
    let parent = waiting(&bed).await.task;
    let by_run = bed.running_as(child_of(parent)).await;
    let by_request = bed.submit(child_of(parent)).await;
    let by_time = bed.submit(child_of(parent).timeout(secs(5))).await;
    bed.end(&by_run, failed()).await;
    assert_eq!(bed.sweep().await.told, 1);
    assert_eq!((told(&bed, parent).await, bed.state(parent).await), (1, State::Pending), "it goes on");
    bed.cancel(by_request).await.expect("cancelled");
    bed.pass(6).await;
    bed.sweep().await;
    assert_eq!(bed.state(by_time).await, State::Failed);
    assert_eq!(told(&bed, parent).await, 3);
    assert_eq!(bed.sweep().await.told, 0, "nobody is told twice");
    let records = bed.records(parent).await;
    for child in [by_run.task, by_request, by_time] {
        let at = format!("child/{child}");
        let arrived = |record: &&Record| matches!(record, Record::Arrived { at: to, .. } if *to == at);
        assert_eq!(records.iter().filter(arrived).count(), 1);
    }
}

async fn sweeps_at_once_tell_a_parent_once(bed: Bed) {
    let parent = waiting(&bed).await.task;
    let children: Vec<NewTask> = (0..40).map(|_| child_of(parent)).collect();
    assert!(bed.store.submit(&children).await.expect("the store answers").iter().all(Result::is_ok));
    let ends = children.iter().map(|child| Control {
        tenant: "default".into(),
        task: child.id,
        by: "ann".into(),
        action: Action::Cancel { undo: false, reason: None },
    });
    let ends: Vec<Control> = ends.collect();
    bed.store.control(&ends).await.expect("the store answers");
    let other = bed.another_process().await;
    let sweeps: Vec<_> = (0..6)
        .map(|n| {
            let bed = if n % 2 == 0 { bed.clone() } else { other.clone() };
            tokio::spawn(async move { bed.sweep().await })
        })
        .collect();
    for sweep in sweeps {
        sweep.await.expect("no panic");
    }
    bed.sweep().await;
    assert_eq!(told(&bed, parent).await, 40);
}

async fn a_parent_that_ended_is_told_nothing(bed: Bed) {
    let parent = bed.running().await;
    let child = bed.running_as(child_of(parent.task)).await;
    bed.end(&parent, completed()).await;
    let before = bed.everything(parent.task).await;
    bed.end(&child, completed()).await;
    bed.sweep().await;
    assert_eq!(bed.everything(parent.task).await, before);
    assert_eq!(bed.sweep().await.told, 0);
}

async fn a_cancel_takes_down_everything_below_and_nothing_else(bed: Bed) {
    let top = waiting(&bed).await.task;
    let ended = bed.running_as(child_of(top)).await;
    bed.end(&ended, completed()).await;
    let earlier = bed.running_as(child_of(top)).await;
    let enough = Action::Cancel { undo: false, reason: Some("earlier".into()) };
    bed.control(earlier.task, enough).await.expect("asked");
    let running = bed.running_as(child_of(top)).await;
    let middle = bed.running_as(child_of(top)).await;
    bed.end(&middle, suspended("child", "c", None)).await;
    let leaf = bed.submit(child_of(middle.task)).await;
    let other = bed.submit(NewTask::new("h", &1)).await;
    bed.cancel(top).await.expect("cancelled");
    bed.sweep().await;
    for id in [top, middle.task, leaf] {
        let task = bed.task(id).await;
        assert_eq!(task.state, State::Cancelled);
        assert!(task.error.expect("says why").message.ends_with("enough"));
    }
    assert_eq!(bed.state(other).await, State::Pending);
    assert_eq!(bed.state(ended.task).await, State::Completed);
    assert_eq!(bed.state(running.task).await, State::Running, "its worker ends it");
    let reasons: Vec<_> = bed
        .heartbeat(&[&earlier, &running])
        .await
        .into_iter()
        .map(|beat| match beat {
            crate::store::Beat::Held { cancel, .. } => cancel.and_then(|cancel| cancel.reason),
            crate::store::Beat::Lost => Some("lost".to_owned()),
        })
        .collect();
    assert_eq!(reasons, [Some("earlier".to_owned()), Some("enough".to_owned())], "the first cancel counts");
}

async fn a_child_made_while_what_is_above_it_is_cancelled_is_refused_or_taken_down(bed: Bed) {
    let other = bed.another_process().await;
    for _ in 0..8 {
        let top = bed.running().await;
        let parent = bed.running_as(child_of(top.task)).await;
        let makers: Vec<_> = (0..4)
            .map(|n| {
                let bed = if n % 2 == 0 { bed.clone() } else { other.clone() };
                let parent = parent.task;
                tokio::spawn(async move {
                    let mut made = Vec::new();
                    for _ in 0..200 {
                        let child = child_of(parent);
                        match bed.try_submit(&child).await {
                            Ok(_) => made.push(child.id),
                            Err(_) => break,
                        }
                    }
                    made
                })
            })
            .collect();
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        bed.cancel(top.task).await.expect("asked");
        for maker in makers {
            let made = maker.await.expect("no panic");
            // A sweep is bounded, and some made many.
            while bed.sweep().await.due > 0 {}
            for &child in &made {
                assert_eq!(bed.state(child).await, State::Cancelled, "one of {}", made.len());
            }
        }
        for lease in [parent, top] {
            bed.commit(write(&lease, 1).outcome(super::bed::cancelled()).backward()).await.expect("written");
        }
    }
}

on_every_store![
    a_child_of_a_task_that_ended_was_cancelled_or_undoes_is_refused,
    a_child_that_was_accepted_is_known_after_its_parent_has_ended,
    a_full_queue_takes_the_children_of_what_it_took,
    a_parent_is_told_once_of_each_child_however_it_ended,
    sweeps_at_once_tell_a_parent_once,
    a_parent_that_ended_is_told_nothing,
    a_cancel_takes_down_everything_below_and_nothing_else,
    a_child_made_while_what_is_above_it_is_cancelled_is_refused_or_taken_down,
];
