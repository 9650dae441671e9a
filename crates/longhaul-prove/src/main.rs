//! The program of the fault suite; `./dev prove` runs it. It is also its own workers, listeners and clients.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use longhaul::faults::Mutant;
use longhaul_prove::Anyhow;
use longhaul_prove::bed::{Kind, setup};
use longhaul_prove::broker::{PublisherArgs, publisher};
use longhaul_prove::drive::{DiskFaults, Drive, Faults, NetworkFaults, Outcome, drive};
use longhaul_prove::hooks::receiver;
use longhaul_prove::hostile::{Hostile, Tried, hostile, part};
use longhaul_prove::migrations::{Plan, TRY_AGAIN, migrate, migrations};
use longhaul_prove::mutants::{SIMULATED, breaks, run_of, simulated};
use longhaul_prove::people::people;
use longhaul_prove::process::{
    ClientArgs, ListenerArgs, Place, WorkerArgs, client, end_with_the_driver, listener, worker,
};
use longhaul_prove::readers::run::{Reading, read_all};
use longhaul_prove::report::{Hunted, Ran, line, page, tally};
use longhaul_prove::serve::{ServeArgs, serve};
use longhaul_prove::simulate::{Seeds, Simulated, simulate_many};
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
struct AllArgs {
    /// The seed; another one draws other tasks and faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Tasks of the long run on each store
    #[arg(long, default_value_t = 50_000)]
    tasks: u64,
    /// kill -9 on SQLite
    #[arg(long, default_value_t = 500)]
    sqlite_kills: u32,
    /// kill -9 on PostgreSQL
    #[arg(long, default_value_t = 200)]
    postgres_kills: u32,
    /// Restarts of the PostgreSQL server
    #[arg(long, default_value_t = 60)]
    restarts: u32,
    /// How often every failpoint fires, in each of its ways
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// Hostile inputs
    #[arg(long, default_value_t = 1_000_000)]
    inputs: u64,
    /// How many seeds are simulated
    #[arg(long, default_value_t = 5_000)]
    seeds: u64,
    /// Readers of events over HTTP
    #[arg(long, default_value_t = 200)]
    readers: u64,
    /// How often each of them comes back
    #[arg(long, default_value_t = 50)]
    reconnects: u32,
    /// Without the mutants
    #[arg(long)]
    no_mutants: bool,
    /// The commit, for the report
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// Where the report goes
    #[arg(long)]
    report: Option<PathBuf>,
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
            let hunts = hunt(only.as_deref(), seed).await?;
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
            let mutant = args.mutant.as_deref().map(mutant_of).transpose()?;
            let seeds = Seeds { from: args.from, count: args.seeds, mutant };
            Ok(simulation(seeds).await?.outcome.is_clean())
        }
        Command::Setup(place) => setup(place).await.map(|()| true),
        Command::Migrate(place) => migrate(place).await,
        Command::Worker(args) => worker(args).await.map(|()| true),
        Command::Listener(args) => listener(args).await.map(|()| true),
        Command::People(place) => people(place).await.map(|()| true),
        Command::Client(args) => client(args).await.map(|()| true),
        Command::Server(args) => serve(args).await.map(|()| true),
        Command::Receiver(place) => receiver(place).await.map(|()| true),
        Command::Soak(args) => soaked(args).await,
        Command::Publisher(args) => publisher(args).await.map(|()| true),
    }
}

fn mutant_of(name: &str) -> Result<Mutant, Anyhow> {
    let names: Vec<&str> = Mutant::ALL.into_iter().map(Mutant::name).collect();
    let known = Mutant::ALL.into_iter().find(|mutant| mutant.name() == name);
    known.ok_or_else(|| format!("there is no mutant '{name}'; there are {}", names.join(", ")).into())
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

/// A run of readers.
async fn read(kind: Kind, seed: u64, readers: u64, reconnects: u32) -> Result<Option<Ran>, Anyhow> {
    let bound = Duration::from_secs(240);
    // A short run is over before much can go wrong.
    let (silent, faults) = ((readers / 10).clamp(2, 20), (reconnects * 2 / 5).clamp(3, 20));
    let plan = Reading { kind, seed, readers, reconnects, silent, faults, bound };
    let Some(outcome) = read_all(&plan, &std::env::current_exe()?).await? else {
        eprintln!(
            "prove: skipped: readers on {kind}, which cannot be had; set LONGHAUL_TEST_PG_BIN or use ./dev prove"
        );
        return Ok(None);
    };
    let name = format!("{readers} readers, {reconnects} reconnects each");
    let ran = Ran { name, store: kind.to_string(), seed, outcome };
    say(&ran);
    Ok(Some(ran))
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
        mutant: args.mutant.as_deref().map(mutant_of).transpose()?,
        bound: Duration::from_secs(args.bound),
    };
    Ok(ran("a run", &plan).await?.is_some_and(|ran| ran.outcome.is_clean()))
}

