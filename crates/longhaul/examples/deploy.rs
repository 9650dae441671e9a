//! A deployment that is undone when it fails: the saga of the chapter on workflows.
//!
//! `cargo run -p longhaul --example deploy`
//!
//! Four steps, each with its undo, and a person who is asked before the service goes live. Whatever
//! fails, exactly what was completed is undone, the last completed first. Kill the process at any
//! moment: another one goes on, forward or backward.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longhaul::{Client, NewTask, Risk, Run, State, Task, TaskError, TaskId, Worker};
use serde::{Deserialize, Serialize};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

/// The world outside: what exists, in the order in which it was made.
type World = Arc<Mutex<Vec<String>>>;

#[derive(Clone, Serialize, Deserialize)]
struct Deploy {
    app: String,
    /// The step that is broken today.
    broken: Option<String>,
}

async fn deploy(world: World, run: Run, input: Deploy) -> Result<String, TaskError> {
    let saga = run.saga();
    let make = |name: &'static str| {
        let (made, gone, input) = (Arc::clone(&world), Arc::clone(&world), input.clone());
        saga.step(name, move || create(Arc::clone(&made), input.clone(), name))
            .undo(move |thing| remove(Arc::clone(&gone), thing))
            .attempts(1)
    };
    make("create_dns").await?;
    make("create_cert").await?;
    // Waits for days if need be, and holds no worker meanwhile.
    let question = format!("Put {} live?", input.app);
    run.approve(question, Risk::ExternalAction).arguments(&input.app).await?;
    make("deploy_container").await?;
    make("monitoring").await?;
    Ok(format!("https://{}.example.com", input.app))
}

async fn create(world: World, input: Deploy, name: &'static str) -> Result<String, TaskError> {
    if input.broken.as_deref() == Some(name) {
        return Err(TaskError::retryable("broken", format!("{name} does not answer")));
    }
    let thing = format!("{name} of {}", input.app);
    world.lock().unwrap_or_else(PoisonError::into_inner).push(thing.clone());
    println!("  made    {thing}");
    Ok(thing)
}

async fn remove(world: World, thing: String) -> Result<(), TaskError> {
    let mut world = world.lock().unwrap_or_else(PoisonError::into_inner);
    // The last one made is the first to go.
    assert_eq!(world.pop().as_deref(), Some(thing.as_str()));
    println!("  removed {thing}");
    Ok(())
}

pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    let client = Client::open("memory:").await?;
    let world = World::default();
    let outside = Arc::clone(&world);
    let worker = Worker::new(&client)
        .handler("deploy", move |run: Run, input: Deploy| deploy(Arc::clone(&outside), run, input))
        .start()
        .await?;
    let standing = || world.lock().unwrap_or_else(PoisonError::into_inner).len();

    for broken in [None, Some("create_dns"), Some("create_cert"), Some("deploy_container"), Some("monitoring")] {
        println!("broken: {broken:?}");
        let input = Deploy { app: "shop".into(), broken: broken.map(str::to_owned) };
        let id = client.submit(NewTask::new("deploy", &input)).await?.id;
        let task = approve_and_wait(&client, id).await?;
        match broken {
            None => assert_eq!((task.state, standing()), (State::Completed, 4)),
            Some(step) => {
                let error = task.error.ok_or("a failed task says why")?;
                println!("  {}", error.message);
                assert_eq!((task.state, standing()), (State::Failed, 0));
                assert_eq!(error.details["step"], step);
            }
        }
        world.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    println!("denied");
    let input = Deploy { app: "shop".into(), broken: None };
    let id = client.submit(NewTask::new("deploy", &input)).await?.id;
    until_asked(&client, id).await?;
    client.acting_as("bob").deny(id, None, Some("not on a Friday")).await?;
    let task = client.wait(id, Duration::from_secs(10)).await?;
    let error = task.error.ok_or("a failed task says why")?;
    println!("  {}", error.message);
    assert_eq!((error.code.as_str(), standing()), ("denied", 0));

    worker.stop().await;
    Ok(())
}

/// Approves when asked; a task that fails before is not asked about.
async fn approve_and_wait(client: &Client, id: TaskId) -> Result<Task, Box<dyn Error>> {
    if until_asked(client, id).await? {
        client.acting_as("ann").approve(id, None, Some("looks good"), None).await?;
    }
    Ok(client.wait(id, Duration::from_secs(10)).await?)
}

async fn until_asked(client: &Client, id: TaskId) -> Result<bool, Box<dyn Error>> {
    let mut events = client.events(id, 0).await?;
    while let Some(event) = events.next().await? {
        if event.kind == "approval.requested" {
            return Ok(true);
        }
    }
    Ok(false)
}
