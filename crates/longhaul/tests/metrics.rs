//! What is counted: tasks are run, and the numbers are read as a scraper reads them.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Bed, PATIENCE, at_once};
use longhaul::run::CheckpointPolicy;
use longhaul::{Client, Effect, NewTask, QueueSettings, Run, Settings, State, TaskError, Worker};
use prometheus_client::registry::Registry;

/// The numbers as published, by name and labels.
struct Numbers(BTreeMap<String, f64>);

impl Numbers {
    fn of(client: &Client) -> Self {
        let mut registry = Registry::with_prefix("longhaul");
        client.register_metrics(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("it can be written");
        let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        Self(lines.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect())
    }

    fn get(&self, name: &str) -> f64 {
        *self.0.get(name).unwrap_or_else(|| panic!("there is no {name} in {:#?}", self.0.keys()))
    }

    fn outcome(&self, name: &str, handler: &str, outcome: &str) -> f64 {
        self.get(&format!("longhaul_{name}_total{{handler=\"{handler}\",outcome=\"{outcome}\"}}"))
    }
}

async fn quick(run: Run, fails: bool) -> Result<(), TaskError> {
    run.step("one", async || Ok::<_, TaskError>(1)).await?;
    let tried = AtomicU32::new(0);
    run.step("two", async || match tried.fetch_add(1, Ordering::Relaxed) {
        0 => Err(TaskError::retryable("once", "fails once")),
        _ => Ok(2),
    })
    .retry(at_once(3))
    .await?;
    run.checkpoint(1, 1, &"here", CheckpointPolicy::default()).await?;
    if fails { Err(TaskError::fatal("broken", "as asked")) } else { Ok(()) }
}

async fn saga(run: Run, (): ()) -> Result<(), TaskError> {
    let undo = |_: u32| async { Ok::<_, TaskError>(()) };
    run.saga().step("made", async || Ok::<_, TaskError>(1)).undo(undo).await?;
    let stuck = |_: u32| async { Err::<(), _>(TaskError::fatal("stuck", "it stays")) };
    run.saga().step("stuck", async || Ok::<_, TaskError>(2)).undo(stuck).await?;
    run.step("broken", async || Err::<(), _>(TaskError::fatal("broken", "as asked"))).await
}

async fn waits(run: Run, (): ()) -> Result<(), TaskError> {
    run.signal::<u32>("go").await.map(drop)
}

async fn doubtful(run: Run, (): ()) -> Result<(), TaskError> {
    run.step("paid", async || Err::<(), _>(TaskError::in_doubt("lost", "no answer")))
        .effect(Effect::Irreversible)
        .verify(async |_| Ok::<_, TaskError>(Some(())))
        .await
}

#[tokio::test]
async fn runs_steps_and_submits_are_counted_by_what_became_of_them() {
    let bed = Bed::memory().await;
    let failures = Arc::new(AtomicU32::new(0));
    let flaky = move |_: Run, (): ()| {
        let first = failures.fetch_add(1, Ordering::Relaxed) == 0;
        async move { if first { Err(TaskError::retryable("once", "fails once")) } else { Ok(()) } }
    };
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("quick", quick)
        .handler("saga", saga)
        .handler("waits", waits)
        .handler("doubtful", doubtful)
        .handler("flaky", flaky)
        .start()
        .await
        .expect("a worker");
    let submit = async |task: NewTask| bed.client.submit(task).await.expect("accepted").id;
    for fails in [false, false, true] {
        let id = submit(NewTask::new("quick", &fails)).await;
        bed.ended(id).await;
    }
    let keyed = submit(NewTask::new("flaky", &()).key("k")).await;
    assert_eq!(submit(NewTask::new("flaky", &()).key("k")).await, keyed);
    assert_eq!(bed.ended(keyed).await.state, State::Completed);
    let undone = submit(NewTask::new("saga", &())).await;
    assert_eq!(bed.ended(undone).await.state, State::Failed);
    let waiting = submit(NewTask::new("waits", &())).await;
    bed.waiting_for(waiting, "signal").await;
    bed.client.signal(waiting, "go", &7).await.expect("heard");
    assert_eq!(bed.ended(waiting).await.state, State::Completed);
    let cancelled = submit(NewTask::new("waits", &())).await;
    bed.waiting_for(cancelled, "signal").await;
    bed.client.cancel(cancelled, None).await.expect("cancelled");
    bed.ended(cancelled).await;
    let doubted = submit(NewTask::new("doubtful", &())).await;
    assert_eq!(bed.ended(doubted).await.state, State::Completed);

    let full = QueueSettings { max_pending: 0, ..QueueSettings::default() };
    let settings = Settings { queues: [("full".to_owned(), full)].into(), ..Settings::default() };
    bed.client.configure(&settings).await.expect("set");
    bed.client.submit(NewTask::new("quick", &false).queue("full")).await.expect_err("full");
    bed.client.submit(NewTask::new("nobody", &())).await.expect_err("unknown");
    bed.client.submit(NewTask::new("flaky", &1).key("k")).await.expect_err("other content");
    bed.client.submit(NewTask::new("", &())).await.expect_err("no name");

    // A run is counted after its end is on disk; a worker that has stopped has counted them all.
    worker.stop().await;
    let numbers = Numbers::of(&bed.client);
    let submits = |outcome: &str| numbers.get(&format!("longhaul_submits_total{{outcome=\"{outcome}\"}}"));
    assert_eq!((submits("new"), submits("known")), (8.0, 1.0));
    assert_eq!((submits("queue_full"), submits("unknown_handler")), (1.0, 1.0));
    assert_eq!((submits("key_conflict"), submits("invalid"), submits("parent_ended")), (1.0, 1.0, 0.0));

    let runs = |handler: &str, outcome: &str| numbers.outcome("runs", handler, outcome);
    assert_eq!((runs("quick", "completed"), runs("quick", "failed"), runs("quick", "lost")), (2.0, 1.0, 0.0));
    assert_eq!((runs("flaky", "retry"), runs("flaky", "completed")), (1.0, 1.0));
    assert_eq!(runs("saga", "failed"), 1.0);
    assert_eq!((runs("waits", "suspended"), runs("waits", "completed")), (2.0, 1.0));
    let durations = |name: &str| numbers.get(&format!("longhaul_{name}"));
    assert_eq!(durations("run_duration_seconds_count{handler=\"quick\"}"), 3.0);

    let steps = |handler: &str, outcome: &str| numbers.outcome("steps", handler, outcome);
    assert_eq!(
        (steps("quick", "completed"), steps("quick", "retried"), steps("quick", "failed")),
        (6.0, 3.0, 0.0)
    );
    assert_eq!((steps("saga", "completed"), steps("saga", "failed")), (2.0, 1.0));
    assert_eq!((steps("saga", "undone"), steps("saga", "not_undone")), (1.0, 1.0));
    assert_eq!((steps("doubtful", "in_doubt"), steps("doubtful", "completed")), (1.0, 1.0));
    assert_eq!(durations("step_duration_seconds_count{handler=\"quick\"}"), 9.0);

    assert!(numbers.get("longhaul_claims_total") >= 1.0);
    let all: f64 = ["quick", "saga", "waits", "flaky", "doubtful"]
        .iter()
        .flat_map(|handler| {
            ["completed", "failed", "cancelled", "suspended", "retry", "released"].map(|how| runs(handler, how))
        })
        .sum();
    assert_eq!(durations("tasks_claimed_total{queue=\"default\"}"), all, "every claim is a run");
    assert_eq!(durations("queue_wait_seconds_count{queue=\"default\"}"), all);
    assert_eq!(durations("checkpoints_total{outcome=\"taken\"}"), 3.0);
    let batches = |kind: &str, what: &str| durations(&format!("store_batch{what}{{kind=\"{kind}\"}}"));
    // The one without a name did not get as far as the store.
    assert_eq!(batches("submit", "_entries_total"), 12.0);
    assert!(batches("commit", "_entries_total") >= all);
    assert!(batches("commit", "es_total") >= 1.0);
    assert_eq!(batches("commit", "es_total"), batches("commit", "_duration_seconds_count"));
    assert!(numbers.get("longhaul_heartbeats_total") >= 1.0);
    assert!(numbers.get("longhaul_sweeps_total") >= 1.0);
    assert_eq!(numbers.get("longhaul_leases_lost_total"), 0.0);
}

#[tokio::test]
async fn a_lost_lease_and_what_sweeps_did_are_counted() {
    let bed = Bed::sqlite().await;
    let (begun, mut seen) = tokio::sync::mpsc::channel(8);
    let hangs = move |run: Run, (): ()| {
        let begun = begun.clone();
        async move {
            begun.send(run.fence()).await.expect("the test listens");
            if run.fence() == 1 {
                std::future::pending::<()>().await;
            }
            Ok::<_, TaskError>(())
        }
    };
    let worker = Worker::new(&bed.client).handler("hangs", hangs).start().await.expect("a worker");
    let id = bed.client.submit(NewTask::new("hangs", &())).await.expect("accepted").id;
    assert_eq!(seen.recv().await, Some(1));
    // Past the lease by the store's clock, the sweep takes it back, unless the worker just extended it.
    let again = async {
        loop {
            bed.client.clock().advance(Duration::from_secs(60));
            if let Ok(fence) = tokio::time::timeout(Duration::from_secs(1), seen.recv()).await {
                return fence;
            }
        }
    };
    let fence = tokio::time::timeout(PATIENCE, again).await.expect("a second run");
    assert!(fence.is_some_and(|fence| fence > 1), "{fence:?}");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let lost = async {
        while Numbers::of(&bed.client).get("longhaul_leases_lost_total") < 1.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, lost).await.expect("the worker hears of it");
    worker.stop().await;
    let numbers = Numbers::of(&bed.client);
    assert!(numbers.get("longhaul_swept_total{what=\"expired\"}") >= 1.0);
    assert_eq!(numbers.outcome("runs", "hangs", "lost"), numbers.get("longhaul_leases_lost_total"));
    assert_eq!(numbers.outcome("runs", "hangs", "completed"), 1.0);
}

#[tokio::test]
async fn no_task_and_no_step_is_a_label() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client).handler("quick", quick).start().await.expect("a worker");
    let mut ids = Vec::new();
    for _ in 0..20 {
        ids.push(bed.client.submit(NewTask::new("quick", &false)).await.expect("accepted").id);
    }
    bed.ended(ids[0]).await;
    let before = Numbers::of(&bed.client).0.len();
    for &id in &ids {
        bed.ended(id).await;
    }
    worker.stop().await;
    let numbers = Numbers::of(&bed.client);
    assert_eq!(numbers.0.len(), before, "more tasks are no more series");
    let text: Vec<&String> = numbers.0.keys().collect();
    assert!(!text.iter().any(|name| name.contains(&ids[0].to_string()) || name.contains("\"one\"")), "{text:?}");
}

