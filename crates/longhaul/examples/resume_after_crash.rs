//! A worker dies in the middle of a task, and another one goes on from the last recorded step.
//!
//! `cargo run -p longhaul --example resume_after_crash`
//!
//! This program starts itself a second time as a worker process. That process takes a task of five
//! steps and aborts in the third one. Then a worker of the first process finishes the task. Each
//! step also writes a line to a file outside of the store, so that one can see what was really run.

use std::error::Error;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use longhaul::{Client, NewTask, Run, State, TaskError, Worker, WorkerHandle};
use serde::{Deserialize, Serialize};

/// Set for the worker process: the address of the store.
pub(crate) const STORE: &str = "LONGHAUL_EXAMPLE_STORE";

const STEPS: [&str; 5] = ["create_dns", "create_cert", "start_server", "check_health", "send_mail"];

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    match std::env::var(STORE) {
        Ok(store) => work_until_the_crash(&store).await,
        Err(_) => run(Command::new(std::env::current_exe()?)).await,
    }
}

#[derive(Serialize, Deserialize)]
struct Site {
    name: String,
    /// The file that tells what was run.
    ledger: PathBuf,
}

async fn launch(run: Run, site: Site) -> Result<usize, TaskError> {
    for name in STEPS {
        run.step(name, async || {
            let mut ledger = std::fs::File::options().create(true).append(true).open(&site.ledger)?;
            writeln!(ledger, "{name} by process {}", std::process::id())?;
            // The fence is 1 in a task's first run and larger in every later one.
            if name == "start_server" && run.fence() == 1 {
                std::process::abort();
            }
            Ok::<_, TaskError>(format!("{name} of {}", site.name))
        })
        .await?;
    }
    Ok(STEPS.len())
}

async fn start_worker(client: &Client) -> Result<WorkerHandle, longhaul::Error> {
    // A task stays with a silent worker for this long (15 s unless set), so this is how long the
    // dead worker's task waits for the next one.
    let lease = Duration::from_secs(1);
    Worker::new(client).lease(lease).handler("launch", launch).start().await
}

/// What the worker process does: it works, until the task kills it.
pub(crate) async fn work_until_the_crash(store: &str) -> Result<(), Box<dyn Error>> {
    let client = Client::open(store).await?;
    let _worker = start_worker(&client).await?;
    tokio::time::sleep(Duration::from_secs(20)).await;
    Err("the task did not kill this process".into())
}

/// `child` starts the worker process; it is given the store's address in its environment.
pub(crate) async fn run(mut child: Command) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let ledger = folder.path().join("ledger");
    let store = format!("sqlite:{}", folder.path().join("tasks.db").display());
    let client = Client::open(&store).await?;

    // No worker runs yet, so the store must be told that one will have this handler.
    client.announce(&["launch"]).await?;
    let site = Site { name: "example.org".to_owned(), ledger: ledger.clone() };
    let id = client.submit(NewTask::new("launch", &site)).await?.id;
    println!("submitted task {id}");

    child.env(STORE, &store).current_dir(folder.path());
    let ended = tokio::task::spawn_blocking(move || child.status()).await??;
    assert_eq!(ended.signal(), Some(6), "the worker process was to abort: {ended}");
    let before = std::fs::read_to_string(&ledger)?;
    println!("the worker process died ({ended}); it had run:\n{before}");
    assert_eq!(before.lines().count(), 3);
    assert_eq!(client.task(id).await?.state, State::Running, "nobody has noticed yet");

    let worker = start_worker(&client).await?;
    let task = client.wait(id, Duration::from_secs(20)).await?;
    assert_eq!(task.state, State::Completed);
    let all = std::fs::read_to_string(&ledger)?;
    let after = all.strip_prefix(&before).ok_or("the ledger only grows")?;
    println!("the task is {}; this process has run:\n{after}", task.state);

    // What was recorded was not run again. `start_server` was begun and not recorded, so it was.
    let rerun: Vec<_> = after.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(rerun, STEPS[2..]);

    println!("the task's history:");
    let mut recorded = Vec::new();
    let mut events = client.events(id, 0).await?;
    while let Some(event) = events.next().await? {
        let what = event.step.as_deref().or(event.data["message"].as_str()).unwrap_or_default();
        println!("  {:>2} run {} {} {what}", event.seq, event.run, event.kind);
        if event.kind == "step.completed" {
            recorded.extend(event.step);
        }
    }
    assert_eq!(recorded, STEPS, "each step was recorded once");
    worker.stop().await;
    Ok(())
}
