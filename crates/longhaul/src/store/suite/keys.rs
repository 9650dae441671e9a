//! Idempotency keys and the dedupe window: one request, one task.

use std::collections::HashSet;

use super::bed::{Bed, completed, raw, secs};
use crate::store::{Action, QueueSettings, SubmitRefused};
use crate::task::{NewTask, TaskId};

async fn a_hundred_concurrent_submits_with_one_key_make_one_task(bed: Bed) {
    let other = bed.another_process().await;
    let submits: Vec<_> = (0..100)
        .map(|n| {
            let bed = if n % 2 == 0 { bed.clone() } else { other.clone() };
            tokio::spawn(async move { bed.try_submit(&NewTask::new("h", &"same").key("k")).await })
        })
        .collect();
    let (mut ids, mut new) = (HashSet::new(), 0);
    for submit in submits {
        let accepted = submit.await.expect("no panic").expect("accepted");
        ids.insert(accepted.id);
        new += usize::from(accepted.new);
    }
    assert_eq!((ids.len(), new), (1, 1));
    assert_eq!(bed.queue("default").await.pending, 1);
    let id = ids.into_iter().next().expect("one");
    assert_eq!(bed.kinds(id).await, ["task.submitted"]);
}

async fn the_same_key_and_content_is_the_same_task_whatever_became_of_it(bed: Bed) {
    let request = || NewTask::with_raw("h", raw(r#"{"a":1,"b":2}"#)).key("k");
    let lease = bed.running_as(request()).await;
    bed.end(&lease, completed()).await;
    let respelt = NewTask::with_raw("h", raw(r#"{ "b": 2, "a": 1 }"#)).key("k");
    let known = bed.try_submit(&respelt).await.expect("known");
    assert_eq!((known.id, known.new), (lease.task, false));
    assert_eq!(known.created_at, bed.task(lease.task).await.created_at.as_microsecond());
    assert!(bed.find(respelt.id).await.is_none());
    assert!(bed.log(respelt.id).await.is_empty(), "nothing is kept of what was not accepted");
}

async fn other_content_under_a_known_key_is_a_conflict(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1).key("k")).await;
    let conflict = Err(SubmitRefused::KeyConflict { key: "k".into(), existing: id });
    for other in [
        NewTask::new("h", &2),
        NewTask::new("g", &1),
        NewTask::new("h", &1).priority(6),
        NewTask::new("h", &1).tag("a", "b"),
        NewTask::new("h", &1).timeout(secs(5)),
    ] {
        assert_eq!(bed.try_submit(&other.key("k")).await, conflict);
    }
}

async fn content_that_differs_beyond_what_numbers_and_nesting_allow_is_still_other_content(bed: Bed) {
    let deep = |leaf: &str| format!("{}{leaf}{}", "[".repeat(200), "]".repeat(200));
    let pairs = [
        ("1e999".to_owned(), "2e999".to_owned()),
        (r#""\ud800""#.to_owned(), r#""\ud801""#.to_owned()),
        (deep("1"), deep("2")),
        ("123456789012345678901234567890".to_owned(), "123456789012345678901234567891".to_owned()),
    ];
    for (n, (one, other)) in pairs.into_iter().enumerate() {
        let key = format!("k{n}");
        let first = bed.try_submit(&NewTask::with_raw("h", raw(&one)).key(&key)).await;
        if let Err(SubmitRefused::Invalid(_)) = first {
            continue; // to refuse such input altogether is fine, the same on every store
        }
        let first = first.expect("accepted");
        let second = bed.try_submit(&NewTask::with_raw("h", raw(&other)).key(&key)).await;
        assert_eq!(second, Err(SubmitRefused::KeyConflict { key, existing: first.id }), "{one:.40} {other:.40}");
    }
}

async fn keys_of_two_tenants_never_meet(bed: Bed) {
    let ours = bed.submit(NewTask::new("h", &1).key("k")).await;
    let theirs = bed.submit(NewTask::new("h", &2).tenant("other").key("k")).await;
    assert_ne!(ours, theirs);
}

async fn a_key_used_twice_in_one_batch_is_one_task_or_a_conflict(bed: Bed) {
    let batch = [
        NewTask::new("h", &1).key("k"),
        NewTask::new("h", &1).key("k"),
        NewTask::new("h", &2).key("k"),
        NewTask::new("h", &3),
    ];
    let answers = bed.store.submit(&batch).await.expect("the store answers");
    let first = answers[0].as_ref().expect("accepted");
    let second = answers[1].as_ref().expect("known");
    assert_eq!((second.id, first.new, second.new), (first.id, true, false));
    assert_eq!(answers[2], Err(SubmitRefused::KeyConflict { key: "k".into(), existing: first.id }));
    assert!(answers[3].is_ok());
    assert_eq!(bed.queue("default").await.pending, 2);
}

async fn batches_that_share_keys_in_opposite_orders_all_succeed(bed: Bed) {
    // So many keys that the batches are under way at the same time.
    const KEYS: usize = 1_000;
    const ROUNDS: usize = 3;
    let other = bed.another_process().await;
    for round in 1..=ROUNDS {
        let submits: Vec<_> = (0..6)
            .map(|n| {
                let bed = if n < 3 { bed.clone() } else { other.clone() };
                let key = |k| NewTask::new("h", &k).key(format!("k{round}-{k}"));
                let mut batch: Vec<NewTask> = (0..KEYS).map(key).collect();
                if n % 2 == 0 {
                    batch.reverse();
                }
                tokio::spawn(async move { bed.store.submit(&batch).await.expect("the store answers") })
            })
            .collect();
        let mut ids = HashSet::new();
        for submit in submits {
            ids.extend(submit.await.expect("no panic").into_iter().map(|answer| answer.expect("accepted").id));
        }
        assert_eq!(ids.len(), KEYS);
        assert_eq!(bed.queue("default").await.pending, (KEYS * round) as u64);
    }
}

async fn a_refused_submit_stores_no_key(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 1, ..QueueSettings::default() }).await;
    bed.submit(NewTask::new("h", &0).queue("q")).await;
    let full = bed.try_submit(&NewTask::new("h", &1).queue("q").key("k")).await;
    assert!(matches!(full, Err(SubmitRefused::QueueFull { .. })));
    let unknown = bed.try_submit(&NewTask::new("nobody", &1).key("k")).await;
    assert!(matches!(unknown, Err(SubmitRefused::UnknownHandler { .. })));
    bed.submit(NewTask::new("h", &2).key("k")).await;
}

async fn a_known_key_is_answered_even_when_the_queue_is_full(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 1, ..QueueSettings::default() }).await;
    let id = bed.submit(NewTask::new("h", &1).queue("q").key("k")).await;
    let known = bed.try_submit(&NewTask::new("h", &1).queue("q").key("k")).await;
    assert_eq!(known.expect("known").id, id);
}

