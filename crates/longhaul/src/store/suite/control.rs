//! What people and other programs ask of tasks.

use jiff::Timestamp;

use super::bed::{Bed, completed, failed, raw, retry, secs, suspended, write};
use crate::record::{Decision, Record};
use crate::store::{Action, Control, ControlRefused, Controlled, QueueSettings};
use crate::task::{NewTask, State, TaskId};

fn became(answer: Result<Controlled, ControlRefused>) -> (State, bool) {
    let controlled = answer.expect("accepted");
    (controlled.state, controlled.changed)
}

async fn a_task_in_the_queue_is_cancelled_at_once(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    assert_eq!(became(bed.cancel(id).await), (State::Cancelled, true));
    let task = bed.task(id).await;
    let error = task.error.expect("says who and why");
    assert_eq!(error.code, "cancelled");
    assert!(error.message.contains("ann") && error.message.contains("enough"), "{}", error.message);
    assert!(task.finished_at.is_some());
    assert_eq!(bed.kinds(id).await, ["task.submitted", "task.cancelled"]);
    assert!(bed.claim(5).await.is_empty());
    assert_eq!(bed.queue("default").await.pending, 0);
}

async fn a_waiting_task_is_cancelled_at_once(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, suspended("approval", "go", Some(60))).await;
    assert_eq!(became(bed.cancel(lease.task).await), (State::Cancelled, true));
    assert!(bed.task(lease.task).await.waiting_for.is_none());
    assert_eq!(bed.pass(61).await.due, 0, "its timer does not wake it any more");
}

async fn a_running_task_is_asked_to_stop_and_stays_its_workers(bed: Bed) {
    let lease = bed.running().await;
    assert_eq!(became(bed.cancel(lease.task).await), (State::Running, true));
    let events = bed.events(lease.task).await.len();
    assert_eq!(became(bed.cancel(lease.task).await), (State::Running, false), "once is enough");
    assert_eq!(bed.events(lease.task).await.len(), events);
}

async fn a_task_that_ended_cannot_be_cancelled_but_a_cancelled_one_stays_so(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    bed.cancel(id).await.expect("cancelled");
    assert_eq!(became(bed.cancel(id).await), (State::Cancelled, false));
    assert_eq!(bed.events(id).await.len(), 2);
    for outcome in [completed(), failed()] {
        let lease = bed.running().await;
        bed.end(&lease, outcome).await;
        let before = bed.everything(lease.task).await;
        assert!(matches!(bed.cancel(lease.task).await, Err(ControlRefused::WrongState(_))));
        assert_eq!(bed.everything(lease.task).await, before);
    }
}

async fn resume_opens_a_failed_task_again_with_fresh_counters_and_a_larger_fence(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(write(&lease, 1).step("a")).await.expect("written");
    bed.end_with(&lease, 2, failed()).await;
    assert_eq!(became(bed.control(lease.task, Action::Resume).await), (State::Pending, true));
    let task = bed.task(lease.task).await;
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 0));
    assert!(task.error.is_none() && task.finished_at.is_none());
    assert_eq!(bed.kinds(task.id).await.last().map(String::as_str), Some("task.resumed"));
    let again = bed.claim_one().await;
    assert!(again.task == lease.task && again.fence > lease.fence);
    let steps = again.log.iter().flat_map(|row| crate::record::records_of(row).expect("readable"));
    assert!(
        steps.into_iter().any(|record| matches!(record, Record::Done { step, .. } if step == "a")),
        "its journal is kept"
    );
    bed.end(&again, completed()).await;
    assert_eq!(bed.state(lease.task).await, State::Completed);
}

async fn resume_opens_a_cancelled_task_which_then_goes_forward_again(bed: Bed) {
    let lease = bed.running().await;
    bed.cancel(lease.task).await.expect("asked");
    bed.lose(&lease).await;
    assert_eq!(bed.state(lease.task).await, State::Cancelled);
    assert_eq!(became(bed.control(lease.task, Action::Resume).await), (State::Pending, true));
    let lease = bed.claim_one().await;
    bed.commit(write(&lease, 1).step("a").outcome(completed())).await.expect("the cancel is forgotten");
}

async fn resume_does_nothing_to_a_task_that_did_not_fail(bed: Bed) {
    let pending = bed.submit(NewTask::new("h", &1)).await;
    assert_eq!(became(bed.control(pending, Action::Resume).await), (State::Pending, false));
    let lease = bed.claim_one().await;
    assert_eq!(became(bed.control(pending, Action::Resume).await), (State::Running, false));
    bed.end(&lease, completed()).await;
    assert_eq!(became(bed.control(pending, Action::Resume).await), (State::Completed, false));
    assert_eq!(bed.kinds(pending).await, ["task.submitted", "task.started", "task.completed"]);
}