/// Runs it and says what came of it; `None` where the store cannot be had.
async fn ran(name: &str, plan: &Drive) -> Result<Option<Ran>, Anyhow> {
    let outcome = drive(plan, &std::env::current_exe()?).await?;
    Ok(told(name, plan.kind, plan.seed, outcome))
}

/// The same for migrations.
async fn migrated(plan: &Plan) -> Result<Option<Ran>, Anyhow> {
    let outcome = migrations(plan, &std::env::current_exe()?).await?;
    Ok(told("migrations broken off and raced", plan.kind, plan.seed, outcome))
}

fn told(name: &str, kind: Kind, seed: u64, outcome: Option<Outcome>) -> Option<Ran> {
    let Some(outcome) = outcome else {
        eprintln!(
            "prove: skipped: {name} on {kind}, which cannot be had; set LONGHAUL_TEST_PG_BIN or use ./dev prove"
        );
        return None;
    };
    let ran = Ran { name: name.to_owned(), store: kind.to_string(), seed, outcome };
    say(&ran);
    Some(ran)
}

/// What came of a run, on the terminal.
fn say(ran: &Ran) {
    for violation in ran.outcome.violations.iter().take(20) {
        println!("    seed {}: {violation}", ran.seed);
    }
    let all = tally(&ran.outcome).into_iter().map(|(invariant, count)| format!("I{invariant} ({count})"));
    if ran.outcome.violations.len() > 20 {
        println!("    those were the first; in all: {}", all.collect::<Vec<_>>().join(", "));
    }
    for spec in &ran.outcome.not_fired {
        println!("    {spec} did not fire");
    }
    println!("{}", line(ran));
}

/// Simulates seeds and says what came of it.
async fn simulation(seeds: Seeds) -> Result<Ran, Anyhow> {
    let again = seeds.mutant.map(|mutant| format!(" --mutant {}", mutant.name())).unwrap_or_default();
    let told = move |simulated: &Simulated| {
        for violation in simulated.violations.iter().take(5) {
            println!("    seed {}: {violation}", simulated.seed);
        }
        if !simulated.violations.is_empty() {
            println!("    again: longhaul-prove simulate --from {} --seeds 1{again}", simulated.seed);
        }
        true
    };
    let outcome = aside(move || simulate_many(seeds, told)).await?;
    let ran = Ran { name: "simulation".to_owned(), store: "memory".to_owned(), seed: seeds.from, outcome };
    say(&ran);
    Ok(ran)
}

/// Waits for work on other threads. They are left where they are when this is dropped: an interrupt ends them.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T, Anyhow> + Send + 'static) -> Result<T, Anyhow> {
    let (done, waiting) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || done.send(work()));
    waiting.await?
}

async fn hunt(only: Option<&str>, seed: u64) -> Result<Vec<Hunted>, Anyhow> {
    let only = only.map(mutant_of).transpose()?;
    let mut hunts = Vec::new();
    for mutant in Mutant::ALL.into_iter().filter(|mutant| only.is_none_or(|only| only == *mutant)) {
        if SIMULATED.contains(&mutant) {
            let outcome = aside(move || simulated(mutant, seed)).await?;
            hunts.push(hunted(mutant, "simulated".to_owned(), seed, &outcome));
        }
        let plan = run_of(mutant, seed);
        let Some(outcome) = drive(&plan, &std::env::current_exe()?).await? else { continue };
        hunts.push(hunted(mutant, plan.kind.to_string(), seed, &outcome));
    }
    Ok(hunts)
}

/// Says whether a mutant was caught.
fn hunted(mutant: Mutant, store: String, seed: u64, outcome: &Outcome) -> Hunted {
    let hunted = Hunted { mutant, store, seed, found: tally(outcome) };
    let verdict = if hunted.is_caught() { "caught" } else { "NOT CAUGHT" };
    let (name, store) = (mutant.name(), &hunted.store);
    println!("mutant {name} ({store}): {verdict}, must break I{}, broke {:?}", breaks(mutant), hunted.found);
    if let Some(example) = outcome.violations.iter().find(|found| found.invariant == breaks(mutant)) {
        println!("    {example}");
    }
    hunted
}

