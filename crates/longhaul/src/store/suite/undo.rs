//! Tasks that undo: what a deadline or a cancel makes of a task with something to undo, and how it
//! is leased and ends then.

use super::bed::{Bed, completed, failed, retry, secs, suspended, write};
use crate::record::UndoOn;
use crate::state::StatePatch;
use crate::store::{Action, Claim, Lease, Outcome, QueueSettings, SubmitRefused};
use crate::task::{NewTask, Phase, State, TaskId, UndoOf};

/// Writes something that can be undone, beside a step alone or together with more.
async fn did_something(bed: &Bed, lease: &Lease, number: u32, together: bool) {
    let patch = StatePatch { set_goal: Some("g".into()), ..StatePatch::default() };
    let done = write(lease, number).step("make").with(|commit| {
        commit.undoable = true;
        commit.patches.extend(together.then_some(patch.into()));
    });
    bed.commit(done).await.expect("written");
}

/// Claims as a worker of one handler and one queue, or of several.
async fn claim_as(bed: &Bed, several: bool) -> Lease {
    let mut ask = bed.ask(2);
    if !several {
        ask = Claim { queues: vec!["default".into()], handlers: vec!["h".into()], ..ask };
    }
    let mut leases = bed.claim_as(&ask).await.leases;
    assert_eq!(leases.len(), 1, "exactly one task is ready");
    leases.remove(0)
}

async fn a_task_that_did_something_undoes_it_past_its_deadline(bed: Bed) {
    for (together, several) in [(false, false), (true, true)] {
        let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(60))).await;
        did_something(&bed, &lease, 1, together).await;
        // What comes after does not make it forgotten.
        bed.commit(write(&lease, 2).step("more")).await.expect("written");
        bed.end_with(&lease, 3, suspended("signal", "go", None)).await;
        bed.pass(61).await;
        let task = bed.task(lease.task).await;
        assert_eq!((task.state, task.phase), (State::Pending, Phase::Compensating));
        let undoing = claim_as(&bed, several).await;
        assert_eq!((undoing.task, undoing.phase), (lease.task, Phase::Compensating));
        // It has its own time: the deadline does not end it while it undoes, nor between two runs.
        bed.heartbeat(&[&undoing]).await;
        bed.advance(10);
        bed.heartbeat(&[&undoing]).await;
        bed.advance(10);
        bed.heartbeat(&[&undoing]).await;
        bed.pass(12).await;
        assert_eq!(bed.state(lease.task).await, State::Running);
        bed.commit(write(&undoing, 1).outcome(Outcome::Released).backward()).await.expect("written");
        bed.pass(100).await;
        assert_eq!(bed.state(lease.task).await, State::Pending);
        let undoing = claim_as(&bed, several).await;
        bed.commit(write(&undoing, 1).outcome(failed()).backward()).await.expect("written");
        let task = bed.task(lease.task).await;
        assert_eq!((task.state, task.phase), (State::Failed, Phase::Forward), "what ended is in no phase");
    }
}

async fn a_run_that_turns_to_undoing_is_on_record_at_once(bed: Bed) {
    for together in [false, true] {
        let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(60))).await;
        did_something(&bed, &lease, 1, together).await;
        let turns = write(&lease, 2).event("progress").backward().with(|commit| {
            commit.phase = Some(Phase::Compensating);
            commit.outcome = together.then_some(Outcome::Released);
        });
        bed.commit(turns).await.expect("written");
        assert_eq!(bed.task(lease.task).await.phase, Phase::Compensating);
        if !together {
            bed.lose(&lease).await;
        }
        bed.pass(61).await;
        assert_eq!(bed.state(lease.task).await, State::Pending, "no deadline ends it");
        let undoing = bed.claim_one().await;
        assert_eq!(undoing.phase, Phase::Compensating);
        bed.commit(write(&undoing, 1).event("progress").backward()).await.expect("written");
        assert_eq!(
            bed.task(lease.task).await.phase,
            Phase::Compensating,
            "what says nothing of it changes nothing"
        );
        bed.commit(write(&undoing, 2).outcome(failed()).backward()).await.expect("written");
    }
}

