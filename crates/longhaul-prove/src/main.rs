//! The program of the fault suite; `./dev prove` runs it. It is also its own workers, listeners and clients.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use longhaul_prove::Anyhow;
use longhaul_prove::all::{AllArgs, all, hunt, migrated, ran, read, simulation};
use longhaul_prove::bed::{Kind, setup};
use longhaul_prove::broker::{PublisherArgs, publisher};
use longhaul_prove::drive::{DiskFaults, Drive, Faults, NetworkFaults};
use longhaul_prove::hooks::receiver;
use longhaul_prove::hostile::{Hostile, Tried, hostile, part};
use longhaul_prove::migrations::{Plan, TRY_AGAIN, migrate};
use longhaul_prove::mutants::named;
use longhaul_prove::people::people;
use longhaul_prove::process::{
    ClientArgs, ListenerArgs, Place, WorkerArgs, client, crowd, end_with_the_driver, listener, worker,
};
use longhaul_prove::report::Hunted;
use longhaul_prove::serve::{ServeArgs, serve};
use longhaul_prove::simulate::Seeds;
use longhaul_prove::soak::{Soak, soak};

/// Breaks Longhaul and checks what is left.
#[derive(Parser)]
#[command(name = "longhaul-prove")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything, with the numbers of the proof; writes the report
    All(AllArgs),
    /// One run
    Run(RunArgs),
    /// Migrations broken off half-way, and raced
    Migrations {
        /// The store
        #[arg(long, value_enum, default_value = "sqlite")]
        store: Kind,
        /// The seed
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Points at which they are broken off, at most, on each of an empty and an old store
        #[arg(long, default_value_t = 40)]
        points: u64,
        /// Races on each
        #[arg(long, default_value_t = 10)]
        races: u64,
    },
    /// Runs mutants, each of which must be found
    Mutants {
        /// Only this one
        #[arg(long)]
        only: Option<String>,
        /// The seed
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Gives every parser what nobody should send
    Hostile(HostileArgs),
    /// One parser's share of that
    #[command(hide = true)]
    HostilePart(HostilePartArgs),
    /// Simulates seeds: many processes in one thread, with a clock of their own
    Simulate(SimulateArgs),
    /// A process that sets a store up
    #[command(hide = true)]
    Setup(Place),
    /// A process that opens a store, and so migrates it
    #[command(hide = true)]
    Migrate(Place),
    /// A worker process
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// A listener process
    #[command(hide = true)]
    Listener(ListenerArgs),
    /// The people
    #[command(hide = true)]
    People(Place),
    /// Many callers of one process
    #[command(hide = true)]
    Crowd(Place),
    /// A client process
    #[command(hide = true)]
    Client(ClientArgs),
    /// A server process
    #[command(hide = true)]
    Server(ServeArgs),
    /// The receiver of webhooks
    #[command(hide = true)]
    Receiver(Place),
    /// A process that publishes events
    #[command(hide = true)]
    Publisher(PublisherArgs),
    /// Mixed load for long, in which nothing may grow
    Soak(SoakArgs),
}

#[derive(clap::Args)]
struct SoakArgs {
    /// The store
    #[arg(long, value_enum, default_value = "sqlite")]
    store: Kind,
    /// The seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// For how long
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// The time between tasks, microseconds
    #[arg(long, default_value_t = 50_000)]
    every_us: u64,
    /// The time between faults, milliseconds
    #[arg(long, default_value_t = 3_000)]
    fault_every_ms: u64,
}

#[derive(clap::Args)]
struct RunArgs {
    /// The store
    #[arg(long, value_enum, default_value = "sqlite")]
    store: Kind,
    /// The seed of tasks and faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Tasks
    #[arg(long, default_value_t = 500)]
    tasks: u64,
    /// The time between tasks, microseconds
    #[arg(long, default_value_t = 8_000)]
    every_us: u64,
    /// Workers
    #[arg(long, default_value_t = 3)]
    workers: usize,
    /// The lease, milliseconds
    #[arg(long, default_value_t = 3_000)]
    lease_ms: u64,
    /// kill -9
    #[arg(long, default_value_t = 0)]
    kills: u32,
    /// Stopped past their leases
    #[arg(long, default_value_t = 0)]
    freezes: u32,
    /// The server stopped and started
    #[arg(long, default_value_t = 0)]
    restarts: u32,
    /// The time between these, milliseconds
    #[arg(long, default_value_t = 150)]
    fault_every_ms: u64,
    /// Every failpoint
    #[arg(long)]
    points: bool,
    /// Two clocks an hour off
    #[arg(long)]
    clocks: bool,
    /// Servers that answer over HTTP and deliver webhooks
    #[arg(long, default_value_t = 0)]
    servers: usize,
    /// Instead of tasks with faults: so many readers of events, while servers come and go
    #[arg(long)]
    readers: Option<u64>,
    /// How often each reader comes back
    #[arg(long, default_value_t = 50)]
    reconnects: u32,
    #[command(flatten)]
    disk: DiskFaults,
    #[command(flatten)]
    network: NetworkFaults,
    /// kill -9 of the broker that events are published to, which is started again
    #[arg(long, default_value_t = 0)]
    broker_kills: u32,
    /// How many tasks out of a hundred share a limit
    #[arg(long, default_value_t = 8)]
    limited: u64,
    /// A mutant
    #[arg(long)]
    mutant: Option<String>,
    /// How long everything may take to settle, seconds
    #[arg(long, default_value_t = 60)]
    bound: u64,
}