async fn a_key_lives_exactly_as_long_as_its_task(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1).key("k")).await;
    bed.cancel(id).await.expect("cancelled");
    assert!(bed.try_submit(&NewTask::new("h", &2).key("k")).await.is_err());
    bed.control(id, Action::Delete).await.expect("deleted");
    bed.submit(NewTask::new("h", &2).key("k")).await;
}

async fn an_equal_submit_within_its_window_is_the_same_task_and_after_it_a_new_one(bed: Bed) {
    let request = |n: u32| NewTask::new("h", &n).dedupe_window(secs(10));
    let id = bed.submit(request(1)).await;
    bed.submit(request(2)).await;
    bed.submit(NewTask::new("h", &1).tenant("other").dedupe_window(secs(10))).await;
    bed.advance(8);
    let again = bed.try_submit(&request(1)).await.expect("known");
    assert_eq!((again.id, again.new), (id, false));
    bed.advance(4);
    let later: TaskId = bed.submit(request(1)).await;
    let again = bed.try_submit(&request(1)).await.expect("known");
    assert_eq!(again.id, later, "the window counts from the newest");
}

async fn equal_submits_in_one_batch_are_one_task_within_their_window(bed: Bed) {
    let request = || NewTask::new("h", &1).dedupe_window(secs(10));
    let answers = bed.store.submit(&[request(), request()]).await.expect("the store answers");
    let ids: Vec<TaskId> = answers.into_iter().map(|answer| answer.expect("accepted").id).collect();
    assert_eq!(ids[0], ids[1]);
    assert_eq!(bed.queue("default").await.pending, 1);
}

async fn concurrent_equal_submits_within_their_window_make_one_task(bed: Bed) {
    let submits: Vec<_> = (0..30)
        .map(|_| {
            let bed = bed.clone();
            tokio::spawn(async move { bed.try_submit(&NewTask::new("h", &"click").dedupe_window(secs(60))).await })
        })
        .collect();
    let mut ids = HashSet::new();
    for submit in submits {
        ids.insert(submit.await.expect("no panic").expect("accepted").id);
    }
    assert_eq!(ids.len(), 1, "no duplicates on a double click");
}

on_every_store![
    a_hundred_concurrent_submits_with_one_key_make_one_task,
    the_same_key_and_content_is_the_same_task_whatever_became_of_it,
    other_content_under_a_known_key_is_a_conflict,
    content_that_differs_beyond_what_numbers_and_nesting_allow_is_still_other_content,
    keys_of_two_tenants_never_meet,
    a_key_used_twice_in_one_batch_is_one_task_or_a_conflict,
    batches_that_share_keys_in_opposite_orders_all_succeed,
    a_refused_submit_stores_no_key,
    a_known_key_is_answered_even_when_the_queue_is_full,
    a_key_lives_exactly_as_long_as_its_task,
    an_equal_submit_within_its_window_is_the_same_task_and_after_it_a_new_one,
    equal_submits_in_one_batch_are_one_task_within_their_window,
    concurrent_equal_submits_within_their_window_make_one_task,
];
