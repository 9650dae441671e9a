//! A worker process with the handlers that `bench` and the crash tests use.
//!
//! The handler `ledger` is the witness of the crash tests: each of its steps appends a line to a
//! file outside of the store, so that it can be counted how often an effect really happened. Its
//! input can ask it to hang at a point of its life, so that it can be killed exactly there.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use longhaul::{Client, Effect, Run, TaskError, Worker};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::BenchWorkerArgs;
use crate::exit::Failure;

/// Does nothing, durably.
pub(crate) async fn noop(_run: Run, _input: ()) -> Result<(), TaskError> {
    Ok(())
}

/// Ten steps that do nothing, each recorded.
pub(crate) async fn steps(run: Run, count: u32) -> Result<u32, TaskError> {
    for number in 0..count {
        run.step("step", async || Ok::<_, TaskError>(number)).await?;
    }
    Ok(count)
}

/// What the handler `ledger` does.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LedgerInput {
    /// How many steps.
    pub(crate) steps: u32,
    /// How long each effect takes, milliseconds.
    pub(crate) step_ms: u64,
    /// Where to hang, in the first run only: `start`, `in_step`, `after_effect` or `end`.
    pub(crate) hang: Option<String>,
    /// In which step to hang.
    pub(crate) hang_step: u32,
    /// Kill the process in the first step, in every run.
    pub(crate) kill: bool,
    /// Steps must not happen twice.
    pub(crate) irreversible: bool,
}

async fn ledger(file: Arc<File>, run: Run, input: LedgerInput) -> Result<u32, TaskError> {
    let hangs = |place: &str| run.fence() == 1 && input.hang.as_deref() == Some(place);
    note(&file, &format!("run {} {}", run.id(), run.fence()))?;
    if hangs("start") {
        hang(&file, &run).await?;
    }
    let effect = if input.irreversible { Effect::Irreversible } else { Effect::Idempotent };
    for number in 0..input.steps {
        let (file, input, run_now, hangs) = (&file, &input, &run, &hangs);
        let work = move |context: longhaul::StepContext| async move {
            let here = number == input.hang_step;
            if input.kill {
                std::process::abort();
            }
            if here && hangs("in_step") {
                hang(file, run_now).await?;
            }
            tokio::time::sleep(Duration::from_millis(input.step_ms)).await;
            note(file, &format!("effect {} {} {}", context.task, context.idempotency_key, context.fence))?;
            if here && hangs("after_effect") {
                hang(file, run_now).await?;
            }
            Ok::<_, TaskError>(number)
        };
        run.step_with(format!("step{number}"), work).effect(effect).await?;
    }
    if hangs("end") {
        hang(&file, &run).await?;
    }
    Ok(input.steps)
}

/// Says so in the ledger and waits to be killed.
async fn hang(file: &File, run: &Run) -> Result<(), TaskError> {
    note(file, &format!("hang {} {}", run.id(), run.fence()))?;
    std::future::pending().await
}

/// One line, in one write: lines of several processes never mix.
fn note(mut file: &File, line: &str) -> Result<(), std::io::Error> {
    file.write_all(format!("{line}\n").as_bytes())
}

fn open_ledger(path: &Path) -> Result<File, Failure> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|error| Failure::usage(format!("cannot open '{}': {error}", path.display())))
}

pub(crate) async fn run(args: BenchWorkerArgs) -> Result<(), Failure> {
    let client = Client::open(&args.store).await?;
    let mut worker = Worker::new(&client)
        .slots(args.slots)
        .lease(args.lease)
        .drain(args.drain)
        .handler("noop", noop)
        .handler("steps", steps);
    if let Some(path) = &args.ledger {
        let file = Arc::new(open_ledger(path)?);
        worker = worker.handler("ledger", move |run, input| ledger(Arc::clone(&file), run, input));
    }
    let mut terminate = signal(SignalKind::terminate())
        .map_err(|error| Failure::internal(format!("cannot hear signals: {error}")))?;
    worker
        .run(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        })
        .await?;
    Ok(())
}
