//! Paused queues, handlers, and tasks counted by state.

use super::bed::{Bed, completed, failed, suspended, worker};
use crate::store::overview::{COUNTED, StateCounts};
use crate::store::{Claim, QueueSettings};
use crate::task::{NewTask, State};

async fn pause(bed: &Bed, queue: &str, pause: bool) -> bool {
    bed.store.pause_queue(queue, pause, "ann").await.expect("the store answers")
}

async fn a_paused_queue_gives_no_task_until_it_is_resumed(bed: Bed) {
    let (held, free) =
        (bed.submit(NewTask::new("h", &1).queue("q")).await, bed.submit(NewTask::new("h", &2).queue("r")).await);
    assert!(pause(&bed, "q", true).await);
    assert!(!pause(&bed, "q", true).await, "it is paused already");
    let other = bed.another_process().await;
    assert_eq!(other.claim_ids(10).await, [free], "other queues go on");
    assert!(other.claim_ids(10).await.is_empty());
    let only = |queue: &str| Claim { queues: vec![queue.into()], handlers: vec!["h".into()], ..bed.ask(10) };
    assert!(bed.claim_as(&only("q")).await.leases.is_empty(), "whichever way it is asked for");
    assert_eq!(bed.state(held).await, State::Pending);
    assert!(pause(&bed, "q", false).await);
    assert!(!pause(&bed, "q", false).await, "it goes on already");
    assert_eq!(bed.claim_as(&only("q")).await.leases[0].task, held);
}

async fn tasks_that_run_go_on_while_their_queue_is_paused(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).queue("q")).await;
    pause(&bed, "q", true).await;
    assert_eq!(bed.heartbeat(&[&lease]).await.len(), 1);
    bed.end(&lease, completed()).await;
    assert_eq!(bed.state(lease.task).await, State::Completed);
}

async fn a_deadline_passes_in_a_paused_queue(bed: Bed) {
    pause(&bed, "q", true).await;
    let id = bed.submit(NewTask::new("h", &1).queue("q").timeout(std::time::Duration::from_secs(5))).await;
    bed.pass(6).await;
    assert_eq!(bed.state(id).await, State::Failed);
}

async fn a_queue_is_shown_as_paused_also_when_nobody_knew_it(bed: Bed) {
    pause(&bed, "new", true).await;
    let queue = bed.another_process().await.queue("new").await;
    assert!(queue.paused);
    assert_eq!((queue.pending, queue.max_pending), (0, QueueSettings::default().max_pending));
    bed.submit(NewTask::new("h", &1)).await;
    assert!(!bed.queue("default").await.paused);
}

async fn handlers_are_known_for_good(bed: Bed) {
    let other = worker(&["x"]);
    bed.store.register(&other).await.expect("registered");
    bed.store.retire(other.id).await.expect("retired");
    let handlers = bed.store.handlers().await.expect("the store answers");
    let names: Vec<&str> = handlers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["g", "h", "x"]);
    assert!(handlers.iter().all(|(_, first_seen)| *first_seen > 0));
}

async fn tasks_are_counted_by_state_and_tenant(bed: Bed) {
    let counts = async |tenant: &str| bed.store.count_states(tenant).await.expect("the store answers");
    assert_eq!(counts("default").await, StateCounts::default());
    for outcome in [completed(), completed(), failed(), suspended("signal", "go", None)] {
        let lease = bed.running().await;
        bed.end(&lease, outcome).await;
    }
    bed.running().await;
    let cancelled = bed.submit(NewTask::new("h", &1)).await;
    bed.cancel(cancelled).await.expect("cancelled");
    bed.submit_many(3).await;
    bed.submit(NewTask::new("h", &1).tenant("acme")).await;
    let expected =
        StateCounts { pending: 3, running: 1, waiting: 1, completed: 2, failed: 1, cancelled: 1, bounded: false };
    assert_eq!(counts("default").await, expected);
    assert_eq!(counts("acme").await, StateCounts { pending: 1, ..StateCounts::default() });
    assert_eq!(counts("nobody\0").await, StateCounts::default());
}

async fn counting_is_bounded_and_says_so(bed: Bed) {
    let gate = QueueSettings { max_pending: 100_000, ..QueueSettings::default() };
    bed.configure_queue("default", gate).await;
    let old = bed.running().await;
    let waits = bed.running().await;
    bed.end(&waits, suspended("signal", "go", None)).await;
    for _ in 0..COUNTED / 1_000 {
        bed.submit_many(1_000).await;
    }
    let counts = bed.store.count_states("default").await.expect("the store answers");
    assert!(counts.bounded);
    assert_eq!((counts.running, counts.waiting), (1, 1), "what is older than all that is found by its state");
    assert!(counts.pending >= COUNTED);
    bed.end(&old, completed()).await;
}

on_every_store![
    a_paused_queue_gives_no_task_until_it_is_resumed,
    tasks_that_run_go_on_while_their_queue_is_paused,
    a_deadline_passes_in_a_paused_queue,
    a_queue_is_shown_as_paused_also_when_nobody_knew_it,
    handlers_are_known_for_good,
    tasks_are_counted_by_state_and_tenant,
    counting_is_bounded_and_says_so,
];
