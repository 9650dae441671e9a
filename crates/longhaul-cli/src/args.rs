//! The arguments, and the help that teaches them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

pub(crate) mod admin;
pub(crate) mod client;

use crate::demo::What;
use admin::{BackupArgs, CompletionsArgs, DoctorArgs, ManArgs, SubscribersArgs, TokenArgs, WebhooksArgs};
use client::{
    AnswerArgs, ArtifactArgs, CancelArgs, DecideArgs, DecisionArgs, EventsArgs, ForkArgs, ListArgs, McpArgs,
    MessageArgs, PriorityArgs, PsArgs, QueuesArgs, SchedulesArgs, SignalArgs, StateArgs, SubmitArgs, TaskArgs,
    UndoArgs, WaitArgs, WatchArgs,
};

/// Runs AI-agent tasks that outlive the process that runs them.
#[derive(Parser, Debug)]
#[command(name = "longhaul", version, about, propagate_version = true, after_help = crate::exit::HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Submit a task; prints its id.
    #[command(after_help = "\
Examples:
  longhaul submit devops 'Disk is full on web-1' --follow      show what it does until it has ended
  longhaul submit deploy_app '{\"app\": \"shop\", \"broken\": \"\"}' --wait   print the result
  longhaul submit deploy_app @shop.json --key release-42       twice is once
  git log -1 | longhaul submit reviewer - --priority 9 --timeout 10m
  ID=$(longhaul submit report '{}' --run-at 2h --tag team=sales)

INPUT is JSON if it can be read as JSON, else a text.")]
    Submit(Box<SubmitArgs>),
    /// List tasks, newest first.
    #[command(after_help = "\
Examples:
  longhaul ps --state waiting
  longhaul ps --handler devops --tag team=payments --all
  longhaul ps --q web-1 --json | jq -r '.tasks[].id'")]
    Ps(PsArgs),
    /// Show a task.
    Show(TaskArgs),
    /// Follow a task until it has ended; a server that restarts meanwhile is waited for.
    #[command(after_help = "\
Examples:
  longhaul watch 0198f0c2-…                a live view on a terminal
  longhaul watch 0198f0c2-… | tee log      a line for each event
  longhaul watch 0198f0c2-… --json         each event as JSON

Exit code 0 when it completed, 1 when it failed or was cancelled. Ctrl-C ends the watching, not the task.")]
    Watch(WatchArgs),
    /// Wait until a task has ended and print its result.
    #[command(after_help = "\
Examples:
  longhaul wait 0198f0c2-…
  longhaul wait 0198f0c2-… --timeout 10m || echo \"exit code $?\"

Exit code 0 when it completed, 1 when it failed or was cancelled, 5 when it has not ended in time.")]
    Wait(WaitArgs),
    /// Say in one sentence what a task waits for, and what would change that.
    Why(TaskArgs),
    /// End a task. Sagas take back what they did; with --undo, agents and others do too.
    #[command(after_help = "\
Examples:
  longhaul cancel 0198f0c2-… --reason 'wrong host'
  longhaul cancel 0198f0c2-… --undo          an agent's tools are undone too, last call first")]
    Cancel(CancelArgs),
    /// Open a failed or cancelled task again: what was done stays, what failed is tried again.
    Resume(TaskArgs),
    /// Take back what an ended task did, last step first; prints the id of the task that does it.
    Undo(UndoArgs),
    /// Submit a new task that shares the beginning of one that has ended; prints its id.
    #[command(after_help = "\
Example:
  longhaul fork 0198f0c2-… --from-step deploy_container --input '{\"app\": \"shop\", \"broken\": \"\"}'

'longhaul steps ID' names the steps.")]
    Fork(ForkArgs),
    /// List what waits for a person's approval.
    Approvals(ListArgs),
    /// Approve what a task asks for.
    #[command(after_help = "\
Examples:
  longhaul approvals
  longhaul approve 0198f0c2-… --reason 'checked with Ann'")]
    Approve(DecisionArgs),
    /// Deny what a task asks for.
    Deny(DecisionArgs),
    /// Answer a task's question.
    Answer(AnswerArgs),
    /// Tell a task something it did not ask for.
    Message(MessageArgs),
    /// Send a task a signal that it waits for.
    Signal(SignalArgs),
    /// Say what became of a step whose outcome nobody knows.
    #[command(after_help = "\
Examples:
  longhaul decide 0198f0c2-… charge_card retry
  longhaul decide 0198f0c2-… charge_card done --result '{\"charge\": \"ch_42\"}' --reason 'it is in the books'")]
    Decide(DecideArgs),
    /// Show or change the state of an agent's task.
    #[command(after_help = "\
Examples:
  longhaul state 0198f0c2-…
  longhaul state 0198f0c2-… --patch '{\"add_facts\": [{\"key\": \"region\", \"value\": \"eu\", \"source\": \"me\"}]}'

