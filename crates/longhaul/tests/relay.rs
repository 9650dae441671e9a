//! Hints and live text between processes, over a relay.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Bed, PATIENCE};
use longhaul::{Client, NewTask, Relay, Run, TaskError, Worker, WorkerHandle};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_postgres::AsyncMessage;

/// Carries what each says to the other.
fn join(one: &Relay, other: &Relay) -> JoinSet<()> {
    let mut carrying = JoinSet::new();
    for (from, to) in [(one.clone(), other.clone()), (other.clone(), one.clone())] {
        carrying.spawn(async move {
            loop {
                to.hear(&from.next().await);
            }
        });
    }
    carrying
}

async fn worker(client: &Client) -> WorkerHandle {
    let hello = async |_run: Run, name: String| Ok::<_, TaskError>(format!("Hello, {name}!"));
    Worker::new(client).handler("hello", hello).start().await.expect("starts")
}

/// How many notifications are sent on the channel of this store while something is done.
async fn notifications(bed: &Bed, done: impl Future<Output = ()>) -> usize {
    let (client, mut connection) =
        tokio_postgres::connect(&bed.url, tokio_postgres::NoTls).await.expect("the test server answers");
    let (send, mut heard) = tokio::sync::mpsc::channel(1_000);
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(_) = message {
                let _ = send.send(()).await;
            }
        }
    });
    let channel = "SELECT 'longhaul_' || current_schema()::regnamespace::oid";
    let channel: String = client.query_one(channel, &[]).await.expect("a schema").get(0);
    client.batch_execute(&format!("LISTEN {channel}")).await.expect("listens");
    done.await;
    // Notifications come before the answer to what is asked after them.
    client.batch_execute("SELECT 1").await.expect("the server answers");
    let mut count = 0;
    while heard.try_recv().is_ok() {
        count += 1;
    }
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_submitted_in_one_process_is_claimed_in_another_at_once_without_notify() {
    let Some(bed) = Bed::postgres().await else { return };
    let (here, there) = (&bed.client, bed.another_client().await);
    let relays = (here.relay().instead_of_notify(), there.relay().instead_of_notify());
    let mut carrying = join(&relays.0, &relays.1);
    let working = worker(&there).await;
    let run = async {
        let begun = Instant::now();
        for _ in 0..10 {
            let id = here.submit(NewTask::new("hello", &"you")).await.expect("accepted").id;
            // The submit is a hint there, and the end is one here.
            here.wait(id, PATIENCE).await.expect("it ends");
        }
        // Who only looks needs half a second for each of the two, on average.
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    };
    assert_eq!(notifications(&bed, run).await, 0);
    working.stop().await;
    carrying.shutdown().await;
    drop(relays);
    // Without a relay it notifies again: the other process hears of it by that alone.
    let plain = async {
        let worker = worker(&there).await;
        let id = here.submit(NewTask::new("hello", &"you")).await.expect("accepted").id;
        here.wait(id, PATIENCE).await.expect("it ends");
        worker.stop().await;
    };
    assert!(notifications(&bed, plain).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_of_a_run_in_one_process_is_heard_in_another() {
    let Some(bed) = Bed::postgres().await else { return };
    let (here, there) = (&bed.client, bed.another_client().await);
    let relays = (here.relay(), there.relay());
    let _carrying = join(&relays.0, &relays.1);
    let (begun, heard) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let gates = (Arc::clone(&begun), Arc::clone(&heard));
    let worker = Worker::new(here)
        .handler("talk", move |run: Run, (): ()| {
            let (begun, heard) = (Arc::clone(&gates.0), Arc::clone(&gates.1));
            async move {
                run.step_with("think", |context| {
                    let (run, begun, heard) = (run.clone(), Arc::clone(&begun), Arc::clone(&heard));
                    async move {
                        begun.notify_one();
                        let mut after = 0;
                        // Until someone hears it, as a model that goes on and on.
                        while tokio::time::timeout(Duration::from_millis(20), heard.notified()).await.is_err() {
                            run.live(&context, 1, after, "word ");
                            after += 5;
                        }
                        Ok::<_, TaskError>(after)
                    }
                })
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = here.submit(NewTask::new("talk", &())).await.expect("accepted").id;
    begun.notified().await;
    let (mut live, mut theirs) = (there.live(id), there.for_tenant("acme").live(id));
    let piece = tokio::time::timeout(PATIENCE, live.next()).await.expect("in time").expect("it is heard");
    assert_eq!((piece.run, piece.step.as_str(), piece.attempt), (1, "think", 1));
    assert!(piece.text.starts_with("word "));
    // What follows joins without a gap.
    let next = tokio::time::timeout(PATIENCE, live.next()).await.expect("in time").expect("it is heard");
    assert_eq!(next.after, piece.after + piece.text.len() as u64);
    heard.notify_one();
    bed.ended(id).await;
    assert!(tokio::time::timeout(Duration::ZERO, theirs.next()).await.is_err(), "another tenant hears nothing");
    worker.stop().await;
}
