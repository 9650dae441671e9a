//! Pausing queues, the whole at a glance, and why a task stands where it stands.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Bed;
use longhaul::{Effect, Error, NewTask, Run, State, TaskError, Worker};
use tokio::sync::Notify;

on_every_store!(
    a_worker_goes_on_as_soon_as_its_queue_does,
    handlers_and_stats_show_what_is_there,
    why_says_what_a_task_waits_for,
    why_names_the_limit_and_who_holds_it_and_the_worker_that_runs,
    why_says_that_a_task_that_runs_was_told_to_stop,
);

fn worker(bed: &Bed) -> Worker {
    Worker::new(&bed.client).handler("add", |_run: Run, n: u64| async move { Ok::<_, TaskError>(n + 1) })
}

async fn a_worker_goes_on_as_soon_as_its_queue_does(bed: Bed) {
    assert!(bed.client.pause_queue("default", true).await.expect("paused"));
    let worker = worker(&bed).queues(["default", "other"]).start().await.expect("starts");
    let held = bed.client.submit(NewTask::new("add", &1)).await.expect("accepted").id;
    let other = bed.client.submit(NewTask::new("add", &1).queue("other")).await.expect("accepted").id;
    bed.ended(other).await;
    assert_eq!(bed.client.task(held).await.expect("there").state, State::Pending);
    let process = bed.another_client_or_same().await;
    assert!(process.pause_queue("default", false).await.expect("resumed"));
    assert_eq!(bed.ended(held).await.state, State::Completed);
    assert!(matches!(bed.client.pause_queue("a b", true).await, Err(Error::Invalid(_))));
    worker.stop().await;
}

async fn handlers_and_stats_show_what_is_there(bed: Bed) {
    bed.client.announce(&["later"]).await.expect("announced");
    let worker = worker(&bed).start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("add", &1)).await.expect("accepted").id;
    bed.ended(id).await;
    let handlers = bed.client.handlers().await.expect("answered");
    let handlers: Vec<(&str, usize)> = handlers.iter().map(|info| (info.name.as_str(), info.workers)).collect();
    assert_eq!(handlers, [("add", 1), ("later", 0)]);
    bed.client.submit(NewTask::new("later", &1)).await.expect("accepted");
    let stats = bed.client.stats().await.expect("answered");
    assert_eq!((stats.tasks.completed, stats.tasks.pending, stats.tasks.bounded), (1, 1, false));
    assert_eq!((stats.workers.len(), stats.queues[0].pending), (1, 1));
    assert!(stats.oldest_ready.is_some());
    let theirs = bed.client.for_tenant("acme").stats().await.expect("answered");
    assert_eq!((theirs.tasks.completed, theirs.tasks.pending), (0, 0));
    worker.stop().await;
}

async fn why_says_what_a_task_waits_for(bed: Bed) {
    let client = &bed.client;
    let code = async |id| client.why(id).await.expect("explained");
    client.announce(&["add", "hold"]).await.expect("announced");
    let alone = client.submit(NewTask::new("add", &1)).await.expect("accepted").id;
    assert_eq!(code(alone).await.code, "no_worker");
    let later = longhaul::TaskId::new();
    let at = client.clock().now() + Duration::from_secs(3_600);
    let mut delayed = NewTask::new("add", &1).run_at(at);
    delayed.id = later;
    client.submit(delayed).await.expect("accepted");
    let why = code(later).await;
    assert_eq!(why.code, "not_before");
    assert_eq!(why.until.map(|until| until.as_microsecond()), Some(at.as_microsecond()));
    client.acting_as("ann").pause_queue("default", true).await.expect("paused");
    let paused = code(alone).await;
    assert_eq!((paused.code, paused.details["by"].as_str()), ("queue_paused", Some("ann")));
    assert!(matches!(client.for_tenant("acme").why(alone).await, Err(Error::NotFound(_))));

    let worker = worker(&bed)
        .handler("hold", |run: Run, (): ()| async move {
            run.lock("disk").await?;
            run.signal::<u32>("go").await
        })
        .queues(["default", "other"])
        .slots(8)
        .start()
        .await
        .expect("starts");
    let hold = async |key: &str| {
        let task = NewTask::new("hold", &()).queue("other").concurrency_key(key);
        client.submit(task).await.expect("accepted").id
    };
    let first = hold("a").await;
    bed.waiting_for(first, "signal").await;
    let signal = code(first).await;
    assert_eq!((signal.code, signal.details["signal"].as_str()), ("signal", Some("go")));
    let second = hold("b").await;
    bed.waiting_for(second, "lock").await;
    let lock = code(second).await;
    assert_eq!((lock.code, lock.details["held_by"].as_str()), ("lock", Some(first.to_string().as_str())));
    assert!(lock.until.is_some(), "a lock is not held for ever");
    client.signal(first, "go", &1).await.expect("sent");
    assert_eq!(code(bed.ended(first).await.id).await.code, "completed");
    bed.waiting_for(second, "signal").await;
    client.cancel(second, Some("enough")).await.expect("cancelled");
    bed.ended(second).await;
    let cancelled = code(second).await;
    assert!(cancelled.code == "cancelled" && cancelled.sentence.contains("enough"), "{cancelled:?}");
    worker.stop().await;
}