A change that someone else made in between is not overwritten: exit code 2, look again and repeat.")]
    State(StateArgs),
    /// List the steps of a task.
    Steps(TaskArgs),
    /// Print the history of a task.
    #[command(after_help = "\
Examples:
  longhaul events 0198f0c2-…
  longhaul events 0198f0c2-… -f --after 120 --json | jq -r .type")]
    Events(EventsArgs),
    /// List the artifacts of a task.
    Artifacts(TaskArgs),
    /// Print an artifact, or write it to a file.
    Artifact(ArtifactArgs),
    /// Change how urgent a task is.
    Priority(PriorityArgs),
    /// Remove a task that has ended, with its history.
    Delete(TaskArgs),
    /// Everything that is stored of a task, as JSON.
    Export(TaskArgs),
    /// List the queues; pause and resume them.
    #[command(after_help = "\
Examples:
  longhaul queues
  longhaul queues pause default")]
    Queues(QueuesArgs),
    /// List the workers.
    Workers(ListArgs),
    /// Tasks that are submitted again and again.
    Schedules(SchedulesArgs),
    /// What is sent to other systems, and to which.
    Webhooks(WebhooksArgs),
    /// Who is given the events of all tasks, and how far each is; the bus is one of them. Uses the store itself.
    #[command(after_help = "\
Examples:
  longhaul subscribers
  longhaul subscribers remove bus          after the broker was given up

What a subscriber has not passed is kept for it, and submits are refused when that is too old.")]
    Subscribers(SubscribersArgs),
    /// Tokens for the server. Uses the store itself, so that the first one can be made.
    Token(TokenArgs),
    /// Copy the store to a file, while it is in use.
    #[command(after_help = "\
Examples:
  longhaul backup longhaul-$(date +%F).db
  longhaul backup longhaul.dump --store postgres://me@db/longhaul

A SQLite store becomes a SQLite file that can be used as a store; of PostgreSQL a dump is made that
pg_restore reads. An existing file is not overwritten.")]
    Backup(BackupArgs),
    /// What is configured and from where, what is reachable, what is wrong and what to do about it.
    Doctor(DoctorArgs),
    /// Print a configuration file with every key, its default and what it means.
    #[command(after_help = "\
Example:
  longhaul config > longhaul.toml")]
    Config,
    /// Print completions for a shell.
    #[command(after_help = "\
Examples:
  longhaul completions bash > ~/.local/share/bash-completion/completions/longhaul
  longhaul completions zsh > ~/.zfunc/_longhaul
  longhaul completions fish > ~/.config/fish/completions/longhaul.fish")]
    Completions(CompletionsArgs),
    /// Print the man page, or write all of them to a folder.
    Man(ManArgs),
    /// Be an MCP server on stdin and stdout, for clients that start their servers as programs.
    #[command(after_help = "\
In the configuration of an IDE or a chat client:
  {\"mcpServers\": {\"longhaul\": {\"command\": \"longhaul\", \"args\": [\"mcp\"]}}}

It passes everything on to the server, with LONGHAUL_TOKEN if that is set, and waits for a server that is started
again. A client that speaks HTTP needs no program: the server has MCP on /mcp.")]
    Mcp(McpArgs),
    /// Measure this machine: the storage's own limit, and what the engine makes of it.
    #[command(after_help = "\
Examples:
  longhaul bench drain                         100,000 no-op tasks on a temporary SQLite file
  longhaul bench submit --batch 1000           submits in batches
  longhaul bench steps --store postgres://postgres@localhost/postgres
  longhaul bench drain --json | jq .per_second
  longhaul bench bus --bus nats://127.0.0.1:4222

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
    /// Make a folder with an agent and a saga that work at once, with comments.
    #[command(after_help = "\
Example:
  longhaul init agents && longhaul up --manifests agents

The agent's tools are small programs that work on a sandbox folder beside them.")]
    Init(InitArgs),
    /// Start a server and workers in one process, until SIGTERM or Ctrl-C.
    #[command(after_help = "\
Examples:
  longhaul up --manifests examples/sagas
  longhaul up --store postgres://me@db/longhaul --listen 0.0.0.0:7171 --workers 32
  longhaul submit deploy_app '{\"app\": \"shop\", \"broken\": \"\"}' --follow   in another terminal

Beyond loopback every request needs a token ('longhaul token create'). Nothing is started when a manifest
is wrong; 'longhaul check' says what is.")]
    Up(NodeArgs),
    /// Start a server without workers.
    #[command(after_help = "\
Example:
  longhaul serve --store postgres://me@db/longhaul --listen 0.0.0.0:7171")]
    Serve(NodeArgs),
    /// Run the handlers of a folder of manifests, until SIGTERM or Ctrl-C; then what runs is finished
    /// or handed back.
    #[command(after_help = "\
Examples:
  longhaul worker --manifests sagas
  longhaul worker --manifests sagas --store postgres://me@db/longhaul --queues default,urgent

Nothing is started when a manifest is wrong; 'longhaul check' says what is.")]
    Worker(NodeArgs),
    /// Show what is promised: 200 deployments, a worker killed in the middle, nothing lost.
    #[command(after_help = "\
Examples:
  longhaul demo                  about a minute, with a live view; asks for one approval
  longhaul demo --fast           the same story with shorter waits, for CI
  longhaul demo --keep           goes on afterwards, so that one can look around
  longhaul demo --fast --json | jq .ok

Needs no key, no services and no network: an embedded store in a temporary folder, a scripted model on loopback, and
this program. What it shows is judged from a ledger that the steps write themselves; a fault is exit code 1.")]
    Demo(DemoArgs),
    /// A worker with the handlers of `bench` and of the crash tests.
    #[command(hide = true)]
    BenchWorker(BenchWorkerArgs),
    /// What the steps of `demo` run.
    #[command(hide = true)]
    DemoEffect(DemoEffectArgs),
}

