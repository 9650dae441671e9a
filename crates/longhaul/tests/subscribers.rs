//! Durable subscribers of events.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, PATIENCE};
use longhaul::{Client, Error, NewTask, Run, Subscriber, TaskError, TaskId, Told, Worker, WorkerHandle};
use tokio::sync::mpsc;

on_every_store!(
    a_subscriber_is_given_every_event_in_order_and_goes_on_where_it_was,
    a_new_subscriber_begins_now_or_with_what_is_kept,
    types_and_tenants_are_filtered,
    a_failing_handler_is_called_again_and_holds_nobody_else_up,
    a_handler_that_hangs_holds_no_task_and_no_other_subscriber_up,
    an_event_that_is_refused_for_good_is_passed_by,
    the_events_of_a_task_are_handled_one_at_a_time_and_those_of_others_beside,
    a_batch_that_fails_is_given_again_as_it_was,
    batches_have_their_bound_and_cut_rows_where_it_is,
    one_process_runs_a_subscriber_and_the_next_takes_over_when_it_stops,
    another_process_takes_over_within_seconds_when_the_holder_dies,
    a_holder_that_was_paused_for_too_long_moves_nothing_and_hears_of_it,
    a_removed_subscriber_ends_and_a_new_one_of_its_name_begins_anew,
    a_subscriber_that_handles_for_longer_than_its_lease_keeps_it,
    deleted_tasks_do_not_stall_a_subscriber,
    names_are_checked,
);

const SOON: Duration = Duration::from_millis(10);

/// What handlers were given, by task.
type Seen = BTreeMap<TaskId, Vec<u64>>;
/// The same by batch.
type Batches = Vec<Vec<(TaskId, u64)>>;

/// A subscriber that passes on what it is given.
async fn listen(subscriber: Subscriber) -> (longhaul::SubscriberHandle, mpsc::Receiver<Told>) {
    let (send, told) = mpsc::channel(100_000);
    let handle = subscriber
        .start(move |told| {
            let send = send.clone();
            async move { Ok(send.send(told).await?) }
        })
        .await
        .expect("starts");
    (handle, told)
}

async fn next(told: &mut mpsc::Receiver<Told>) -> Told {
    tokio::time::timeout(PATIENCE, told.recv()).await.expect("an event comes").expect("the subscriber lives")
}

/// Waits until something holds.
async fn until(mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(SOON).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("it comes to that");
}

async fn worker(bed: &Bed) -> WorkerHandle {
    Worker::new(&bed.client)
        .handler("work", |run: Run, n: u32| async move {
            run.step("a", async || Ok::<_, TaskError>(n)).await?;
            run.publish("disk.cleaned", &n).await?;
            Ok::<_, TaskError>(n)
        })
        .start()
        .await
        .expect("starts")
}

async fn submit(client: &Client, count: u32) -> Vec<TaskId> {
    let tasks = (0..count).map(|n| NewTask::new("work", &n)).collect();
    let answers = client.submit_many(tasks).await.expect("the store answers");
    answers.into_iter().map(|answer| answer.expect("accepted").id).collect()
}

/// Runs `count` tasks to their end.
async fn run(bed: &Bed, count: u32) -> Vec<TaskId> {
    let worker = worker(bed).await;
    let ids = submit(&bed.client, count).await;
    for &id in &ids {
        bed.ended(id).await;
    }
    worker.stop().await;
    ids
}

/// Every event of these tasks, by task.
async fn stored(bed: &Bed, ids: &[TaskId]) -> Seen {
    let mut all = BTreeMap::new();
    for &id in ids {
        all.insert(id, bed.events(id).await.iter().map(|event| event.seq).collect());
    }
    all
}

/// Takes as many events as are stored.
async fn heard(told: &mut mpsc::Receiver<Told>, stored: &Seen) -> Seen {
    let mut seen = Seen::new();
    for _ in 0..stored.values().map(Vec::len).sum() {
        let event = next(told).await.event;
        seen.entry(event.task_id).or_default().push(event.seq);
    }
    seen
}

