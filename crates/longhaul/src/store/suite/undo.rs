//! Tasks that undo: what a deadline or a cancel makes of a task with something to undo, and how it
//! is leased and ends then.

use super::bed::{Bed, completed, failed, secs, suspended, write};
use crate::state::StatePatch;
use crate::store::{Claim, Lease, Outcome};
use crate::task::{NewTask, Phase, State};

/// Writes something that can be undone, beside a step alone or together with more.
async fn did_something(bed: &Bed, lease: &Lease, number: u32, together: bool) {
    let patch = StatePatch { set_goal: Some("g".into()), ..StatePatch::default() };
    let done = write(lease, number).step("make").with(|commit| {
        commit.undoable = true;
        commit.patches.extend(together.then_some(patch));
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

on_every_store![
    a_task_that_did_something_undoes_it_past_its_deadline,
    a_run_that_turns_to_undoing_is_on_record_at_once,
    a_task_that_did_nothing_ends_at_once,
];