async fn why_names_the_limit_and_who_holds_it_and_the_worker_that_runs(bed: Bed) {
    let (begun, wait) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (tell, hear) = (Arc::clone(&begun), Arc::clone(&wait));
    let worker = Worker::new(&bed.client)
        .handler("work", move |run: Run, (): ()| {
            let (begun, wait) = (Arc::clone(&tell), Arc::clone(&hear));
            async move {
                run.step("long", async || {
                    begun.notify_one();
                    wait.notified().await;
                    Ok::<_, TaskError>(())
                })
                .effect(longhaul::Effect::Irreversible)
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let submit = async || {
        let task = NewTask::new("work", &()).concurrency_key("db");
        bed.client.submit(task).await.expect("accepted").id
    };
    let first = submit().await;
    tokio::time::timeout(common::PATIENCE, begun.notified()).await.expect("it begins");
    let running = bed.client.why(first).await.expect("explained");
    assert_eq!((running.code, running.details["step"].as_str()), ("running", Some("long")), "{running:?}");
    let second = submit().await;
    // Held back by the next claim.
    let limited = tokio::time::timeout(common::PATIENCE, async {
        loop {
            let why = bed.client.why(second).await.expect("explained");
            if why.code == "limit" {
                return why;
            }
            assert_eq!(why.code, "behind");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let limited = limited.await.expect("it is held back");
    assert_eq!((limited.details["kind"].as_str(), limited.details["name"].as_str()), (Some("key"), Some("db")));
    assert_eq!(limited.details["held_by"][0].as_str(), Some(first.to_string().as_str()));
    wait.notify_one();
    tokio::time::timeout(common::PATIENCE, begun.notified()).await.expect("the second begins");
    wait.notify_one();
    assert_eq!(bed.ended(second).await.state, State::Completed);
    worker.stop().await;
}

async fn why_says_that_a_task_that_runs_was_told_to_stop(bed: Bed) {
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (told, gate) = (Arc::clone(&begun), Arc::clone(&go_on));
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (told, gate) = (Arc::clone(&told), Arc::clone(&gate));
            async move {
                let pay = || async {
                    told.notify_one();
                    gate.notified().await;
                    Ok::<_, TaskError>(())
                };
                run.step("pay", pay).effect(Effect::Irreversible).await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    begun.notified().await;
    bed.client.cancel(id, Some("wrong host")).await.expect("told to stop");
    let why = bed.client.why(id).await.expect("explained");
    assert_eq!(why.code, "cancelling");
    assert!(why.sentence.contains("told to stop by") && why.sentence.contains("'wrong host'"), "{}", why.sentence);
    assert!(why.sentence.contains("step 'pay'"), "{}", why.sentence);
    go_on.notify_one();
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    worker.stop().await;
}
