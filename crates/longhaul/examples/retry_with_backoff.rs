//! Try again, and wait longer each time: exercise 1 of the chapter on state management.
//!
//! `cargo run -p longhaul --example retry_with_backoff`
//!
//! The exercise asks for a function that repeats a call that fails, waits 1 s, 2 s, 4 s … in
//! between, and gives the error back when all tries are used up. A step does this by itself.

use std::error::Error;
use std::time::Duration;

use longhaul::{Client, NewTask, RetryPolicy, Run, State, StepContext, TaskError, Worker};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

/// As by default (three tries, waits that double), only a hundred times faster, and without the
/// jitter that keeps many tasks from coming back at the same moment.
fn quick() -> RetryPolicy {
    RetryPolicy { first: Duration::from_millis(10), jitter: false, ..RetryPolicy::default() }
}

/// Calls a service that is down for the first `failures` tries.
async fn call(run: Run, failures: u32) -> Result<u32, TaskError> {
    let work = |step: StepContext| async move {
        if step.attempt <= failures {
            // Trying again may help. `TaskError::fatal` says that it cannot, and ends the step at once.
            return Err(TaskError::retryable("unavailable", "the service is down"));
        }
        Ok(step.attempt)
    };
    run.step_with("call", work).retry(quick()).await
}

pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    let policy = RetryPolicy::default();
    let waits: Vec<u64> = (1..=3).map(|failures| policy.ceiling(failures).as_secs()).collect();
    assert_eq!(waits, [1, 2, 4]);
    println!("by default the waits are up to {waits:?} s …, and a step is tried {} times", policy.attempts);

    let client = Client::open("memory:").await?;
    let worker = Worker::new(&client).handler("call", call).start().await?;

    // Down twice: the third try succeeds.
    let id = client.submit(NewTask::new("call", &2)).await?.id;
    let task = client.wait(id, Duration::from_secs(10)).await?;
    assert_eq!(task.state, State::Completed);
    assert_eq!(task.result.ok_or("a completed task has a result")?.get(), "3");
    // Each try that failed is an event, with the wait that followed.
    let mut waits = Vec::new();
    let mut events = client.events(id, 0).await?;
    while let Some(event) = events.next().await? {
        if event.kind == "step.failed" {
            waits.extend(event.data["retry_in_ms"].as_u64());
        }
    }
    assert_eq!(waits, [10, 20]);
    println!("the third try succeeded, after waits of {waits:?} ms");

    // Down for longer than the step tries: the error says how often it tried, and why it failed.
    let id = client.submit(NewTask::new("call", &100)).await?.id;
    let task = client.wait(id, Duration::from_secs(10)).await?;
    assert_eq!(task.state, State::Failed);
    let error = task.error.ok_or("a failed task has an error")?;
    assert_eq!((error.code.as_str(), &error.details["attempts"]), ("step_failed", &3.into()));
    assert_eq!(error.cause.as_ref().map(|cause| cause.code.as_str()), Some("unavailable"));
    println!("the task failed: {error}");

    worker.stop().await;
    Ok(())
}