/// One run for each kind of trouble with disk, network and server, and how many tasks it has.
fn bad_disks_and_networks() -> [(&'static str, Kind, u64, Faults); 7] {
    let every = Duration::from_millis(1_500);
    let disk = |disk| Faults { kills: 5, every, disk, ..Faults::default() };
    let network = |network| Faults { kills: 5, every, network, ..Faults::default() };
    let (no_disk, no_network) = (DiskFaults::default(), NetworkFaults::default());
    [
        ("power losses", Kind::Sqlite, 4_000, disk(DiskFaults { power_losses: 40, ..no_disk })),
        (
            "full disks, failing fsyncs, power losses",
            Kind::Sqlite,
            4_000,
            disk(DiskFaults { power_losses: 10, disk_full: 15, failed_syncs: 30 }),
        ),
        (
            "a bad network",
            Kind::Postgres,
            4_000,
            Faults {
                every: Duration::from_millis(150),
                ..network(NetworkFaults { cuts: 150, holds: 20, lost_answers: 150, ..no_network.clone() })
            },
        ),
        (
            "LISTEN lost",
            Kind::Postgres,
            1_000,
            Faults {
                every: Duration::from_millis(200),
                ..network(NetworkFaults { deaf: 60, ..no_network.clone() })
            },
        ),
        (
            "no connections left",
            Kind::Postgres,
            1_000,
            network(NetworkFaults { exhausted: 5, ..no_network.clone() }),
        ),
        (
            "an old transaction",
            Kind::Postgres,
            2_000,
            network(NetworkFaults { old_transaction: true, ..no_network.clone() }),
        ),
        (
            "a full disk of the server",
            Kind::Postgres,
            2_000,
            network(NetworkFaults { server_full: 6, ..no_network }),
        ),
    ]
}

async fn all(args: AllArgs) -> Result<bool, Anyhow> {
    let mut runs = Vec::new();
    let plan = |kind, faults, tasks, every| Drive {
        kind,
        seed: args.seed,
        tasks,
        every,
        workers: 3,
        lease: Duration::from_millis(3_000),
        faults,
        limited: 8,
        mutant: None,
        bound: Duration::from_secs(120),
    };
    let every = Duration::from_millis(500);
    let (kills, servers) = (args.sqlite_kills, 2);
    let sqlite = Faults { kills, freezes: kills / 10, every, servers, ..Faults::default() };
    let postgres = Faults {
        kills: args.postgres_kills,
        freezes: args.postgres_kills / 10,
        restarts: args.restarts,
        every: Duration::from_millis(1_000),
        clocks: true,
        servers,
        ..Faults::default()
    };
    let pace = Duration::from_micros(8_000);
    runs.extend(ran("kills and freezes", &plan(Kind::Sqlite, sqlite, args.tasks, pace)).await?);
    runs.extend(
        ran("kills, freezes, restarts, wrong clocks", &plan(Kind::Postgres, postgres, args.tasks, pace)).await?,
    );
    for kind in [Kind::Sqlite, Kind::Postgres] {
        runs.extend(read(kind, args.seed, args.readers, args.reconnects).await?);
    }
    for round in 0..args.rounds {
        for kind in [Kind::Sqlite, Kind::Postgres] {
            let points = Faults { points: true, ..Faults::default() };
            let plan = Drive { seed: args.seed + round, ..plan(kind, points, 500, Duration::from_millis(15)) };
            runs.extend(ran("every failpoint", &plan).await?);
        }
    }
    for (name, kind, tasks, faults) in bad_disks_and_networks() {
        runs.extend(ran(name, &plan(kind, faults, tasks, Duration::from_millis(15))).await?);
    }
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let broker = Faults { kills: 5, every: Duration::from_millis(1_500), broker: 8, ..Faults::default() };
        runs.extend(ran("the broker killed", &plan(kind, broker, 1_000, Duration::from_millis(15))).await?);
        runs.extend(migrated(&Plan { kind, seed: args.seed, points: 60, races: 20 }).await?);
    }
    let plan = Hostile { seed: args.seed, inputs: args.inputs, only: None };
    let tried = if args.inputs == 0 { Vec::new() } else { hostile(&plan, &std::env::current_exe()?).await? };
    runs.push(simulation(Seeds { from: args.seed, count: args.seeds, mutant: None }).await?);
    let date = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
    let report = |hunts: &[Hunted]| match &args.report {
        Some(path) => std::fs::write(path, page(&args.commit, &date, &runs, &tried, hunts)),
        None => Ok(()),
    };
    report(&[])?;
    let hunts = if args.no_mutants { Vec::new() } else { hunt(None, args.seed).await? };
    report(&hunts)?;
    let held = runs.iter().all(|ran| ran.outcome.is_clean());
    Ok(held && tried.iter().all(Tried::held) && hunts.iter().all(Hunted::is_caught))
}
