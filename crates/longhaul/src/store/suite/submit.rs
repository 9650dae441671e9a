//! Accepting tasks: durable, bounded, refused with a reason.

use std::collections::HashSet;

use jiff::Timestamp;

use super::bed::{Bed, completed, raw, retry, secs, worker, write};
use crate::record::Record;
use crate::store::{QueueSettings, SubmitRefused};
use crate::task::{NewTask, Phase, State, TaskId};

fn bound(max_pending: u64) -> QueueSettings {
    QueueSettings { max_pending, ..QueueSettings::default() }
}

async fn an_accepted_task_is_seen_by_another_process_as_it_was_submitted(bed: Bed) {
    let input = r#"{"b": 1,   "a":[1.50, 12345678901234567890, "x"]}"#;
    let task = NewTask::with_raw("g", raw(input)).queue("q").priority(7).tag("team", "ops").timeout(secs(60));
    let id = bed.submit(task).await;
    let seen = bed.another_process().await.task(id).await;
    assert_eq!((seen.id, seen.task_id, seen.tenant.as_str()), (id, id, "default"));
    assert_eq!((seen.handler.as_str(), seen.queue.as_str(), seen.priority.get()), ("g", "q", 7));
    assert_eq!((seen.state, seen.phase, seen.attempts, seen.crashes), (State::Pending, Phase::Forward, 0, 0));
    assert_eq!(seen.input.get(), input, "byte for byte");
    assert_eq!(seen.tags, [("team".to_owned(), "ops".to_owned())].into());
    let lasts = seen.deadline.expect("kept").as_microsecond() - seen.created_at.as_microsecond();
    assert_eq!(lasts, 60_000_000);
    assert!(seen.finished_at.is_none() && seen.result.is_none() && seen.error.is_none());
}

async fn the_input_is_shown_as_user_input_exactly_when_it_is_a_string(bed: Bed) {
    let text = bed.submit(NewTask::new("h", &"deploy \"it\"")).await;
    let number = bed.submit(NewTask::new("h", &5)).await;
    assert_eq!(bed.task(text).await.user_input.as_deref(), Some("deploy \"it\""));
    assert_eq!(bed.task(number).await.user_input, None);
}