/// As [`heard`], by a new subscriber. On PostgreSQL it may be given what was committed shortly before it began too: as long as
/// any transaction of the server is open, what came after that one was not given to anyone yet.
async fn heard_by_new(bed: &Bed, told: &mut mpsc::Receiver<Told>, stored: &Seen) -> Seen {
    if !bed.url.starts_with("postgres") {
        return heard(told, stored).await;
    }
    let mut seen = Seen::new();
    while seen.values().map(Vec::len).sum::<usize>() < stored.values().map(Vec::len).sum() {
        let event = next(told).await.event;
        if stored.contains_key(&event.task_id) {
            seen.entry(event.task_id).or_default().push(event.seq);
        }
    }
    seen
}

async fn a_subscriber_is_given_every_event_in_order_and_goes_on_where_it_was(bed: Bed) {
    let (mail, mut told) = listen(bed.client.subscriber("mail")).await;
    let first = stored(&bed, &run(&bed, 5).await).await;
    assert_eq!(heard(&mut told, &first).await, first);
    // It counts what was handled once the handler has ended, which is after it passed the event on.
    let all = first.values().map(Vec::len).sum::<usize>() as u64;
    until(async || mail.stats().handled == all).await;
    mail.stop().await;
    // What happens while nobody runs it is not missed, and nothing is given twice.
    let second = stored(&bed, &run(&bed, 5).await).await;
    let (mail, mut told) = listen(bed.another_client_or_same().await.subscriber("mail")).await;
    assert_eq!(heard(&mut told, &second).await, second);
    mail.stop().await;
    assert!(told.recv().await.is_none(), "nothing more was given");
    let list = bed.client.subscribers().await.expect("listed");
    assert_eq!((list.len(), list[0].name.as_str(), list[0].rows_behind), (1, "mail", 0));
    assert_eq!(list[0].tenant.as_deref(), Some("default"));
}

async fn a_new_subscriber_begins_now_or_with_what_is_kept(bed: Bed) {
    let before = stored(&bed, &run(&bed, 3).await).await;
    let (_all, mut from_start) = listen(bed.client.subscriber("all").from_start()).await;
    let (_new, mut from_now) = listen(bed.client.subscriber("new")).await;
    let after = stored(&bed, &run(&bed, 3).await).await;
    assert_eq!(heard(&mut from_start, &before).await, before);
    assert_eq!(heard(&mut from_start, &after).await, after);
    assert_eq!(heard_by_new(&bed, &mut from_now, &after).await, after);
}

async fn types_and_tenants_are_filtered(bed: Bed) {
    let acme = bed.client.for_tenant("acme");
    let cleaned = |client: &Client, name: &str| client.subscriber(name).types(["disk.*"]).expect("a pattern");
    let (_ours, mut ours) = listen(cleaned(&bed.client, "ours")).await;
    let (_theirs, mut theirs) = listen(cleaned(&acme, "theirs")).await;
    let (_all, mut all) = listen(cleaned(&acme, "all").all_tenants()).await;
    let worker = worker(&bed).await;
    let mine = submit(&bed.client, 1).await[0];
    bed.ended(mine).await;
    let its = submit(&acme, 1).await[0];
    for (told, expected) in [(&mut ours, mine), (&mut theirs, its)] {
        let told = next(told).await;
        assert_eq!((told.event.task_id, told.event.kind.as_str()), (expected, "disk.cleaned"));
    }
    let both: Vec<(TaskId, String)> = [next(&mut all).await, next(&mut all).await]
        .map(|told| (told.event.task_id, told.tenant.to_string()))
        .into();
    assert_eq!(both, [(mine, "default".to_owned()), (its, "acme".to_owned())]);
    assert!(bed.client.subscriber("bad").types(["*.done"]).is_err());
    worker.stop().await;
}

