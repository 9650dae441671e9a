//! Lists, queues and workers.

use super::bed::{Bed, completed, failed, suspended, worker};
use crate::store::{Filter, QueueSettings, Settings};
use crate::task::{NewTask, State, TaskId};

fn by(change: impl FnOnce(&mut Filter)) -> Filter {
    let mut filter = Filter::default();
    change(&mut filter);
    filter
}

async fn another_tenants_task_is_not_there(bed: Bed) {
    let theirs = bed.submit(NewTask::new("h", &1).tenant("acme")).await;
    assert!(bed.find(theirs).await.is_none());
    assert!(bed.list(Filter::default()).await.is_empty());
    assert_eq!(bed.task_of("acme", theirs).await.id, theirs);
    assert!(bed.find(TaskId::new()).await.is_none());
}

async fn a_list_is_newest_first_unless_asked_otherwise(bed: Bed) {
    let mut ids = bed.submit_many(5).await;
    assert_eq!(bed.list(by(|filter| filter.oldest_first = true)).await, ids);
    ids.reverse();
    assert_eq!(bed.list(Filter::default()).await, ids);
}

async fn a_list_is_filtered_by_state(bed: Bed) {
    let mut by_state = Vec::new();
    for outcome in [completed(), failed(), suspended("signal", "go", None)] {
        let lease = bed.running().await;
        by_state.push((outcome.state(), lease.task));
        bed.end(&lease, outcome).await;
    }
    by_state.push((State::Running, bed.running().await.task));
    let cancelled = bed.submit(NewTask::new("h", &1)).await;
    bed.cancel(cancelled).await.expect("cancelled");
    by_state.push((State::Cancelled, cancelled));
    by_state.push((State::Pending, bed.submit(NewTask::new("h", &1)).await));
    for (state, id) in by_state {
        assert_eq!(bed.list(by(|filter| filter.state = Some(state))).await, [id], "{state}");
    }
}

async fn a_list_is_filtered_by_handler_queue_and_tag_together(bed: Bed) {
    let wanted = bed.submit(NewTask::new("g", &1).queue("q").tag("team", "ops").tag("app", "shop")).await;
    let other_value = bed.submit(NewTask::new("g", &2).queue("q").tag("team", "dev")).await;
    bed.submit(NewTask::new("h", &3).queue("r").tag("team", "ops")).await;
    bed.submit(NewTask::new("h", &4).tag("ops", "team")).await;
    let tag = || Some(("team".to_owned(), "ops".to_owned()));
    assert_eq!(bed.list(by(|filter| filter.handler = Some("g".into()))).await, [other_value, wanted]);
    assert_eq!(bed.list(by(|filter| filter.queue = Some("q".into()))).await, [other_value, wanted]);
    assert_eq!(bed.list(by(|filter| filter.tag = tag())).await.len(), 2);
    let all = by(|filter| {
        filter.state = Some(State::Pending);
        filter.handler = Some("g".into());
        filter.queue = Some("q".into());
        filter.tag = tag();
    });
    assert_eq!(bed.list(all).await, [wanted]);
    assert!(bed.list(by(|filter| filter.handler = Some("G".into()))).await.is_empty(), "names are exact");
    assert!(bed.list(by(|filter| filter.queue = Some("%".into()))).await.is_empty());
}

async fn pages_follow_each_other_without_gap_or_repeat_in_both_orders(bed: Bed) {
    let mut all = Vec::new();
    for n in 0..10 {
        let handler = if n % 3 == 0 { "g" } else { "h" };
        let id = bed.submit(NewTask::new(handler, &n).tag("n", "x")).await;
        if handler == "h" {
            all.push(id);
        }
    }
    for oldest_first in [true, false] {
        let (mut pages, mut after) = (Vec::new(), None);
        loop {
            let page = bed
                .list(Filter { handler: Some("h".into()), oldest_first, after, limit: 2, ..Filter::default() })
                .await;
            assert!(page.len() <= 2);
            let Some(&last) = page.last() else { break };
            after = Some(last);
            pages.extend(page);
        }
        let mut expected = all.clone();
        if !oldest_first {
            expected.reverse();
        }
        assert_eq!(pages, expected);
    }
}

