//! The events of all tasks of a tenant.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{Bed, PATIENCE};
use longhaul::{AllEvents, Cursor, Error, Event, Filter, NewTask, Run, TaskError, TaskId, Worker, WorkerHandle};

on_every_store!(
    a_reader_from_the_start_gets_every_event_of_its_tenant_once_and_in_order,
    a_reader_that_comes_back_with_any_cursor_gets_exactly_the_rest,
    a_reader_hears_of_what_another_process_does,
    a_reader_beside_many_writers_misses_nothing,
    types_are_filtered_and_passed_by,
    a_cursor_of_another_store_or_time_is_refused,
);

async fn next(events: &mut AllEvents) -> (Event, Cursor) {
    tokio::time::timeout(PATIENCE, events.next()).await.expect("an event comes").expect("the store answers")
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

/// Runs `count` tasks to their end.
async fn run(bed: &Bed, count: u32) -> Vec<TaskId> {
    let worker = worker(bed).await;
    let mut ids = Vec::new();
    for n in 0..count {
        ids.push(bed.client.submit(NewTask::new("work", &n)).await.expect("accepted").id);
    }
    for &id in &ids {
        bed.ended(id).await;
    }
    worker.stop().await;
    ids
}

/// Every event of these tasks, by task.
async fn stored(bed: &Bed, ids: &[TaskId]) -> BTreeMap<TaskId, Vec<u64>> {
    let mut all = BTreeMap::new();
    for &id in ids {
        all.insert(id, bed.events(id).await.iter().map(|event| event.seq).collect());
    }
    all
}

/// Reads until as many events were given as are stored.
async fn read(
    events: &mut AllEvents,
    stored: &BTreeMap<TaskId, Vec<u64>>,
) -> (Vec<(Event, Cursor)>, BTreeMap<TaskId, Vec<u64>>) {
    let wanted: usize = stored.values().map(Vec::len).sum();
    let (mut all, mut seen): (Vec<_>, BTreeMap<TaskId, Vec<u64>>) = (Vec::new(), BTreeMap::new());
    while all.len() < wanted {
        let (event, cursor) = next(events).await;
        seen.entry(event.task_id).or_default().push(event.seq);
        all.push((event, cursor));
    }
    (all, seen)
}

async fn a_reader_from_the_start_gets_every_event_of_its_tenant_once_and_in_order(bed: Bed) {
    let ids = run(&bed, 5).await;
    bed.client.for_tenant("acme").submit(NewTask::new("work", &1)).await.expect("accepted");
    let stored = stored(&bed, &ids).await;
    let mut events = bed.client.all_events(Some(&Cursor::START)).await.expect("begins");
    assert_eq!(read(&mut events, &stored).await.1, stored);
    let mut theirs = bed.client.for_tenant("acme").all_events(Some(&Cursor::START)).await.expect("begins");
    let (event, _) = next(&mut theirs).await;
    assert_eq!((event.kind.as_str(), event.seq), ("task.submitted", 1));
    assert!(!ids.contains(&event.task_id));
}

async fn a_reader_that_comes_back_with_any_cursor_gets_exactly_the_rest(bed: Bed) {
    let ids = run(&bed, 3).await;
    let stored = stored(&bed, &ids).await;
    let mut events = bed.client.all_events(Some(&Cursor::START)).await.expect("begins");
    let (all, _) = read(&mut events, &stored).await;
    let name = |event: &Event| (event.task_id, event.seq);
    let client = bed.another_client_or_same().await;
    for cut in 0..all.len() - 1 {
        let cursor: Cursor = all[cut].1.to_string().parse().expect("its text is read back");
        let mut rest = client.all_events(Some(&cursor)).await.expect("goes on");
        for (expected, _) in &all[cut + 1..] {
            assert_eq!(name(&next(&mut rest).await.0), name(expected), "after {cut}");
        }
    }
}

async fn a_reader_hears_of_what_another_process_does(bed: Bed) {
    bed.client.announce(&["work"]).await.expect("announced");
    let other = bed.another_client_or_same().await;
    let mut events = bed.client.all_events(None).await.expect("begins");
    for n in 0..3 {
        let id = other.submit(NewTask::new("work", &n)).await.expect("accepted").id;
        loop {
            let (event, _) = next(&mut events).await;
            if (event.task_id, event.kind.as_str()) == (id, "task.submitted") {
                break;
            }
        }
    }
}

async fn a_reader_beside_many_writers_misses_nothing(bed: Bed) {
    let worker = worker(&bed).await;
    let mut events = bed.client.all_events(Some(&Cursor::START)).await.expect("begins");
    let submit = async |client: longhaul::Client| {
        let mut ids = Vec::new();
        for n in 0..30 {
            ids.push(client.submit(NewTask::new("work", &n)).await.expect("accepted").id);
        }
        ids
    };
    let clients = [bed.client.clone(), bed.another_client_or_same().await, bed.client.clone()];
    let [one, two, three] = clients.map(submit);
    let read = async {
        let (mut ended, mut seen) = (0, BTreeMap::<TaskId, Vec<u64>>::new());
        while ended < 90 {
            let (event, cursor) = next(&mut events).await;
            seen.entry(event.task_id).or_default().push(event.seq);
            ended += usize::from(event.is_final());
            if event.seq % 3 == 0 {
                // A reconnect, in the middle of everything.
                events = bed.client.all_events(Some(&cursor)).await.expect("goes on");
            }
        }
        seen
    };
    let (mut ids, more, most, seen) = tokio::join!(one, two, three, read);
    ids.extend(more);
    ids.extend(most);
    assert_eq!(seen, stored(&bed, &ids).await);
    worker.stop().await;
}

async fn types_are_filtered_and_passed_by(bed: Bed) {
    run(&bed, 2).await;
    let all = async || bed.client.all_events(Some(&Cursor::START)).await.expect("begins");
    let mut some = all().await.types(["disk.*", "task.completed"]).expect("patterns");
    for _ in 0..4 {
        let (event, _) = next(&mut some).await;
        assert!(["disk.cleaned", "task.completed"].contains(&event.kind.as_str()), "{}", event.kind);
    }
    let mut none = all().await.types(["nothing.like.this"]).expect("a pattern");
    let before = none.cursor();
    // It waits for ever, and passes by what there is.
    while none.cursor() == before {
        assert!(tokio::time::timeout(Duration::from_millis(50), none.next()).await.is_err());
    }
    let passed = none.cursor();
    bed.client.submit(NewTask::new("work", &1)).await.expect("accepted");
    let mut rest = bed.client.all_events(Some(&passed)).await.expect("goes on");
    assert_eq!(next(&mut rest).await.0.kind, "task.submitted");
    for bad in ["", "task*", "*.done", "a.*.b", "a**"] {
        assert!(all().await.types([bad]).is_err(), "{bad}");
    }
}

async fn a_cursor_of_another_store_or_time_is_refused(bed: Bed) {
    run(&bed, 1).await;
    let mut events = bed.client.all_events(Some(&Cursor::START)).await.expect("begins");
    let cursor = next(&mut events).await.1.to_string();
    let elsewhere = if cursor.starts_with('s') { 'p' } else { 's' };
    let later = format!("{}7ffffffffffffffe-0-0-0", &cursor[..1]);
    for text in [format!("{elsewhere}{}", &cursor[1..]), later] {
        let cursor: Cursor = text.parse().expect("a cursor");
        let refused = bed.client.all_events(Some(&cursor)).await.err();
        assert!(matches!(refused, Some(Error::Invalid(_))), "{text}");
    }
    assert_eq!(bed.client.list(&Filter::default()).await.expect("listed").len(), 1);
}