async fn what_is_undone_only_by_request_ends_at_once_unless_that_is_asked_for(bed: Bed) {
    let never = UndoOn { failed: false, cancelled: false };
    for together in [false, true] {
        for undo in [false, true] {
            let lease = bed.running().await;
            assert_eq!(lease.undo_on, UndoOn::default());
            let says = write(&lease, 1).step("say").with(|commit| {
                commit.undo_on = Some(never);
                commit.outcome = together.then_some(Outcome::Released);
            });
            bed.commit(says).await.expect("written");
            if !together {
                bed.lose(&lease).await;
            }
            let lease = bed.claim_one().await;
            assert_eq!(lease.undo_on, never, "whoever has it next knows");
            did_something(&bed, &lease, 1, together).await;
            bed.end_with(&lease, 2, suspended("signal", "go", None)).await;
            bed.control(lease.task, Action::Cancel { undo, reason: None }).await.expect("cancelled");
            let task = bed.task(lease.task).await;
            let wanted = match undo {
                false => (State::Cancelled, Phase::Forward),
                true => (State::Pending, Phase::Compensating),
            };
            assert_eq!((task.state, task.phase), wanted);
            if undo {
                let undoing = bed.claim_one().await;
                bed.commit(write(&undoing, 1).outcome(failed()).backward()).await.expect("written");
            }
        }
    }
}

async fn a_task_that_did_nothing_ends_at_once(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(60))).await;
    bed.commit(write(&lease, 1).step("look")).await.expect("written");
    bed.end_with(&lease, 2, suspended("signal", "go", None)).await;
    bed.pass(61).await;
    assert_eq!(bed.state(lease.task).await, State::Failed);
    let lease = bed.running().await;
    did_something(&bed, &lease, 1, false).await;
    bed.end_with(&lease, 2, completed()).await;
    assert_eq!(bed.task(lease.task).await.phase, Phase::Forward);
}

/// The undo of a task that ended, as it stood then.
async fn undo_of(bed: &Bed, task: TaskId, before: Option<TaskId>) -> NewTask {
    let finished_at = bed.task(task).await.finished_at.expect("has ended").as_microsecond();
    let mut undo = NewTask::new("h", &1).queue("q");
    undo.undo = Some(UndoOf { task, finished_at, before, records: Vec::new() });
    undo
}

async fn a_task_is_undone_as_it_ended_by_one_at_a_time(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 0, ..QueueSettings::default() }).await;
    let lease = bed.running().await;
    bed.end(&lease, failed()).await;
    let stale = undo_of(&bed, lease.task, None).await;
    bed.control(lease.task, Action::Resume).await.expect("opened again");
    let refused = Err(SubmitRefused::from(crate::store::undo_refused()));
    assert_eq!(bed.try_submit(&stale).await, refused, "it goes on");
    bed.advance(1);
    let lease = bed.claim_one().await;
    bed.end(&lease, failed()).await;
    assert_eq!(bed.try_submit(&stale).await, refused, "it is another end");

    let first = undo_of(&bed, lease.task, None).await;
    bed.submit(first.clone()).await;
    let again = bed.try_submit(&first).await.expect("known");
    assert_eq!((again.id, again.new), (first.id, false));
    assert_eq!(bed.task(lease.task).await.undone_by, Some(first.id));
    assert_eq!(bed.try_submit(&undo_of(&bed, lease.task, None).await).await, refused, "someone does it");
    bed.control(lease.task, Action::Resume).await.expect_err("it is being undone");

    let undoing = bed.claim_one().await;
    assert_eq!((undoing.task, undoing.phase), (first.id, Phase::Compensating));
    bed.commit(write(&undoing, 1).outcome(failed()).backward()).await.expect("written");
    bed.control(first.id, Action::Resume).await.expect_err("it would go forward");
    let second = undo_of(&bed, lease.task, Some(first.id)).await;
    bed.submit(second.clone()).await;
    assert_eq!(bed.task(lease.task).await.undone_by, Some(second.id));
    assert_eq!(bed.task(second.id).await.undo_of, Some(lease.task));
}

async fn an_undo_that_was_interrupted_and_succeeds_has_no_error(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, completed()).await;
    let undo = undo_of(&bed, lease.task, None).await;
    bed.submit(undo.clone()).await;
    let lease = bed.claim_one().await;
    bed.commit(write(&lease, 1).outcome(retry(0)).backward()).await.expect("written");
    assert!(bed.task(undo.id).await.error.is_some());
    let lease = bed.claim_one().await;
    assert_eq!(lease.phase, Phase::Compensating);
    bed.commit(write(&lease, 1).outcome(completed()).backward()).await.expect("written");
    let task = bed.task(undo.id).await;
    assert_eq!((task.state, task.error), (State::Completed, None));
}

on_every_store![
    a_task_that_did_something_undoes_it_past_its_deadline,
    a_run_that_turns_to_undoing_is_on_record_at_once,
    what_is_undone_only_by_request_ends_at_once_unless_that_is_asked_for,
    a_task_that_did_nothing_ends_at_once,
    a_task_is_undone_as_it_ended_by_one_at_a_time,
    an_undo_that_was_interrupted_and_succeeds_has_no_error,
];