async fn the_first_event_says_that_it_was_submitted_and_the_first_record_is_the_input(bed: Bed) {
    let id = bed.submit(NewTask::with_raw("h", raw(r#"{"app":  "shop"}"#))).await;
    let events = bed.events(id).await;
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].kind.as_str(), events[0].run), ("task.submitted", 0));
    let Some(Record::Input(input)) = bed.records(id).await.into_iter().next() else { panic!("no input") };
    assert_eq!(input.get(), r#"{"app":  "shop"}"#);
}

async fn answers_of_a_batch_are_in_its_order_and_a_bad_entry_hurts_only_itself(bed: Bed) {
    let batch = [
        NewTask::new("h", &1),
        NewTask::new("h", &2).priority(10),
        NewTask::new("nobody", &3),
        NewTask::new("h", &4).queue("no spaces"),
        NewTask::new("g", &5),
    ];
    let answers = bed.store.submit(&batch).await.expect("the store answers");
    assert_eq!(answers[0].as_ref().expect("accepted").id, batch[0].id);
    assert!(matches!(&answers[1], Err(SubmitRefused::Invalid(invalid)) if invalid.field == "priority"));
    assert!(matches!(&answers[2], Err(SubmitRefused::UnknownHandler { handler }) if handler == "nobody"));
    assert!(matches!(&answers[3], Err(SubmitRefused::Invalid(invalid)) if invalid.field == "queue"));
    assert_eq!(answers[4].as_ref().expect("accepted").id, batch[4].id);
    for refused in &batch[1..4] {
        assert!(bed.find(refused.id).await.is_none());
    }
    assert_eq!(bed.queue("default").await.pending, 2);
}

async fn an_empty_batch_is_answered_with_nothing(bed: Bed) {
    assert!(bed.store.submit(&[]).await.expect("the store answers").is_empty());
    assert!(bed.store.commit(&[]).await.expect("the store answers").is_empty());
    assert!(bed.store.control(&[]).await.expect("the store answers").is_empty());
    assert!(bed.heartbeat(&[]).await.is_empty());
}

async fn a_thousand_tasks_in_one_batch_are_all_accepted(bed: Bed) {
    let ids: HashSet<TaskId> = bed.submit_many(1_000).await.into_iter().collect();
    assert_eq!(ids.len(), 1_000);
    assert_eq!(bed.queue("default").await.pending, 1_000);
}

async fn a_handler_stays_known_after_its_worker_has_gone(bed: Bed) {
    let late = worker(&["rare"]);
    let refused = bed.try_submit(&NewTask::new("rare", &1)).await;
    assert_eq!(refused, Err(SubmitRefused::UnknownHandler { handler: "rare".into() }));
    bed.store.register(&late).await.expect("registered");
    bed.store.retire(late.id).await.expect("retired");
    bed.submit(NewTask::new("rare", &1)).await;
}

async fn the_same_task_submitted_again_is_not_doubled(bed: Bed) {
    let batch = [NewTask::new("h", &1), NewTask::new("h", &2).key("k")];
    let first = bed.store.submit(&batch).await.expect("the store answers");
    bed.advance(60);
    let again = bed.store.submit(&batch).await.expect("the store answers");
    for (first, again) in first.iter().zip(&again) {
        let (first, again) = (first.as_ref().expect("accepted"), again.as_ref().expect("accepted"));
        assert_eq!((first.id, first.created_at), (again.id, again.created_at));
        assert_eq!(bed.kinds(first.id).await, ["task.submitted"]);
    }
    assert_eq!(bed.queue("default").await.pending, 2);
    assert_eq!(bed.claim(10).await.len(), 2);
}

async fn the_same_task_twice_in_one_batch_is_one_task(bed: Bed) {
    let task = NewTask::new("h", &1);
    let answers = bed.store.submit(&[task.clone(), task.clone()]).await.expect("the store answers");
    assert!(answers.iter().all(|answer| answer.as_ref().is_ok_and(|accepted| accepted.id == task.id)));
    assert_eq!(bed.kinds(task.id).await, ["task.submitted"]);
    assert_eq!(bed.queue("default").await.pending, 1);
}

async fn an_unanswered_submit_that_filled_the_queue_is_answered_when_repeated(bed: Bed) {
    bed.configure_queue("q", bound(1)).await;
    let task = NewTask::new("h", &1).queue("q");
    bed.submit(task.clone()).await;
    assert_eq!(bed.try_submit(&task).await.expect("it was accepted").id, task.id);
}

async fn a_queue_accepts_exactly_its_bound_and_says_no_to_the_rest(bed: Bed) {
    bed.configure_queue("q", bound(3)).await;
    let batch: Vec<NewTask> = (0..5).map(|n| NewTask::new("h", &n).queue("q")).collect();
    let answers = bed.store.submit(&batch).await.expect("the store answers");
    assert!(answers[..3].iter().all(Result::is_ok));
    for answer in &answers[3..] {
        let Err(SubmitRefused::QueueFull { queue, max, retry_after }) = answer else { panic!("{answer:?}") };
        assert_eq!((queue.as_str(), *max), ("q", 3));
        assert!(!retry_after.is_zero());
    }
    bed.submit(NewTask::new("h", &1)).await; // another queue is not concerned
}

async fn concurrent_submits_do_not_exceed_the_bound(bed: Bed) {
    bed.configure_queue("q", bound(7)).await;
    let submits = (0..40).map(|n| {
        let bed = bed.clone();
        tokio::spawn(async move { bed.try_submit(&NewTask::new("h", &n).queue("q")).await })
    });
    let mut accepted = 0;
    for submit in submits.collect::<Vec<_>>() {
        match submit.await.expect("no panic") {
            Ok(_) => accepted += 1,
            Err(refused) => assert!(matches!(refused, SubmitRefused::QueueFull { .. })),
        }
    }
    assert_eq!(accepted, 7);
    assert_eq!(bed.queue("q").await.pending, 7);
}

async fn claimed_cancelled_and_expired_tasks_free_their_place(bed: Bed) {
    bed.configure_queue("q", bound(3)).await;
    let task = || NewTask::new("h", &1).queue("q");
    let cancelled = bed.submit(task().run_at(Timestamp::MAX)).await;
    bed.submit(task().run_at(Timestamp::MAX).timeout(secs(10))).await;
    bed.submit(task()).await;
    let full = || async { matches!(bed.try_submit(&task()).await, Err(SubmitRefused::QueueFull { .. })) };
    assert!(full().await);

    bed.cancel(cancelled).await.expect("cancelled");
    bed.submit(task()).await;
    assert!(full().await);
    assert_eq!(bed.claim(2).await.len(), 2);
    bed.submit(task()).await;
    bed.submit(task()).await;
    assert!(full().await);
    assert_eq!(bed.pass(11).await.due, 1);
    bed.submit(task()).await;
    assert!(full().await);
}

async fn the_bound_does_not_keep_accepted_tasks_from_coming_back(bed: Bed) {
    bed.configure_queue("q", bound(1)).await;
    let lease = bed.running_as(NewTask::new("h", &1).queue("q")).await;
    bed.submit(NewTask::new("h", &2).queue("q")).await;
    bed.commit(write(&lease, 1).outcome(retry(0))).await.expect("a retry is always accepted");
    assert_eq!(bed.queue("q").await.pending, 2);
}

async fn a_bound_that_is_changed_counts_at_once(bed: Bed) {
    bed.configure_queue("q", bound(1)).await;
    let task = || NewTask::new("h", &1).queue("q");
    bed.submit(task()).await;
    assert!(bed.try_submit(&task()).await.is_err());
    bed.configure_queue("q", bound(2)).await;
    bed.submit(task()).await;
    bed.configure_queue("q", bound(0)).await;
    assert!(bed.try_submit(&task()).await.is_err());
}

async fn a_task_is_not_started_before_its_time(bed: Bed) {
    let at = Timestamp::from_microsecond(bed.store.clock().now().as_microsecond() + 60_000_000).expect("in range");
    let later = bed.submit(NewTask::new("h", &1).run_at(at)).await;
    let past = bed.submit(NewTask::new("h", &2).run_at(Timestamp::UNIX_EPOCH)).await;
    let lease = bed.claim_one().await;
    assert_eq!(lease.task, past, "a time in the past is now");
    bed.end(&lease, completed()).await;
    bed.pass(50).await;
    assert!(bed.claim(5).await.is_empty());
    assert_eq!(bed.state(later).await, State::Pending);
    assert_eq!(bed.pass(11).await.due, 1);
    let lease = bed.claim_one().await;
    assert_eq!(lease.task, later);
    bed.end(&lease, completed()).await;
}

async fn the_most_distant_times_and_longest_spans_are_accepted(bed: Bed) {
    let never = bed.submit(NewTask::new("h", &1).run_at(Timestamp::MAX).deadline(Timestamp::MAX)).await;
    let always = bed.submit(NewTask::new("h", &2).run_at(Timestamp::MIN).timeout(std::time::Duration::MAX)).await;
    bed.sweep().await;
    assert_eq!(bed.claim_ids(5).await, [always]);
    assert_eq!(bed.state(never).await, State::Pending);
}

on_every_store![
    an_accepted_task_is_seen_by_another_process_as_it_was_submitted,
    the_input_is_shown_as_user_input_exactly_when_it_is_a_string,
    the_first_event_says_that_it_was_submitted_and_the_first_record_is_the_input,
    answers_of_a_batch_are_in_its_order_and_a_bad_entry_hurts_only_itself,
    an_empty_batch_is_answered_with_nothing,
    a_thousand_tasks_in_one_batch_are_all_accepted,
    a_handler_stays_known_after_its_worker_has_gone,
    the_same_task_submitted_again_is_not_doubled,
    the_same_task_twice_in_one_batch_is_one_task,
    an_unanswered_submit_that_filled_the_queue_is_answered_when_repeated,
    a_queue_accepts_exactly_its_bound_and_says_no_to_the_rest,
    concurrent_submits_do_not_exceed_the_bound,
    claimed_cancelled_and_expired_tasks_free_their_place,
    the_bound_does_not_keep_accepted_tasks_from_coming_back,
    a_bound_that_is_changed_counts_at_once,
    a_task_is_not_started_before_its_time,
    the_most_distant_times_and_longest_spans_are_accepted,
];
