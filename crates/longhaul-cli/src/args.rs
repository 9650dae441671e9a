//! The arguments, and the help that teaches them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

/// Runs AI-agent tasks that outlive the process that runs them.
#[derive(Parser, Debug)]
#[command(name = "longhaul", version, about, propagate_version = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Measure this machine: the storage's own limit, and what the engine makes of it.
    #[command(after_help = "\
Examples:
  longhaul bench drain                         100,000 no-op tasks on a temporary SQLite file
  longhaul bench submit --batch 1000           submits in batches
  longhaul bench steps --store postgres://postgres@localhost/postgres
  longhaul bench drain --json | jq .per_second

Without --store a temporary SQLite file in the working directory is used. On PostgreSQL a schema of
its own is made and dropped. Durable settings are the product's defaults: fsync is on.")]
    Bench(BenchArgs),
    /// Validate the manifests of a folder: says file, line and remedy of everything that is wrong.
    #[command(after_help = "\
Examples:
  longhaul check manifests
  longhaul check manifests --json | jq -r '.problems[].message'

Exit code 1 when anything is wrong. Commands are looked for as a worker would look for them on this
machine, with this PATH.")]
    Check(CheckArgs),
    /// Run the handlers of a folder of manifests, until SIGTERM or Ctrl-C; then what runs is finished
    /// or handed back.
    #[command(after_help = "\
Examples:
  longhaul worker --manifests sagas
  longhaul worker --manifests sagas --store postgres://me@db/longhaul --queues default,urgent

Nothing is started when a manifest is wrong; 'longhaul check' says what is.")]
    Worker(WorkerArgs),
    /// The same in this version: a server will be part of it.
    Up(WorkerArgs),
    /// A worker with the handlers of `bench` and of the crash tests.
    #[command(hide = true)]
    BenchWorker(BenchWorkerArgs),
}

#[derive(clap::Args, Debug)]
pub(crate) struct BenchArgs {
    /// What to measure.
    pub(crate) scenario: Scenario,
    /// sqlite:PATH, postgres://USER@HOST/DATABASE or memory:
    #[arg(long, env = "LONGHAUL_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// How many tasks; each scenario has a default of its own.
    #[arg(long, value_name = "N")]
    pub(crate) tasks: Option<usize>,
    /// Submit in batches of this size (scenario submit).
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) batch: usize,
    /// How many tasks run at once.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub(crate) workers: usize,
    /// Tasks that wait in the queue besides those measured (scenario drain): the rate must not
    /// depend on them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) backlog: usize,
    /// One line of JSON on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// The store's own limit, without the engine: rows/s in transactions of 1,000, and commits/s.
    Floor,
    /// Durable submits per second, by 64 callers one at a time.
    Submit,
    /// No-op tasks per second: claimed, run, completed; the queue is filled first.
    Drain,
    /// From submit on an idle system to the start of the handler.
    Latency,
    /// Steps per second: tasks of 10 no-op steps, 128 at once; and one such task alone.
    Steps,
    /// What suspended tasks cost: memory and processor while they wait, the time to wake one, and
    /// the rate when all are woken.
    Waiting,
    /// Kill a worker process with its tasks running; time to the last one done.
    Resume,
}

impl Scenario {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Submit => "submit",
            Self::Drain => "drain",
            Self::Latency => "latency",
            Self::Steps => "steps",
            Self::Waiting => "waiting",
            Self::Resume => "resume",
        }
    }
}

#[derive(clap::Args, Debug)]
pub(crate) struct CheckArgs {
    /// The folder that has the manifests (*.toml).
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// One line of JSON on stdout: {"manifests": [...], "problems": [...]}
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(clap::Args, Debug)]
pub(crate) struct WorkerArgs {
    /// sqlite:PATH, postgres://… or memory: [default: a SQLite file in the user's data folder]
    #[arg(long, env = "LONGHAUL_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// The folder that has the manifests (*.toml).
    #[arg(long, env = "LONGHAUL_MANIFESTS", value_name = "DIR")]
    pub(crate) manifests: PathBuf,
    /// How many tasks run at once.
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub(crate) workers: usize,
    /// The queues to take tasks from.
    #[arg(long, value_delimiter = ',', default_value = "default", value_name = "A,B")]
    pub(crate) queues: Vec<String>,
    /// How long, in seconds, a task is held without a sign of life.
    #[arg(long, value_parser = seconds, default_value = "15", hide = true)]
    pub(crate) lease: Duration,
    /// How long, in seconds, running tasks have to finish after SIGTERM.
    #[arg(long, value_parser = seconds, default_value = "30", value_name = "SECONDS")]
    pub(crate) drain: Duration,
}

#[derive(clap::Args, Debug)]
pub(crate) struct BenchWorkerArgs {
    #[arg(long, env = "LONGHAUL_STORE")]
    pub(crate) store: String,
    /// Every effect appends a line to this file.
    #[arg(long)]
    pub(crate) ledger: Option<PathBuf>,
    #[arg(long, default_value_t = 64)]
    pub(crate) slots: usize,
    #[arg(long, value_parser = seconds, default_value = "15")]
    pub(crate) lease: Duration,
    #[arg(long, value_parser = seconds, default_value = "30")]
    pub(crate) drain: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