#[tokio::test]
async fn what_subscribers_are_given_is_counted_and_how_far_behind_they_are_is_shown() {
    let bed = Bed::memory().await;
    bed.client.announce(&["h"]).await.expect("announced");
    let calls = AtomicU32::new(0);
    let pause = Duration::from_millis(1);
    let mail = bed.client.subscriber("mail").back_off(pause, pause).lease(Duration::from_millis(60));
    let mail = mail
        .start(move |_| {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            async move {
                match call {
                    0 => Err(TaskError::retryable("away", "not now")),
                    1 => Ok(()),
                    2 => Err(TaskError::fatal("no", "never")),
                    _ => std::future::pending().await,
                }
            }
        })
        .await
        .expect("starts");
    for n in 0..3 {
        bed.client.submit(NewTask::new("h", &n)).await.expect("accepted");
    }
    let name =
        |outcome: &str| format!("longhaul_subscriber_events_total{{subscriber=\"mail\",outcome=\"{outcome}\"}}");
    let wait = async {
        loop {
            let numbers = Numbers::of(&bed.client);
            let counts = ["handled", "failed", "refused"].map(|outcome| numbers.get(&name(outcome)));
            let behind = numbers.get("longhaul_subscriber_behind_seconds{subscriber=\"mail\"}");
            if counts == [1.0, 1.0, 1.0] && behind > 0.0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("they are counted");
    drop(mail);
}
