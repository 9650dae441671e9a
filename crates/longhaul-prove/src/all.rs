//! Everything, with the numbers of the proof: one run after the other, each told on the terminal, and then the report.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::time::Duration;

use longhaul::faults::Mutant;

use crate::Anyhow;
use crate::bed::Kind;
use crate::drive::{DiskFaults, Drive, Faults, NetworkFaults, Outcome, drive};
use crate::hostile::{Hostile, Tried, hostile};
use crate::migrations::{Plan, migrations};
use crate::mutants::{SIMULATED, breaks, run_of, simulated};
use crate::readers::run::{Reading, read_all};
use crate::report::{Hunted, Ran, Row, line, page, tally};
use crate::simulate::{Seeds, Simulated, simulate_many};

/// How much of everything.
#[derive(clap::Args)]
pub struct AllArgs {
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
    /// Where the report goes; it is written anew after each run
    #[arg(long)]
    report: Option<PathBuf>,
    /// Where what came of each run is kept
    #[arg(long)]
    notes: Option<PathBuf>,
    /// Go on where an earlier call was broken off: runs that held, by those notes, are not made again
    #[arg(long, requires = "notes")]
    go_on: bool,
}

/// What was run so far.
struct Proof<'a> {
    args: &'a AllArgs,
    rows: Vec<Row>,
    /// What an earlier call ran.
    earlier: Vec<Row>,
    tried: Vec<Tried>,
    hunts: Vec<Hunted>,
}

impl<'a> Proof<'a> {
    fn begin(args: &'a AllArgs) -> Result<Self, Anyhow> {
        let mut earlier = Vec::new();
        if let Some(path) = &args.notes {
            match std::fs::read_to_string(path) {
                Ok(notes) if args.go_on => {
                    earlier = notes.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
                }
                Ok(_) => std::fs::remove_file(path)?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(format!("cannot read {}: {error}", path.display()).into()),
            }
        }
        Ok(Self { args, rows: Vec::new(), earlier, tried: Vec::new(), hunts: Vec::new() })
    }

    /// Makes a run, unless it held before. One that could not be made did not hold, and is no reason to leave the others out.
    async fn row(
        &self,
        name: &str,
        store: &str,
        seed: u64,
        run: impl Future<Output = Result<Option<Ran>, Anyhow>>,
    ) -> Option<Row> {
        if let Some(row) = self.earlier.iter().rfind(|row| row.is_of(name, store, seed) && row.held) {
            println!("{name} on {store}, seed {seed}: held before");
            return Some(row.clone());
        }
        match run.await {
            Ok(ran) => ran.map(|ran| Row::of(&ran, &self.args.commit)),
            Err(error) => {
                println!("{name} on {store}, seed {seed}: BROKE OFF ({error})");
                let (name, store, commit) = (name.to_owned(), store.to_owned(), self.args.commit.clone());
                let what = format!("broke off: {error}");
                Some(Row { name, store, seed, commit, what, violations: 0, held: false })
            }
        }
    }

    async fn drive(&self, name: &str, plan: &Drive) -> Option<Row> {
        self.row(name, &plan.kind.to_string(), plan.seed, ran(name, plan)).await
    }

    /// Keeps what was run.
    fn add(&mut self, rows: impl IntoIterator<Item = Row>) -> Result<(), Anyhow> {
        for row in rows {
            if let Some(path) = self.args.notes.as_ref().filter(|_| !self.earlier.contains(&row)) {
                let mut notes = OpenOptions::new().create(true).append(true).open(path)?;
                writeln!(notes, "{}", serde_json::to_string(&row)?)?;
            }
            self.rows.push(row);
        }
        self.report()
    }

    fn report(&self) -> Result<(), Anyhow> {
        let Some(path) = &self.args.report else { return Ok(()) };
        let date = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
        std::fs::write(path, page(&self.args.commit, &date, &self.rows, &self.tried, &self.hunts))?;
        Ok(())
    }

    fn held(&self) -> bool {
        let runs = self.rows.iter().all(|row| row.held);
        runs && self.tried.iter().all(Tried::held) && self.hunts.iter().all(Hunted::is_caught)
    }
}

