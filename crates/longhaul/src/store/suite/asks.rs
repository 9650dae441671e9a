//! What is asked of people: opened and closed by runs, decided by people, each once.

use super::bed::{Bed, completed, secs, suspended, write};
use crate::store::{Action, AskChange, AskKind, AskStatus, CommitRefused, Control, Lease, NewAsk};
use crate::task::{NewTask, Phase, TaskId};

fn new_ask(id: &str, kind: AskKind, expires_at: Option<i64>) -> NewAsk {
    NewAsk {
        id: id.into(),
        kind,
        step: format!("approval/0/{id}"),
        text: format!("{id}?"),
        subject: "null".into(),
        digest: "d".into(),
        expires_at,
    }
}

/// The run asks, and closes what it asked.
async fn change(bed: &Bed, lease: &Lease, number: u32, changes: Vec<AskChange>) {
    let written = write(lease, number).event("progress").with(|commit| commit.asks = changes);
    bed.commit(written).await.expect("written");
}

async fn status(bed: &Bed, task: TaskId) -> Vec<AskStatus> {
    let asks = bed.store.asks("default", Some(task)).await.expect("the store answers");
    asks.iter().map(|ask| ask.status).collect()
}

fn approve(id: &str) -> Action {
    Action::Approve { id: Some(id.into()), approve: true, reason: None, digest: None }
}

async fn open(bed: &Bed) -> Vec<String> {
    let asks = bed.store.asks("default", None).await.expect("the store answers");
    asks.into_iter().map(|ask| ask.id).collect()
}

async fn only_what_is_approved_is_used_and_only_what_is_open_expires(bed: Bed) {
    let lease = bed.running().await;
    let used = |id: &str| AskChange::Use { id: id.into(), step: "approve".into() };
    let expired = |id: &str| AskChange::Expire { id: id.into() };
    let ask = |id| AskChange::Open(new_ask(id, AskKind::Approval, None));
    change(&bed, &lease, 1, vec![ask("a"), ask("b"), ask("c")]).await;
    bed.control(lease.task, approve("b")).await.expect("approved");
    change(&bed, &lease, 2, vec![used("a"), expired("b")]).await;
    assert_eq!(status(&bed, lease.task).await, [AskStatus::Pending, AskStatus::Approved, AskStatus::Pending]);
    change(&bed, &lease, 3, vec![used("b"), expired("c")]).await;
    assert_eq!(status(&bed, lease.task).await, [AskStatus::Pending, AskStatus::Used, AskStatus::Expired]);
    change(&bed, &lease, 4, vec![ask("b")]).await;
    assert_eq!(status(&bed, lease.task).await[1], AskStatus::Used, "an id is never used again");
}

async fn an_approval_is_used_before_it_expires_by_the_stores_clock(bed: Bed) {
    let lease = bed.running().await;
    let soon = Some(bed.store.clock().now_micros() + 60_000_000);
    let ask = |id| AskChange::Open(new_ask(id, AskKind::Approval, soon));
    change(&bed, &lease, 1, vec![ask("a"), ask("b"), ask("c")]).await;
    for id in ["a", "b"] {
        bed.control(lease.task, approve(id)).await.expect("approved in time");
    }
    let uses = |number, ids: &[&str]| {
        let used = |id: &&str| AskChange::Use { id: (*id).into(), step: "approve".into() };
        let asks = ids.iter().map(used).collect();
        write(&lease, number).step("use").with(|commit| commit.asks = asks)
    };
    bed.commit(uses(2, &["a"])).await.expect("in time");
    bed.advance(61);
    let before = bed.everything(lease.task).await;
    for ids in [&["b"][..], &["a", "b"]] {
        let late = bed.commit(uses(3, ids)).await;
        assert_eq!(late, Err(CommitRefused::ApprovalExpired { id: "b".into() }));
    }
    assert_eq!(bed.everything(lease.task).await, before, "nothing of it was written");
    change(&bed, &lease, 3, vec![AskChange::Expire { id: "b".into() }, AskChange::Expire { id: "a".into() }])
        .await;
    assert_eq!(status(&bed, lease.task).await, [AskStatus::Used, AskStatus::Expired, AskStatus::Pending]);
    let late = bed.commit(uses(4, &["b"])).await;
    assert_eq!(late, Err(CommitRefused::ApprovalExpired { id: "b".into() }), "what expired stays so");
}

async fn two_decisions_in_one_batch_are_one_decision(bed: Bed) {
    let lease = bed.running().await;
    change(&bed, &lease, 1, vec![AskChange::Open(new_ask("a", AskKind::Approval, None))]).await;
    let control =
        |by: &str| Control { tenant: "default".into(), task: lease.task, by: by.into(), action: approve("a") };
    let answers = bed.store.control(&[control("ann"), control("bob")]).await.expect("the store answers");
    assert!(answers[0].is_ok() && answers[1].is_err());
    let asks = bed.store.asks("default", Some(lease.task)).await.expect("the store answers");
    assert_eq!(asks[0].decided_by.as_deref(), Some("ann"));
}

async fn what_waits_for_people_is_what_they_can_still_decide(bed: Bed) {
    let ask = |id, expires| vec![AskChange::Open(new_ask(id, AskKind::Question, expires))];
    let soon = bed.store.clock().now_micros() + 60_000_000;
    let waits = bed.running().await;
    change(&bed, &waits, 1, ask("waits", None)).await;
    let expires = bed.running().await;
    change(&bed, &expires, 1, ask("expires", Some(soon))).await;
    let ended = bed.running().await;
    change(&bed, &ended, 1, ask("ended", None)).await;
    let undoes = bed.running().await;
    change(&bed, &undoes, 1, ask("undoes", None)).await;
    bed.submit(NewTask::new("h", &1).tenant("acme")).await;
    let theirs = bed.claim_one().await;
    change(&bed, &theirs, 1, ask("theirs", None)).await;
    assert_eq!(open(&bed).await, ["waits", "expires", "ended", "undoes"]);
    bed.end_with(&ended, 2, completed()).await;
    let turns = write(&undoes, 2).event("progress").with(|commit| commit.phase = Some(Phase::Compensating));
    bed.commit(turns).await.expect("written");
    assert_eq!(open(&bed).await, ["waits", "expires"]);
    bed.advance(61);
    assert_eq!(open(&bed).await, ["waits"]);
    bed.end_with(&waits, 2, suspended("question", "waits", None)).await;
    let answer = Action::Answer { id: None, answer: "yes".into() };
    bed.control(waits.task, answer).await.expect("taken");
    assert!(open(&bed).await.is_empty());
}

async fn a_deleted_task_leaves_nothing_that_was_asked(bed: Bed) {
    let task = NewTask::new("h", &1).timeout(secs(3_600));
    let lease = bed.running_as(task.clone()).await;
    change(&bed, &lease, 1, vec![AskChange::Open(new_ask("a", AskKind::Question, None))]).await;
    bed.end_with(&lease, 2, completed()).await;
    bed.control(lease.task, Action::Delete).await.expect("deleted");
    bed.submit(task).await;
    assert!(status(&bed, lease.task).await.is_empty());
    assert!(open(&bed).await.is_empty());
}

on_every_store![
    only_what_is_approved_is_used_and_only_what_is_open_expires,
    an_approval_is_used_before_it_expires_by_the_stores_clock,
    two_decisions_in_one_batch_are_one_decision,
    what_waits_for_people_is_what_they_can_still_decide,
    a_deleted_task_leaves_nothing_that_was_asked,
];