async fn a_page_has_a_hundred_tasks_unless_asked_otherwise_and_never_more_than_a_thousand(bed: Bed) {
    bed.submit_many(1_000).await;
    bed.submit_many(50).await;
    assert_eq!(bed.list(Filter::default()).await.len(), 100);
    assert_eq!(bed.list(by(|filter| filter.limit = 7)).await.len(), 7);
    assert_eq!(bed.list(by(|filter| filter.limit = usize::MAX)).await.len(), 1_000);
}

async fn queues_show_what_is_in_them_and_their_bounds(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 7, max_running: Some(3), ..QueueSettings::default() })
        .await;
    let empty = bed.queue("q").await;
    assert_eq!((empty.pending, empty.running, empty.max_pending, empty.max_running), (0, 0, 7, Some(3)));
    assert_eq!(empty.oldest, None);
    let lease = bed.running_as(NewTask::new("h", &1).queue("r")).await;
    bed.end(&lease, suspended("signal", "go", None)).await;
    bed.running_as(NewTask::new("h", &1).queue("r")).await;
    bed.submit(NewTask::new("h", &2).queue("r").priority(1)).await;
    bed.advance(5);
    let head = bed.submit(NewTask::new("h", &3).queue("r").priority(9)).await;
    let queue = bed.queue("r").await;
    assert_eq!((queue.pending, queue.running, queue.max_pending, queue.max_running), (2, 1, 10_000, None));
    assert_eq!(queue.oldest, Some(bed.task(head).await.created_at.as_microsecond()));
}

async fn settings_are_kept_and_what_is_not_named_stays(bed: Bed) {
    let bounded = |max| QueueSettings { max_pending: max, ..QueueSettings::default() };
    bed.configure_queue("q", bounded(5)).await;
    bed.configure_queue("r", bounded(6)).await;
    bed.configure(Settings::default()).await;
    let other = bed.another_process().await;
    assert_eq!((other.queue("q").await.max_pending, other.queue("r").await.max_pending), (5, 6));
    bed.configure_queue("q", bounded(9)).await;
    assert_eq!((other.queue("q").await.max_pending, other.queue("r").await.max_pending), (9, 6));
}

async fn workers_are_seen_while_they_are_registered(bed: Bed) {
    let mut second = worker(&["x", "y"]);
    second.name = "host:42".into();
    second.slots = 64;
    bed.store.register(&second).await.expect("registered");
    bed.store.register(&second).await.expect("once more changes nothing");
    let workers = bed.another_process().await.store.workers().await.expect("the store answers");
    let seen = workers.iter().find(|worker| worker.id == second.id).expect("there");
    assert_eq!((seen.name.as_str(), seen.slots, seen.running), ("host:42", 64, 0));
    assert_eq!((&seen.handlers, &seen.queues), (&second.handlers, &second.queues));
    assert_eq!(workers.iter().filter(|worker| worker.id == second.id).count(), 1);
    bed.store.retire(second.id).await.expect("retired");
    bed.store.retire(second.id).await.expect("once more changes nothing");
    let workers = bed.store.workers().await.expect("the store answers");
    assert!(workers.iter().all(|worker| worker.id != second.id));
    assert!(workers.iter().any(|worker| worker.id == bed.worker));
}

async fn a_worker_that_retired_leaves_its_tasks_to_the_sweep(bed: Bed) {
    let lease = bed.running().await;
    bed.store.retire(bed.worker).await.expect("retired");
    bed.lose(&lease).await;
    assert_eq!(bed.state(lease.task).await, State::Pending);
}

async fn a_store_that_is_opened_again_has_everything(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(super::bed::write(&lease, 1).step("a")).await.expect("written");
    let other = bed.another_process().await;
    other.commit(super::bed::write(&lease, 2).outcome(completed())).await.expect("a lease is good in any process");
    assert_eq!(bed.everything(lease.task).await, other.everything(lease.task).await);
    assert_eq!(bed.state(lease.task).await, State::Completed);
}

on_every_store![
    another_tenants_task_is_not_there,
    a_list_is_newest_first_unless_asked_otherwise,
    a_list_is_filtered_by_state,
    a_list_is_filtered_by_handler_queue_and_tag_together,
    pages_follow_each_other_without_gap_or_repeat_in_both_orders,
    a_page_has_a_hundred_tasks_unless_asked_otherwise_and_never_more_than_a_thousand,
    queues_show_what_is_in_them_and_their_bounds,
    settings_are_kept_and_what_is_not_named_stays,
    workers_are_seen_while_they_are_registered,
    a_worker_that_retired_leaves_its_tasks_to_the_sweep,
    a_store_that_is_opened_again_has_everything,
];
