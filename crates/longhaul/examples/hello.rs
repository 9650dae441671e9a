//! The smallest durable task: one handler, one step, one worker.
//!
//! `cargo run -p longhaul --example hello`

use std::error::Error;
use std::time::Duration;

use longhaul::{Client, NewTask, Run, State, TaskError, Worker};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

/// A handler is an async function of a run and the task's input. What it does in a step is
/// recorded; after a crash the recorded result is used again.
async fn greet(run: Run, name: String) -> Result<String, TaskError> {
    run.step("greet", async || Ok::<_, TaskError>(format!("Hello, {name}!"))).await
}

pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    // A store in memory ends with the program. `sqlite:hello.db` or `postgres://…` outlive it.
    let client = Client::open("memory:").await?;
    let worker = Worker::new(&client).handler("greet", greet).start().await?;

    // The task is in the store when this returns; the worker takes it from there.
    let id = client.submit(NewTask::new("greet", &"world")).await?.id;
    let task = client.wait(id, Duration::from_secs(10)).await?;
    assert_eq!(task.state, State::Completed);
    let result = task.result.ok_or("a completed task has a result")?;
    assert_eq!(result.get(), r#""Hello, world!""#);
    println!("task {id} is {}: {result}", task.state);

    // Everything that happened to it is in its history, numbered from 1.
    let mut events = client.events(id, 0).await?;
    while let Some(event) = events.next().await? {
        println!("  {} {} {}", event.seq, event.kind, event.step.unwrap_or_default());
    }

    worker.stop().await;
    Ok(())
}