#[derive(clap::Args)]
struct HostileArgs {
    /// Inputs in all
    #[arg(long, default_value_t = 1_000_000)]
    inputs: u64,
    /// The seed; another one draws other inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this parser, with all the inputs
    #[arg(long)]
    only: Option<String>,
}

#[derive(clap::Args)]
struct HostilePartArgs {
    #[arg(long)]
    parser: String,
    #[arg(long)]
    inputs: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    current: PathBuf,
    #[arg(long)]
    store: Option<String>,
}

#[derive(clap::Args)]
struct SimulateArgs {
    /// How many seeds
    #[arg(long, default_value_t = 5_000)]
    seeds: u64,
    /// The first of them
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// A mutant, which all of them have
    #[arg(long)]
    mutant: Option<String>,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "off".into()))
        .init();
    let arguments = Arguments::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("prove: {error}");
            return ExitCode::from(2);
        }
    };
    let migrates = matches!(arguments.command, Command::Migrate(_));
    match runtime.block_on(until_interrupted(arguments.command)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) if migrates => ExitCode::from(TRY_AGAIN),
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("prove: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs it. An interrupt ends it as an error does: everything that was started is stopped.
async fn until_interrupted(command: Command) -> Result<bool, Anyhow> {
    let whole = matches!(
        command,
        Command::All(_)
            | Command::Run(_)
            | Command::Migrations { .. }
            | Command::Mutants { .. }
            | Command::Hostile(_)
            | Command::Simulate(_)
            | Command::Soak(_)
    );
    if !whole {
        end_with_the_driver()?;
        return run(command).await;
    }
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        ran = run(command) => ran,
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
        _ = terminate.recv() => Err("told to end".into()),
    }
}

async fn run(command: Command) -> Result<bool, Anyhow> {
    match command {
        Command::All(args) => all(args).await,
        Command::Run(args) => one(args).await,
        Command::Migrations { store, seed, points, races } => {
            let plan = Plan { kind: store, seed, points, races };
            Ok(migrated(&plan).await?.is_some_and(|ran| ran.outcome.is_clean()))
        }
        Command::Mutants { only, seed } => {
            let hunts = hunt(only.as_deref().map(named).transpose()?, seed).await?;
            Ok(hunts.iter().all(Hunted::is_caught))
        }
        Command::Hostile(args) => {
            let plan = Hostile { seed: args.seed, inputs: args.inputs, only: args.only };
            Ok(hostile(&plan, &std::env::current_exe()?).await?.iter().all(Tried::held))
        }
        Command::HostilePart(args) => {
            let tally = part(&args.parser, args.inputs, args.seed, &args.current, args.store.as_deref()).await?;
            println!("{}", serde_json::to_string(&tally)?);
            Ok(true)
        }
        Command::Simulate(args) => {
            let mutant = args.mutant.as_deref().map(named).transpose()?;
            let seeds = Seeds { from: args.from, count: args.seeds, mutant };
            Ok(simulation(seeds).await?.outcome.is_clean())
        }
        Command::Setup(place) => setup(place).await.map(|()| true),
        Command::Migrate(place) => migrate(place).await,
        Command::Worker(args) => worker(args).await.map(|()| true),
        Command::Listener(args) => listener(args).await.map(|()| true),
        Command::Crowd(place) => crowd(place).await.map(|()| true),
        Command::People(place) => people(place).await.map(|()| true),
        Command::Client(args) => client(args).await.map(|()| true),
        Command::Server(args) => serve(args).await.map(|()| true),
        Command::Receiver(place) => receiver(place).await.map(|()| true),
        Command::Soak(args) => soaked(args).await,
        Command::Publisher(args) => publisher(args).await.map(|()| true),
    }
}

async fn soaked(args: SoakArgs) -> Result<bool, Anyhow> {
    let plan = Soak {
        kind: args.store,
        seed: args.seed,
        time: Duration::from_secs(60 * args.minutes),
        every: Duration::from_micros(args.every_us),
        fault_every: Duration::from_millis(args.fault_every_ms),
    };
    let Some(soaked) = soak(&plan, &std::env::current_exe()?).await? else {
        return Err(format!("{} cannot be had; set LONGHAUL_TEST_PG_BIN or use ./dev prove", plan.kind).into());
    };
    let counts: Vec<String> = soaked.counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
    println!("soak on {}, seed {}, {} minutes: {}", plan.kind, plan.seed, args.minutes, counts.join(", "));
    soaked.measured.iter().for_each(|line| println!("    {line}"));
    soaked.wrong.iter().for_each(|line| println!("    NOT AS IT SHOULD BE: {line}"));
    Ok(soaked.wrong.is_empty())
}

async fn one(args: RunArgs) -> Result<bool, Anyhow> {
    if let Some(readers) = args.readers {
        let ran = read(args.store, args.seed, readers, args.reconnects).await?;
        return Ok(ran.is_some_and(|ran| ran.outcome.is_clean()));
    }
    let faults = Faults {
        kills: args.kills,
        freezes: args.freezes,
        restarts: args.restarts,
        every: Duration::from_millis(args.fault_every_ms),
        points: args.points,
        clocks: args.clocks,
        servers: args.servers,
        disk: args.disk,
        network: args.network,
        broker: args.broker_kills,
    };
    let plan = Drive {
        kind: args.store,
        seed: args.seed,
        tasks: args.tasks,
        every: Duration::from_micros(args.every_us),
        workers: args.workers,
        lease: Duration::from_millis(args.lease_ms),
        faults,
        limited: args.limited,
        mutant: args.mutant.as_deref().map(named).transpose()?,
        bound: Duration::from_secs(args.bound),
    };
    Ok(ran("a run", &plan).await?.is_some_and(|ran| ran.outcome.is_clean()))
}
