//! A worker process with the handlers that `bench` and the crash tests use.
//!
//! The handler `ledger` is the witness of the crash tests: each of its steps appends a line to a
//! file outside of the store, so that it can be counted how often an effect really happened. Its
//! input can ask it to hang at a point of its life, so that it can be killed exactly there. So does
//! `deploy`, with steps that are undone; `branches` waits and races.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use longhaul::{Client, Effect, Run, TaskError, Worker};
use serde::{Deserialize, Serialize};

use crate::args::BenchWorkerArgs;
use crate::exit::Failure;
use crate::node::run_until_told;

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

/// What the handler `deploy` does.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct DeployInput {
    /// The step that fails for good.
    pub(crate) fail: Option<String>,
    /// Where to hang, in the first run only: `before STEP`, `after STEP`, `before undo STEP` or
    /// `after undo STEP`; after means: when the effect has happened and is not on record yet.
    pub(crate) hang: Option<String>,
}

/// The deployment of a service as a saga: each step and each undo is a line in the ledger.
async fn deploy(file: Arc<File>, run: Run, input: DeployInput) -> Result<(), TaskError> {
    for name in ["create_dns", "create_cert", "deploy_container", "monitoring"] {
        let acting = |what: String| Acting {
            file: Arc::clone(&file),
            run: run.clone(),
            hang: input.hang.clone().filter(|_| run.fence() == 1),
            what,
        };
        let fails = input.fail.as_deref() == Some(name);
        let (work, undo) = (acting(name.to_owned()), acting(format!("undo {name}")));
        run.saga()
            .step_with(name, move |context| {
                let work = work.clone();
                async move {
                    if fails {
                        return Err(TaskError::fatal("broken", format!("{name} is broken")));
                    }
                    work.act(&context).await
                }
            })
            .undo_with(move |context, ()| {
                let undo = undo.clone();
                async move { undo.act(&context).await }
            })
            .await?;
    }
    Ok(())
}

/// An effect of the handler `deploy`.
#[derive(Clone)]
struct Acting {
    file: Arc<File>,
    run: Run,
    hang: Option<String>,
    what: String,
}

impl Acting {
    async fn act(&self, context: &longhaul::StepContext) -> Result<(), TaskError> {
        self.hang_if("before").await?;
        note(&self.file, &format!("effect {} {} {}", context.task, context.idempotency_key, context.fence))?;
        self.hang_if("after").await
    }

    async fn hang_if(&self, when: &str) -> Result<(), TaskError> {
        if self.hang.as_deref() == Some(&format!("{when} {}", self.what)) {
            hang(&self.file, &self.run).await?;
        }
        Ok(())
    }
}

/// Rounds of a race between a timer and a signal, and of three steps beside a wait. What came of
/// each is a line in the ledger, in every run anew: all lines of a round must be equal.
async fn branches(file: Arc<File>, run: Run, rounds: u32) -> Result<u32, TaskError> {
    for round in 0..rounds {
        let time = Duration::from_millis(u64::from(round % 3) * 60 + 30);
        let won = tokio::select! {
            number = run.signal::<u32>("go") => format!("signal {}", number?),
            slept = run.sleep(time) => slept.map(|()| "timer".to_owned())?,
        };
        note(&file, &format!("race {} {round} {won}", run.id()))?;
        let step = |name: &'static str| {
            run.step(name, move || async move {
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..5))).await;
                Ok::<_, TaskError>(rand::random::<u32>())
            })
        };
        let joined = tokio::join!(step("a"), step("b"), step("c"), run.sleep(Duration::from_millis(120)));
        let (a, b, c) = (joined.0?, joined.1?, joined.2?);
        joined.3?;
        note(&file, &format!("joined {} {round} {a} {b} {c}", run.id()))?;
    }
    Ok(rounds)
}

/// Says so in the ledger and waits to be killed.
async fn hang(file: &File, run: &Run) -> Result<(), TaskError> {
    note(file, &format!("hang {} {}", run.id(), run.fence()))?;
    std::future::pending().await
}

/// One line, in one write: lines of several processes never mix. A kill can cut one
/// off in the middle, so it begins a line of its own, and only one that ends with a full stop is whole.
fn note(mut file: &File, line: &str) -> Result<(), std::io::Error> {
    file.write_all(format!("\n{line} .\n").as_bytes())
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
        let (deploys, races) = (Arc::clone(&file), Arc::clone(&file));
        worker = worker
            .handler("ledger", move |run, input| ledger(Arc::clone(&file), run, input))
            .handler("deploy", move |run, input| deploy(Arc::clone(&deploys), run, input))
            .handler("branches", move |run, rounds| branches(Arc::clone(&races), run, rounds));
    }
    run_until_told(worker).await
}