async fn a_task_that_never_began_still_waits_for_its_time_when_it_is_resumed(bed: Bed) {
    let at = Timestamp::from_microsecond(bed.store.clock().now().as_microsecond() + 60_000_000).expect("in range");
    let later = bed.submit(NewTask::new("h", &1).run_at(at)).await;
    bed.cancel(later).await.expect("cancelled");
    assert_eq!(became(bed.control(later, Action::Resume).await), (State::Pending, true));
    bed.pass(50).await;
    assert!(bed.claim(5).await.is_empty(), "it is too early");
    bed.pass(11).await;
    let lease = bed.claim_one().await;
    assert_eq!(lease.task, later);
    // One that began and is to be tried again later goes on at once: that is what was asked for.
    bed.end(&lease, retry(600)).await;
    bed.cancel(later).await.expect("cancelled");
    bed.control(later, Action::Resume).await.expect("resumed");
    assert_eq!(bed.claim_one().await.task, later);
}

async fn a_task_that_is_about_to_end_is_not_resumed(bed: Bed) {
    let lease = bed.running().await;
    bed.cancel(lease.task).await.expect("asked");
    let refused = bed.control(lease.task, Action::Resume).await.expect_err("refused").to_string();
    assert!(refused.contains("being cancelled; resume it when that has ended"), "{refused}");
}

async fn a_full_queue_does_not_refuse_a_resume(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 1, ..QueueSettings::default() }).await;
    let id = bed.submit(NewTask::new("h", &1).queue("q")).await;
    bed.cancel(id).await.expect("cancelled");
    bed.submit(NewTask::new("h", &2).queue("q")).await;
    assert_eq!(became(bed.control(id, Action::Resume).await), (State::Pending, true));
    assert_eq!(bed.queue("q").await.pending, 2);
}

async fn a_changed_priority_changes_the_place_in_line(bed: Bed) {
    let ids = bed.submit_many(3).await;
    assert_eq!(became(bed.control(ids[2], Action::Priority(9)).await), (State::Pending, true));
    bed.control(ids[0], Action::Priority(1)).await.expect("changed");
    assert_eq!(
        became(bed.control(ids[1], Action::Priority(5)).await),
        (State::Pending, false),
        "it has that already"
    );
    assert_eq!(bed.task(ids[2]).await.priority.get(), 9);
    assert_eq!(bed.claim_ids(5).await, [ids[2], ids[1], ids[0]]);
}

async fn a_changed_priority_is_worth_the_queues_ageing(bed: Bed) {
    bed.configure_queue("q", QueueSettings { ageing: secs(60), ..QueueSettings::default() }).await;
    let task = || NewTask::new("h", &1).queue("q");
    let old = bed.submit(task()).await;
    bed.advance(100);
    let raised_little = bed.submit(task()).await;
    let raised_much = bed.submit(task()).await;
    bed.control(raised_little, Action::Priority(6)).await.expect("changed");
    bed.control(raised_much, Action::Priority(7)).await.expect("changed");
    assert_eq!(bed.claim_ids(5).await, [raised_much, old, raised_little]);
}

async fn a_priority_can_be_changed_while_running_or_waiting_and_counts_when_back(bed: Bed) {
    let lease = bed.running().await;
    bed.control(lease.task, Action::Priority(2)).await.expect("changed");
    let other = bed.submit(NewTask::new("h", &2)).await;
    bed.end(&lease, retry(0)).await;
    assert_eq!(bed.claim_ids(1).await, [other]);
    assert_eq!(bed.task(lease.task).await.priority.get(), 2);
}

async fn a_priority_out_of_range_or_of_an_ended_task_is_refused(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let refused = bed.control(id, Action::Priority(10)).await;
    assert!(matches!(refused, Err(ControlRefused::Invalid(invalid)) if invalid.field == "priority"));
    bed.cancel(id).await.expect("cancelled");
    assert!(matches!(bed.control(id, Action::Priority(9)).await, Err(ControlRefused::WrongState(_))));
}