async fn a_failing_handler_is_called_again_and_holds_nobody_else_up(bed: Bed) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let failing = bed
        .client
        .subscriber("failing")
        .types(["task.completed"])
        .expect("a pattern")
        .back_off(SOON, SOON)
        .start(move |_| {
            let call = counted.fetch_add(1, Ordering::SeqCst);
            async move {
                match call {
                    0 => Err(TaskError::retryable("away", "the mail server is away")),
                    1 => panic!("and then it broke"),
                    _ => Ok(()),
                }
            }
        })
        .await
        .expect("starts");
    let hopeless = bed
        .client
        .subscriber("hopeless")
        .back_off(SOON, Duration::from_secs(60))
        .start(async |_| Err(TaskError::retryable("away", "for ever")))
        .await
        .expect("starts");
    let (_other, mut told) = listen(bed.client.subscriber("other")).await;
    let all = stored(&bed, &run(&bed, 1).await).await;
    assert_eq!(heard(&mut told, &all).await, all);
    until(async || failing.stats().handled == 1).await;
    assert_eq!((calls.load(Ordering::SeqCst), failing.stats().failed), (3, 2));
    until(async || hopeless.stats().failed > 2).await;
    assert_eq!(hopeless.stats().handled, 0);
    assert!(hopeless.stats().behind > Duration::ZERO);
    // It stops although its handler never succeeds.
    tokio::time::timeout(PATIENCE, hopeless.stop()).await.expect("it stops");
    until(async || failing.stats().behind.is_zero()).await;
}

async fn a_handler_that_hangs_holds_no_task_and_no_other_subscriber_up(bed: Bed) {
    let hanging = bed.client.subscriber("hanging").start(async |_| std::future::pending().await).await;
    let hanging = hanging.expect("starts");
    let (_other, mut told) = listen(bed.client.subscriber("other")).await;
    let all = stored(&bed, &run(&bed, 20).await).await;
    assert_eq!(heard(&mut told, &all).await, all);
    assert_eq!(hanging.stats().handled, 0);
}

async fn an_event_that_is_refused_for_good_is_passed_by(bed: Bed) {
    let (send, mut told) = mpsc::channel(100);
    let mail = bed
        .client
        .subscriber("mail")
        .start(move |told: Told| {
            let send = send.clone();
            async move {
                if told.event.kind == "task.started" {
                    return Err(TaskError::fatal("no", "not this one"));
                }
                Ok(send.send(told).await?)
            }
        })
        .await
        .expect("starts");
    let id = run(&bed, 1).await[0];
    let rest = bed.events(id).await.into_iter().filter(|event| event.kind != "task.started");
    for event in rest {
        assert_eq!(next(&mut told).await.event.seq, event.seq);
    }
    until(async || mail.stats().refused == 1).await;
}

