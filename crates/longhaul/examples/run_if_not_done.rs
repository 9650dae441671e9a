//! Run a task only if it was not done before: exercise 2 of the chapter on state management.
//!
//! `cargo run -p longhaul --example run_if_not_done`
//!
//! The exercise asks for a function that looks at the task's state, runs it if it was not done, and
//! does nothing if it was. An idempotency key does this, also for many callers at once.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use longhaul::store::SubmitRefused;
use longhaul::{Client, Effect, NewTask, Run, State, Task, TaskError, Worker, WorkerHandle};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

/// The exercise's function. The same key is the same task, whoever asks, however often, and also
/// after a restart; a task that failed is opened again.
async fn execute_if_not_done(client: &Client, key: &str, amount: u32) -> Result<Task, longhaul::Error> {
    let accepted = client.submit(NewTask::new("pay", &amount).key(key)).await?;
    let known = client.task(accepted.id).await?;
    if known.state == State::Failed {
        client.resume(known.id).await?;
    }
    client.wait(accepted.id, Duration::from_secs(10)).await
}

/// A worker whose handler counts payments, and which is refused by the bank until `allowed`.
async fn start_worker(
    client: &Client,
    payments: &Arc<AtomicU32>,
    allowed: bool,
) -> Result<WorkerHandle, longhaul::Error> {
    let payments = Arc::clone(payments);
    let pay = move |run: Run, amount: u32| {
        let payments = Arc::clone(&payments);
        async move {
            run.step("pay", async || {
                if !allowed {
                    return Err(TaskError::fatal("no_account", "there is no such account yet"));
                }
                payments.fetch_add(1, Ordering::SeqCst);
                Ok(amount)
            })
            // Not to be repeated without being sure: a crash in here makes the task ask a person.
            .effect(Effect::Irreversible)
            .await
        }
    };
    Worker::new(client).handler("pay", pay).start().await
}

pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let store = format!("sqlite:{}", folder.path().join("tasks.db").display());
    let payments = Arc::new(AtomicU32::new(0));

    // The first try fails for good, and nothing is paid.
    let client = Client::open(&store).await?;
    let worker = start_worker(&client, &payments, false).await?;
    let failed = execute_if_not_done(&client, "invoice-42", 100).await?;
    assert_eq!((failed.state, payments.load(Ordering::SeqCst)), (State::Failed, 0));
    println!("not done: {}", failed.error.ok_or("a failed task has an error")?);
    worker.stop().await;

    // It was not done, so it is run: ten callers ask at once, and one payment is made.
    let worker = start_worker(&client, &payments, true).await?;
    let callers: Vec<_> = (0..10)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { execute_if_not_done(&client, "invoice-42", 100).await })
        })
        .collect();
    for caller in callers {
        let task = caller.await??;
        assert_eq!((task.id, task.state), (failed.id, State::Completed));
    }
    assert_eq!(payments.load(Ordering::SeqCst), 1);
    println!("done: 10 calls, {} payment", payments.load(Ordering::SeqCst));
    worker.stop().await;
    drop(client);

    // After a restart it is still known to be done: the recorded result is given, nothing is run.
    let client = Client::open(&store).await?;
    let worker = start_worker(&client, &payments, true).await?;
    let again = execute_if_not_done(&client, "invoice-42", 100).await?;
    assert_eq!(again.result.ok_or("a completed task has a result")?.get(), "100");
    assert_eq!((again.id, payments.load(Ordering::SeqCst)), (failed.id, 1));
    println!("after a restart: still done, still {} payment", payments.load(Ordering::SeqCst));

    // The same key for something else is a mistake, and is told as one.
    let other = execute_if_not_done(&client, "invoice-42", 999).await;
    let Err(longhaul::Error::Refused(refused @ SubmitRefused::KeyConflict { .. })) = other else {
        return Err("another amount under the same key must be refused".into());
    };
    println!("refused: {refused}");
    worker.stop().await;
    Ok(())
}