async fn a_decision_is_on_record_with_who_and_why(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, suspended("in_doubt", "pay", None)).await;
    let decision = Decision::Done(raw(r#"{"receipt":  7}"#));
    let action = Action::Decide { step: "pay".into(), decision, reason: Some("seen in the bank".into()) };
    assert_eq!(became(bed.control(lease.task, action).await), (State::Pending, true));
    let events = bed.events(lease.task).await;
    let event = events.last().expect("told");
    assert_eq!((event.kind.as_str(), event.step.as_deref(), event.run), ("step.decided", Some("pay"), 0));
    assert_eq!((&event.data["by"], &event.data["decision"]), (&"ann".into(), &"done".into()));
    let records = bed.records(lease.task).await;
    let Some(Record::Decided { decision: Decision::Done(result), by, reason, .. }) = records.last() else {
        panic!("no decision in {records:?}")
    };
    assert_eq!(
        (result.get(), by.as_str(), reason.as_deref()),
        (r#"{"receipt":  7}"#, "ann", Some("seen in the bank"))
    );
}

async fn a_decision_about_nothing_in_doubt_is_refused(bed: Bed) {
    let lease = bed.running().await;
    let decide = || Action::Decide { step: "pay".into(), decision: Decision::Fail, reason: None };
    assert!(matches!(bed.control(lease.task, decide()).await, Err(ControlRefused::WrongState(_))), "it runs");
    bed.end(&lease, suspended("approval", "pay", None)).await;
    assert!(matches!(bed.control(lease.task, decide()).await, Err(ControlRefused::WrongState(_))), "an approval");
}

async fn concurrent_decisions_about_one_step_are_one_decision(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, suspended("in_doubt", "pay", None)).await;
    let deciders: Vec<_> = (0..8)
        .map(|_| {
            let (bed, id) = (bed.clone(), lease.task);
            tokio::spawn(async move {
                bed.control(id, Action::Decide { step: "pay".into(), decision: Decision::Retry, reason: None })
                    .await
            })
        })
        .collect();
    let mut accepted = 0;
    for decider in deciders {
        accepted += usize::from(decider.await.expect("no panic").is_ok());
    }
    assert_eq!(accepted, 1);
    let records = bed.records(lease.task).await;
    assert_eq!(records.iter().filter(|record| matches!(record, Record::Decided { .. })).count(), 1);
}

async fn another_tenants_task_is_not_found_like_one_that_is_not_there(bed: Bed) {
    let theirs = bed.submit(NewTask::new("h", &1).tenant("acme")).await;
    let actions = || {
        [
            Action::Cancel { undo: false, reason: None },
            Action::Resume,
            Action::Priority(9),
            Action::Decide { step: "a".into(), decision: Decision::Fail, reason: None },
            Action::Patch { patch: crate::state::StatePatch::default(), version: None, under: None },
            Action::Delete,
        ]
    };
    for id in [theirs, TaskId::new()] {
        for action in actions() {
            assert_eq!(bed.control(id, action).await, Err(ControlRefused::NotFound));
        }
    }
    let task = bed.task_of("acme", theirs).await;
    assert_eq!((task.state, task.last_seq, task.priority.get()), (State::Pending, 1, 5));
}

async fn requests_of_one_batch_are_done_in_order_each_on_its_own(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let other = bed.submit(NewTask::new("h", &2)).await;
    let ask = |task, action| Control { tenant: "default".into(), task, by: "ann".into(), action };
    let batch = [
        ask(id, Action::Priority(8)),
        ask(TaskId::new(), Action::Resume),
        ask(id, Action::Cancel { undo: false, reason: None }),
        ask(other, Action::Priority(77)),
        ask(id, Action::Priority(3)),
        ask(id, Action::Resume),
        ask(other, Action::Priority(1)),
    ];
    let answers = bed.store.control(&batch).await.expect("the store answers");
    assert_eq!(became(answers[0].clone()), (State::Pending, true));
    assert_eq!(answers[1], Err(ControlRefused::NotFound));
    assert_eq!(became(answers[2].clone()), (State::Cancelled, true));
    assert!(matches!(answers[3], Err(ControlRefused::Invalid(_))));
    assert!(matches!(answers[4], Err(ControlRefused::WrongState(_))));
    assert_eq!(became(answers[5].clone()), (State::Pending, true));
    assert_eq!(became(answers[6].clone()), (State::Pending, true));
    assert_eq!(bed.kinds(id).await, ["task.submitted", "task.priority_changed", "task.cancelled", "task.resumed"]);
    assert_eq!(bed.queue("default").await.pending, 2);
}

on_every_store![
    a_task_in_the_queue_is_cancelled_at_once,
    a_waiting_task_is_cancelled_at_once,
    a_running_task_is_asked_to_stop_and_stays_its_workers,
    a_task_that_ended_cannot_be_cancelled_but_a_cancelled_one_stays_so,
    resume_opens_a_failed_task_again_with_fresh_counters_and_a_larger_fence,
    resume_opens_a_cancelled_task_which_then_goes_forward_again,
    a_task_that_never_began_still_waits_for_its_time_when_it_is_resumed,
    a_task_that_is_about_to_end_is_not_resumed,
    resume_does_nothing_to_a_task_that_did_not_fail,
    a_full_queue_does_not_refuse_a_resume,
    a_changed_priority_changes_the_place_in_line,
    a_changed_priority_is_worth_the_queues_ageing,
    a_priority_can_be_changed_while_running_or_waiting_and_counts_when_back,
    a_priority_out_of_range_or_of_an_ended_task_is_refused,
    a_decision_is_on_record_with_who_and_why,
    a_decision_about_nothing_in_doubt_is_refused,
    concurrent_decisions_about_one_step_are_one_decision,
    another_tenants_task_is_not_found_like_one_that_is_not_there,
    requests_of_one_batch_are_done_in_order_each_on_its_own,
];