/// Runs all of it and writes the report; whether everything held.
pub async fn all(args: AllArgs) -> Result<bool, Anyhow> {
    let mut proof = Proof::begin(&args)?;
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
    // Few of them share a limit, or the line before it would grow for as long as the run lasts.
    let long = |kind, faults| Drive { limited: 1, ..plan(kind, faults, args.tasks, Duration::from_micros(7_000)) };
    proof.add(proof.drive("kills and freezes", &long(Kind::Sqlite, sqlite)).await)?;
    proof.add(proof.drive("kills, freezes, restarts, wrong clocks", &long(Kind::Postgres, postgres)).await)?;
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let (readers, reconnects) = (args.readers, args.reconnects);
        let run = read(kind, args.seed, readers, reconnects);
        proof.add(proof.row(&of_readers(readers, reconnects), &kind.to_string(), args.seed, run).await)?;
    }
    for round in 0..args.rounds {
        let points = |kind| {
            let points = Faults { points: true, ..Faults::default() };
            Drive { seed: args.seed + round, ..plan(kind, points, 500, Duration::from_millis(15)) }
        };
        // Side by side: most of the time each waits for a point to be reached, or for a lease.
        let (sqlite, postgres) = (points(Kind::Sqlite), points(Kind::Postgres));
        let name = "every failpoint";
        let (sqlite, postgres) = tokio::join!(proof.drive(name, &sqlite), proof.drive(name, &postgres));
        proof.add(sqlite.into_iter().chain(postgres))?;
    }
    for (name, kind, tasks, faults) in bad_disks_and_networks() {
        proof.add(proof.drive(name, &plan(kind, faults, tasks, Duration::from_millis(15))).await)?;
    }
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let broker = Faults { kills: 5, every: Duration::from_millis(1_500), broker: 8, ..Faults::default() };
        let plan = plan(kind, broker, 1_000, Duration::from_millis(15));
        proof.add(proof.drive("the broker killed", &plan).await)?;
        let plan = Plan { kind, seed: args.seed, points: 60, races: 20 };
        proof.add(proof.row(MIGRATIONS, &kind.to_string(), args.seed, migrated(&plan)).await)?;
    }
    let seeds = Seeds { from: args.seed, count: args.seeds, mutant: None };
    let simulated = async { simulation(seeds).await.map(Some) };
    proof.add(proof.row(SIMULATION, IN_MEMORY, args.seed, simulated).await)?;
    if args.inputs > 0 {
        let plan = Hostile { seed: args.seed, inputs: args.inputs, only: None };
        proof.tried = hostile(&plan, &std::env::current_exe()?).await?;
        proof.report()?;
    }
    if !args.no_mutants {
        proof.hunts = hunt(None, args.seed).await?;
        proof.report()?;
    }
    Ok(proof.held())
}

const MIGRATIONS: &str = "migrations broken off and raced";
const SIMULATION: &str = "simulation";
const IN_MEMORY: &str = "memory";

/// What a run of readers is called.
fn of_readers(readers: u64, reconnects: u32) -> String {
    format!("{readers} readers, {reconnects} reconnects each")
}

/// Runs it and says what came of it; `None` where the store cannot be had.
pub async fn ran(name: &str, plan: &Drive) -> Result<Option<Ran>, Anyhow> {
    let outcome = drive(plan, &std::env::current_exe()?).await?;
    Ok(told(name, plan.kind, plan.seed, outcome))
}

/// A run of readers.
pub async fn read(kind: Kind, seed: u64, readers: u64, reconnects: u32) -> Result<Option<Ran>, Anyhow> {
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
    let ran = Ran { name: of_readers(readers, reconnects), store: kind.to_string(), seed, outcome };
    say(&ran);
    Ok(Some(ran))
}

/// The same for migrations.
pub async fn migrated(plan: &Plan) -> Result<Option<Ran>, Anyhow> {
    let outcome = migrations(plan, &std::env::current_exe()?).await?;
    Ok(told(MIGRATIONS, plan.kind, plan.seed, outcome))
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
pub async fn simulation(seeds: Seeds) -> Result<Ran, Anyhow> {
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
    let ran = Ran { name: SIMULATION.to_owned(), store: IN_MEMORY.to_owned(), seed: seeds.from, outcome };
    say(&ran);
    Ok(ran)
}

/// Waits for work on other threads. They are left where they are when this is dropped: an interrupt ends them.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T, Anyhow> + Send + 'static) -> Result<T, Anyhow> {
    let (done, waiting) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || done.send(work()));
    waiting.await?
}

/// Runs mutants, all or only one.
pub async fn hunt(only: Option<Mutant>, seed: u64) -> Result<Vec<Hunted>, Anyhow> {
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
fn bad_disks_and_networks() -> [(&'static str, Kind, u64, Faults); 8] {
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
            "the tasks locked by someone",
            Kind::Postgres,
            2_000,
            network(NetworkFaults { locked: 4, ..no_network.clone() }),
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