#[derive(clap::Args, Debug)]
pub(crate) struct DemoArgs {
    /// Shorter waits, and nobody is asked
    #[arg(long)]
    pub(crate) fast: bool,
    /// Let server and workers go on afterwards, until Ctrl-C, and keep the folder
    #[arg(long)]
    pub(crate) keep: bool,
    /// Approve without asking
    #[arg(long, short)]
    pub(crate) yes: bool,
    /// The table as one line of JSON on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(clap::Args, Debug)]
pub(crate) struct DemoEffectArgs {
    pub(crate) what: What,
    /// dns, cert, container, live; look or restart
    pub(crate) place: String,
    pub(crate) app: String,
    /// Which version of the app.
    pub(crate) release: String,
    /// How long it takes.
    pub(crate) work_ms: u64,
}

#[derive(clap::Args, Debug)]
pub(crate) struct InitArgs {
    /// The folder; made if it is not there.
    #[arg(value_name = "DIR")]
    pub(crate) folder: std::path::PathBuf,
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
    /// How often each client's connection is cut off at a random byte and resumed (scenario sse).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) reconnects: usize,
    /// Where events go (scenario bus): nats://, redis://, amqp:// or kafka://
    #[arg(long, env = "LONGHAUL_BUS", value_name = "URL", default_value = "memory:", hide_env_values = true)]
    pub(crate) bus: String,
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
    /// Submits over HTTP per second, on 64 connections, each answered when it is on disk.
    Http,
    /// Clients that each follow a task to its end over SSE, ten to a task; events per second.
    Sse,
    /// Turns of an agent whose model answers at once (one call of the model, one of a tool, all on record); and
    /// what 500 agents cost that wait for their model.
    Agent,
    /// Kill a worker process with its tasks running; time to the last one done.
    Resume,
    /// Events per second from the store to the broker of --bus, each acknowledged; three for each task.
    Bus,
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
            Self::Http => "http",
            Self::Sse => "sse",
            Self::Agent => "agent",
            Self::Resume => "resume",
            Self::Bus => "bus",
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

/// What is not given is taken from the environment, then from longhaul.toml; 'longhaul doctor' shows both.
#[derive(clap::Args, Debug)]
pub(crate) struct NodeArgs {
    /// sqlite:PATH, postgres://… or memory: [default: a SQLite file in the user's data folder]
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
    /// The address to answer on [default: 127.0.0.1:7171]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<String>,
    /// The folder that has the manifests (*.toml).
    #[arg(long, value_name = "DIR")]
    pub(crate) manifests: Option<String>,
    /// How many tasks run at once [default: 16]
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<String>,
    /// The queues to take tasks from [default: default]
    #[arg(long, value_name = "A,B")]
    pub(crate) queues: Option<String>,
    /// The broker: nats://, redis://, amqp:// or kafka:// [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) bus: Option<String>,
    /// What locks are taken at beside the store: redis:// or etcd:// [default: store:]
    #[arg(long, value_name = "URL")]
    pub(crate) locks: Option<String>,
    /// How long a task is held without a sign of life [default: 15s]
    #[arg(long, value_name = "TIME", hide = true)]
    pub(crate) lease: Option<String>,
    /// How long running tasks have to finish after SIGTERM [default: 30s]; an effect that must not happen twice has up
    /// to 10s more to be recorded
    #[arg(long, value_name = "TIME")]
    pub(crate) drain: Option<String>,
    /// Stop when stdin ends, as with SIGTERM: whoever holds its other end is never outlived
    #[arg(long)]
    pub(crate) until_eof: bool,
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
