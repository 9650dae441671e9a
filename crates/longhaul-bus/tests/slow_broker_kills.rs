//! Each broker is killed and started again while tasks come in and events go out: no task is lost or doubled, no event is
//! missing, and a task's events keep their order.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::engine::{Heard, all_tasks, asked, store, worker};
use common::{Bed, publish, subscription};
use longhaul_bus::{Intake, IntakeSettings, Outgoing, Publisher, PublisherSettings};
use serde_json::json;
use tokio::task::JoinSet;

/// How many tasks come in, unless `LONGHAUL_TEST_TASKS` says another number.
const TASKS: usize = 1_000;
/// How many messages are published at once.
const AT_ONCE: usize = 20;
/// A broker is killed three times, or for so many tasks each.
const EACH_KILL: usize = 2_500;
/// When nothing came for so long, it is looked whether that was all.
const QUIET: Duration = Duration::from_secs(1);
/// How long all of it may take, for each thousand tasks; on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(180);
/// How often it is said how far it is.
const SHOW: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_is_killed_while_tasks_come_and_events_go() {
    killed_while_tasks_come_and_events_go(Bed::nats().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_killed_while_tasks_come_and_events_go() {
    killed_while_tasks_come_and_events_go(Bed::redis().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_is_killed_while_tasks_come_and_events_go() {
    killed_while_tasks_come_and_events_go(Bed::rabbitmq().await).await;
}

#[cfg(feature = "kafka")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_is_killed_while_tasks_come_and_events_go() {
    killed_while_tasks_come_and_events_go(Bed::kafka().await).await;
}

async fn killed_while_tasks_come_and_events_go(bed: Option<Bed>) {
    let Some(bed) = bed else { return };
    let total = std::env::var("LONGHAUL_TEST_TASKS").map_or(TASKS, |text| text.parse().expect("a number"));
    let patience = PATIENCE * u32::try_from(total.div_ceil(TASKS)).expect("not that many");
    let to_kill = 3.max(total / EACH_KILL);
    let (tasks_in, events_out) = (bed.queue(), bed.log());
    let store = store().await;
    let worker = worker(&store.client).await;
    let mut consumer = bed.bus.consume(&subscription(events_out.clone(), "all")).await.expect("a consumer");
    let publisher = Publisher::start(&store.client, bed.another().await, PublisherSettings::new(events_out));
    let publisher = publisher.await.expect("a publisher");
    let settings =
        IntakeSettings { ack_wait: common::ACK_WAIT, in_flight: 64, ..IntakeSettings::new(tasks_in.clone()) };
    let intake = Intake::start(&store.client, bed.another().await, settings).await.expect("an intake");

    bed.remember_queues();

    let asked_for = Arc::new(AtomicUsize::new(0));
    let (bus, count) = (bed.another().await, Arc::clone(&asked_for));
    let asking = tokio::spawn(async move {
        let ask =
            |number: usize| asked(&tasks_in, &format!("m{number}"), &json!({"handler": "count", "input": 2}));
        for first in (0..total).step_by(AT_ONCE) {
            let some: Vec<Outgoing> = (first..first + AT_ONCE).map(ask).collect();
            publish(&*bus, &some).await;
            count.fetch_add(AT_ONCE, Ordering::SeqCst);
        }
    });

    let (mut heard, mut acks) = (Heard::default(), JoinSet::new());
    let (mut kills, mut errors) = (0, 0);
    let begun = tokio::time::Instant::now();
    let mut shown = begun;
    loop {
        // Some while tasks are asked for, some while their events come.
        let done = (asked_for.load(Ordering::SeqCst) + heard.by_task.len()) / 2;
        if kills < to_kill && done >= (kills + 1) * total / (to_kill + 1) {
            if !bed.control("kill") {
                eprintln!("skipped: {} cannot be killed here (no script for it)", bed.name);
                asking.abort();
                return;
            }
            assert!(bed.control("start"));
            kills += 1;
        }
        if shown.elapsed() > SHOW {
            shown = tokio::time::Instant::now();
            let asked = asked_for.load(Ordering::SeqCst);
            let (came, counts) = (heard.count(), intake.counts());
            eprintln!("{:?}: {asked} asked for, {counts:?}, {came} events came, {kills} kills", begun.elapsed());
        }
        assert!(begun.elapsed() < patience, "{} events of {} tasks came", heard.count(), heard.by_task.len());
        match tokio::time::timeout(QUIET, consumer.next()).await {
            Ok(Ok(delivery)) => {
                heard.hear(&delivery);
                // Side by side: some brokers write to disk before they answer. No more than may be in flight.
                acks.spawn(async move {
                    if let Err(error) = delivery.ack().await {
                        eprintln!("acknowledging: {error}");
                    }
                });
                while acks.try_join_next().is_some() {}
                continue;
            }
            Ok(Err(error)) => {
                errors += 1;
                assert!(errors < 100 * to_kill, "errors are told, but not as many: {error}");
                eprintln!("consuming: {error}");
                tokio::time::sleep(QUIET / 4).await;
                continue;
            }
            Err(_) => {} // nothing comes: was that all?
        }
        if asking.is_finished() && kills == to_kill {
            let tasks = all_tasks(&store.client).await;
            let all: u64 = tasks.iter().map(|task| task.last_seq).sum();
            let ended = tasks.len() == total && tasks.iter().all(|task| task.state.is_final());
            if ended && heard.count() as u64 >= all {
                break;
            }
        }
    }
    asking.await.expect("all were asked for");
    // What was acknowledged by nobody in time comes again: it makes no second task.
    tokio::time::sleep(common::ACK_WAIT * 2).await;
    let counts = intake.counts();
    assert_eq!(counts.rejected, 0, "{counts:?}");
    let tasks = all_tasks(&store.client).await;
    assert_eq!(tasks.len(), total, "none lost, none doubled");
    heard.assert_complete(&tasks);
    eprintln!(
        "{}: {total} tasks, {} events, {} of them again, {} behind later ones of their task, {counts:?}, {kills} kills, {:?}",
        bed.name,
        heard.count(),
        heard.again,
        heard.late,
        begun.elapsed()
    );
    intake.stop().await;
    publisher.stop().await;
    worker.stop().await;
}