async fn the_events_of_a_task_are_handled_one_at_a_time_and_those_of_others_beside(bed: Bed) {
    let ids = run(&bed, 8).await;
    let all = stored(&bed, &ids).await;
    let (under_way, most) = (Arc::new(Mutex::new(BTreeSet::new())), Arc::new(AtomicUsize::new(0)));
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let mail = {
        let (under_way, most, seen) = (Arc::clone(&under_way), Arc::clone(&most), Arc::clone(&seen));
        let handler = move |told: Told| {
            let (under_way, most, seen) = (Arc::clone(&under_way), Arc::clone(&most), Arc::clone(&seen));
            async move {
                let task = told.event.task_id;
                {
                    let mut under_way = under_way.lock().expect("no panic");
                    assert!(under_way.insert(task), "one event of a task at a time");
                    most.fetch_max(under_way.len(), Ordering::SeqCst);
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
                under_way.lock().expect("no panic").remove(&task);
                let first_try =
                    told.event.seq == 2 && seen.lock().expect("no panic").entry(task).or_default().len() == 1;
                seen.lock().expect("no panic").entry(task).or_default().push(told.event.seq);
                if first_try {
                    // Tried again before what comes after it.
                    seen.lock().expect("no panic").entry(task).or_default().push(0);
                    return Err(TaskError::retryable("once", "not at once"));
                }
                Ok(())
            }
        };
        bed.client.subscriber("mail").from_start().concurrency(4).back_off(SOON, SOON).start(handler)
    };
    let mail = mail.await.expect("starts");
    until(async || mail.stats().handled == all.values().map(Vec::len).sum::<usize>() as u64).await;
    assert!((2..=4).contains(&most.load(Ordering::SeqCst)), "side by side, within the bound");
    assert_eq!(mail.stats().failed, 8, "one for each task, and no other");
    for (id, seqs) in seen.lock().expect("no panic").iter() {
        let mut expected = all[id].clone();
        expected.splice(1..2, [2, 0, 2]);
        assert_eq!(*seqs, expected);
    }
}

async fn a_batch_that_fails_is_given_again_as_it_was(bed: Bed) {
    let all = stored(&bed, &run(&bed, 5).await).await;
    let batches: Arc<Mutex<Batches>> = Arc::default();
    let given = Arc::clone(&batches);
    let mail = bed
        .client
        .subscriber("mail")
        .from_start()
        .batch(7)
        .back_off(SOON, SOON)
        .start_batches(move |batch| {
            let names = batch.iter().map(|told| (told.event.task_id, told.event.seq)).collect();
            let mut given = given.lock().expect("no panic");
            given.push(names);
            let fails = given.len() % 2 == 1;
            // Fatal or not: a batch is never passed by.
            async move { if fails { Err(TaskError::fatal("away", "the broker is away")) } else { Ok(()) } }
        })
        .await
        .expect("starts");
    let count: usize = all.values().map(Vec::len).sum();
    until(async || mail.stats().handled == count as u64).await;
    let batches = batches.lock().expect("no panic");
    let mut seen = Seen::new();
    for pair in batches.chunks(2) {
        assert_eq!(pair[0], pair[1]);
        for (task, seq) in &pair[0] {
            seen.entry(*task).or_default().push(*seq);
        }
    }
    assert_eq!(seen, all);
}

async fn batches_have_their_bound_and_cut_rows_where_it_is(bed: Bed) {
    // A row of many events: everything of this step is one transaction.
    let worker = Worker::new(&bed.client)
        .handler("talk", |run: Run, (): ()| async move {
            let words: Vec<String> = (0..20).map(|n| format!("word.number-{n}")).collect();
            futures_util::future::try_join_all(words.iter().map(|word| run.publish(word, &1))).await?;
            Ok::<_, TaskError>(())
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("talk", &())).await.expect("accepted").id;
    bed.ended(id).await;
    let count = bed.events(id).await.len();
    // Stopped and started again after each batch, it goes on in the middle of a row.
    let mut seqs = Vec::new();
    while seqs.len() < count {
        let (send, mut batches) = mpsc::channel(1);
        let mail = bed
            .client
            .subscriber("mail")
            .from_start()
            .batch(3)
            .start_batches(move |batch| {
                let send = send.clone();
                async move { send.try_send(batch).map_err(|_| TaskError::retryable("full", "one batch is enough")) }
            })
            .await
            .expect("starts");
        let batch = tokio::time::timeout(PATIENCE, batches.recv()).await.expect("in time").expect("a batch");
        assert!(!batch.is_empty() && batch.len() <= 3);
        seqs.extend(batch.iter().map(|told| told.event.seq));
        mail.stop().await;
        // What was taken while it was being stopped.
        while let Ok(batch) = batches.try_recv() {
            seqs.extend(batch.iter().map(|told| told.event.seq));
        }
    }
    assert!(seqs.iter().copied().eq(1..=count as u64), "{seqs:?}");
    worker.stop().await;
}

async fn one_process_runs_a_subscriber_and_the_next_takes_over_when_it_stops(bed: Bed) {
    let other = bed.another_client_or_same().await;
    let (first, mut told) = listen(bed.client.subscriber("mail")).await;
    until(async || first.stats().holding).await;
    let (second, mut told_later) = listen(other.subscriber("mail")).await;
    let one = stored(&bed, &run(&bed, 3).await).await;
    assert_eq!(heard(&mut told, &one).await, one);
    assert!(!second.stats().holding && second.stats().handled == 0);
    first.stop().await;
    let two = stored(&bed, &run(&bed, 3).await).await;
    assert_eq!(heard(&mut told_later, &two).await, two);
    assert!(told.recv().await.is_none());
}

async fn another_process_takes_over_within_seconds_when_the_holder_dies(bed: Bed) {
    let other = bed.another_client_or_same().await;
    let (first, mut told) = listen(bed.client.subscriber("mail")).await;
    let one = stored(&bed, &run(&bed, 3).await).await;
    assert_eq!(heard(&mut told, &one).await, one);
    let (_second, mut told_later) = listen(other.subscriber("mail")).await;
    // Without a word, as if it were killed.
    drop(first);
    let died = std::time::Instant::now();
    let ids = run(&bed, 3).await;
    let two = stored(&bed, &ids).await;
    let mut seen = Seen::new();
    while seen.iter().filter(|(id, _)| ids.contains(id)).map(|(_, seqs)| seqs.len()).sum::<usize>()
        < two.values().map(Vec::len).sum()
    {
        // What the first had handled and not noted is given again.
        let event = next(&mut told_later).await.event;
        seen.entry(event.task_id).or_default().push(event.seq);
    }
    assert!(died.elapsed() < Duration::from_secs(12), "{:?}", died.elapsed());
    seen.retain(|id, _| ids.contains(id));
    assert_eq!(seen, two);
}

async fn a_holder_that_was_paused_for_too_long_moves_nothing_and_hears_of_it(bed: Bed) {
    if bed.url == "memory:" {
        // Another process cannot see it.
        return;
    }
    let (entered, mut calls) = mpsc::channel(100);
    let (go_on, may_go_on) = tokio::sync::watch::channel(false);
    let paused = bed
        .client
        .subscriber("mail")
        .start(move |told: Told| {
            let (entered, mut may_go_on) = (entered.clone(), may_go_on.clone());
            async move {
                entered.send(told).await?;
                may_go_on.wait_for(|&go_on| go_on).await?;
                Ok(())
            }
        })
        .await
        .expect("starts");
    bed.client.announce(&["work"]).await.expect("announced");
    let id = submit(&bed.client, 1).await[0];
    assert_eq!(next(&mut calls).await.event.seq, 1);
    // For the other process its lease is over, as if this one had stood still.
    let other = bed.another_client().await;
    other.clock().advance(Duration::from_secs(3_600));
    let (second, mut told) = listen(other.subscriber("mail")).await;
    assert_eq!(next(&mut told).await.event.task_id, id);
    until(async || second.stats().handled == 1).await;
    go_on.send(true).expect("it waits");
    until(async || !paused.stats().holding).await;
    let more = submit(&bed.client, 1).await[0];
    assert_eq!(next(&mut told).await.event.task_id, more);
    paused.stop().await;
    assert!(second.stats().holding);
    second.stop().await;
    let list = bed.client.subscribers().await.expect("listed");
    assert_eq!((list[0].rows_behind, list[0].held_by.as_deref()), (0, None));
}

async fn a_removed_subscriber_ends_and_a_new_one_of_its_name_begins_anew(bed: Bed) {
    let (mail, mut told) = listen(bed.client.subscriber("mail").lease(Duration::from_millis(300))).await;
    until(async || mail.stats().holding).await;
    assert!(bed.client.remove_subscriber("mail").await.expect("removed"));
    assert!(!bed.client.remove_subscriber("mail").await.expect("nothing to remove"));
    until(async || !mail.stats().holding).await;
    assert!(told.recv().await.is_none(), "it has ended");
    run(&bed, 1).await;
    let (_new, mut told) = listen(bed.client.subscriber("mail")).await;
    let all = stored(&bed, &run(&bed, 1).await).await;
    assert_eq!(heard_by_new(&bed, &mut told, &all).await, all);
}

async fn a_subscriber_that_handles_for_longer_than_its_lease_keeps_it(bed: Bed) {
    let other = bed.another_client_or_same().await;
    let lease = Duration::from_millis(600);
    let (done, mut finished) = mpsc::channel(10);
    let slow = bed
        .client
        .subscriber("mail")
        .lease(lease)
        .start(move |_| {
            let done = done.clone();
            async move {
                tokio::time::sleep(lease * 3).await;
                Ok(done.send(()).await?)
            }
        })
        .await
        .expect("starts");
    until(async || slow.stats().holding).await;
    let (second, _told) = listen(other.subscriber("mail").lease(lease)).await;
    bed.client.announce(&["work"]).await.expect("announced");
    submit(&bed.client, 1).await;
    tokio::time::timeout(PATIENCE, finished.recv()).await.expect("in time").expect("handled");
    until(async || slow.stats().handled == 1).await;
    assert!(slow.stats().holding && second.stats().handled == 0);
}

async fn deleted_tasks_do_not_stall_a_subscriber(bed: Bed) {
    let (mail, _) = listen(bed.client.subscriber("mail")).await;
    mail.stop().await;
    let gone = run(&bed, 3).await;
    let kept = run(&bed, 2).await;
    let gone_too = run(&bed, 3).await;
    for id in gone.into_iter().chain(gone_too) {
        bed.client.delete(id).await.expect("deleted");
    }
    let all = stored(&bed, &kept).await;
    let (_mail, mut told) = listen(bed.client.subscriber("mail")).await;
    assert_eq!(heard(&mut told, &all).await, all);
    let more = stored(&bed, &run(&bed, 1).await).await;
    assert_eq!(heard(&mut told, &more).await, more);
}

async fn names_are_checked(bed: Bed) {
    for name in ["", "a\nb", &"x".repeat(129)] {
        let refused = bed.client.subscriber(name).start(async |_| Ok(())).await.err();
        assert!(matches!(refused, Some(Error::Invalid(_))), "{name}");
    }
    let (_ours, _told) = listen(bed.client.subscriber("mail")).await;
    let theirs = bed.client.for_tenant("acme").subscriber("mail").start(async |_| Ok(())).await.err();
    assert!(matches!(theirs, Some(Error::Invalid(_))));
}

/// On PostgreSQL a transaction can commit after a younger one was read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_commits_late_is_heard_of_on_postgres() {
    let Some(bed) = Bed::postgres().await else { return };
    bed.client.announce(&["work"]).await.expect("announced");
    let id = submit(&bed.client, 1).await[0];
    let (mail, mut told) = listen(bed.client.subscriber("mail")).await;
    until(async || mail.stats().holding).await;
    let connect = async || {
        let (client, connection) =
            tokio_postgres::connect(&bed.url, tokio_postgres::NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        client
    };
    let mut late = Vec::new();
    for round in 0..3_u64 {
        let old = connect().await;
        let tell = format!(
            "BEGIN; INSERT INTO log (task, seq, count, time, run, events)
             VALUES ('{id}', {}, 1, 0, 0, '[{{\"type\":\"late\"}}]')",
            round + 2
        );
        old.batch_execute(&tell).await.expect("written, not committed");
        let young = submit(&bed.client, 2).await;
        // The next old one begins before this one ends, so that there is always one under way.
        late.push((old, young));
    }
    let all: Vec<TaskId> = late.iter().flat_map(|(_, young)| young.clone()).collect();
    for (old, _) in late.iter().rev() {
        assert!(told.try_recv().is_err(), "nothing is given that something can still come before");
        old.batch_execute("COMMIT").await.expect("committed");
    }
    let (mut seqs, mut young) = (Vec::new(), Vec::new());
    for _ in 0..all.len() + late.len() {
        let event = next(&mut told).await.event;
        if event.task_id == id { seqs.push(event.seq) } else { young.push(event.task_id) }
    }
    assert_eq!(seqs, [2, 3, 4]);
    assert_eq!(young.into_iter().collect::<BTreeSet<_>>(), all.into_iter().collect());
}
