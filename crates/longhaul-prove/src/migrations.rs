//! Migrations that are broken off half-way and begun again, and that several processes begin at once, on an empty store and on
//! an old one. Afterwards the schema is what it is when nothing goes wrong, and each of its versions was applied once.
//!
//! On SQLite a process is killed in the middle of each of its writes in turn, and the power is lost with it; on PostgreSQL its
//! connection is cut after any byte, and the answer to its commit is lost.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use rusqlite::OpenFlags;
use tokio::time::{Instant, sleep};
use tokio_postgres::NoTls;

use crate::Anyhow;
use crate::bed::Kind;
use crate::chance::Chance;
use crate::check::Violation;
use crate::disk::Disk;
use crate::drive::Outcome;
use crate::process::{Place, Process};
use crate::proxy::{Proxy, Wrong};
use crate::server::Server;

/// What the process ends with that opened the store, and was told to try again.
pub const TRY_AGAIN: u8 = 75;
/// How many processes race.
const RACERS: usize = 4;
/// How often a process may have to try again.
const MOST_TRIES: usize = 20;
/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// More writes than a migration of SQLite has.
const MOST_WRITES: u64 = 10_000;

/// Which migrations are tried.
#[derive(Clone, Debug)]
pub struct Plan {
    /// On which store.
    pub kind: Kind,
    /// The seed.
    pub seed: u64,
    /// How many points at most a migration is broken off at, on each of an empty and an old store.
    pub points: u64,
    /// How many races there are on each.
    pub races: u64,
}

/// Opens the store, and nothing else; whether it could. The variable `LONGHAUL_FAULTS_SCHEMA` makes it one of an older version.
pub async fn migrate(place: Place) -> Result<bool, Anyhow> {
    match longhaul::Client::open(&place.store).await {
        Ok(_) => Ok(true),
        Err(longhaul::Error::Store(error)) if error.is_unavailable() => {
            eprintln!("prove: {error}");
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// What a store's schema is: its versions, and everything in it, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Schema {
    versions: Vec<i64>,
    things: BTreeMap<String, String>,
}

/// A place for stores, one after the other.
struct Site<'a> {
    plan: &'a Plan,
    program: &'a Path,
    folder: tempfile::TempDir,
    server: Option<Server>,
    made: u64,
    chance: Chance,
    outcome: Outcome,
}

/// One store.
struct Spot {
    url: String,
    disk: Option<Disk>,
    proxy: Option<Proxy>,
    name: String,
    /// What else its processes have in their environment.
    variables: Vec<(String, String)>,
}

/// Tries them. `None`: the store cannot be had here.
pub async fn migrations(plan: &Plan, program: &Path) -> Result<Option<Outcome>, Anyhow> {
    let begun = Instant::now();
    let server = match plan.kind {
        Kind::Sqlite => None,
        Kind::Postgres => match Server::start(false)? {
            Some(server) => Some(server),
            None => return Ok(None),
        },
    };
    let chance = Chance::of(plan.seed, u64::MAX - 2);
    let folder = tempfile::tempdir()?;
    let mut site = Site { plan, program, folder, server, made: 0, chance, outcome: Outcome::default() };
    let spot = site.spot(None, false).await?;
    site.open_until_it_works(&spot).await?;
    let good = site.schema(&spot).await?;
    let newest = *good.versions.last().ok_or("there are no migrations")?;
    for old in [None, Some(site.chance.between(1, newest.unsigned_abs() - 1))] {
        match plan.kind {
            Kind::Sqlite => site.killed_at_each_write(old, &good).await?,
            Kind::Postgres => site.cut_at_any_byte(old, &good).await?,
        }
        for _ in 0..plan.races {
            site.raced(old, &good).await?;
        }
    }
    let mut outcome = site.outcome;
    for name in ["migrations broken off", "migrations raced"] {
        if outcome.counts.get(name).is_none_or(|count| *count == 0) {
            outcome.not_fired.push(name.to_owned());
        }
    }
    outcome.seconds = begun.elapsed().as_secs_f64();
    Ok(Some(outcome))
}

impl Site<'_> {
    fn count(&mut self, what: &'static str) {
        *self.outcome.counts.entry(what).or_default() += 1;
    }

    fn violated(&mut self, what: String) {
        self.outcome.violations.push(Violation { invariant: 14, task: None, what });
    }

    /// A store that is empty, or of an old version; `bad`: with a disk or a network that can fail from then on.
    async fn spot(&mut self, old: Option<u64>, bad: bool) -> Result<Spot, Anyhow> {
        self.made += 1;
        let name = format!("store{}", self.made);
        let (mut disk, mut proxy) = (None, None);
        let url = match &self.server {
            None => {
                let store = self.folder.path().join(&name);
                std::fs::create_dir(&store)?;
                if bad {
                    disk = Some(Disk::make(&store, &self.folder.path().join(format!("disk{}", self.made)), true)?);
                }
                format!("sqlite:{}", store.join("prove.db").display())
            }
            Some(server) => {
                connect(&server.url()).await?.batch_execute(&format!("CREATE DATABASE {name}")).await?;
                let mut port = server.address().port();
                if bad {
                    let made = Proxy::start(server.address(), PATIENCE, self.chance.clone()).await?;
                    port = made.port();
                    proxy = Some(made);
                }
                Server::url_of(port, &name)
            }
        };
        let variables = disk.iter().flat_map(Disk::variables).collect();
        let spot = Spot { url, disk, proxy, name, variables };
        if let Some(old) = old {
            let mut older = self.start(&spot, Some(old))?;
            if !ended(&mut older).await?.success() {
                return Err(format!("no store of version {old} could be made").into());
            }
        }
        Ok(spot)
    }

    fn start(&self, spot: &Spot, old: Option<u64>) -> Result<Process, Anyhow> {
        let folder = self.folder.path().display().to_string();
        let words = ["migrate", "--store", &spot.url, "--folder", &folder].map(str::to_owned);
        let mut variables = spot.variables.clone();
        variables.extend(old.map(|old| ("LONGHAUL_FAULTS_SCHEMA".to_owned(), old.to_string())));
        Ok(Process::start(self.program, &words, &variables)?)
    }

    /// Starts a process, and another one as long as it is told to try again.
    async fn open_until_it_works(&mut self, spot: &Spot) -> Result<bool, Anyhow> {
        for _ in 0..MOST_TRIES {
            let mut process = self.start(spot, None)?;
            let status = ended(&mut process).await?;
            if status.success() {
                return Ok(true);
            }
            if status.code() != Some(TRY_AGAIN.into()) {
                return Ok(false);
            }
            self.count("times the next process had to try again");
        }
        Ok(false)
    }

    async fn is_good(&mut self, spot: &Spot, good: &Schema, what: &str) -> Result<(), Anyhow> {
        if !self.open_until_it_works(spot).await? {
            self.violated(format!("{what}: the store cannot be opened any more"));
            return Ok(());
        }
        let found = self.schema(spot).await?;
        if found != *good {
            let other: Vec<&String> = good
                .things
                .keys()
                .chain(found.things.keys())
                .filter(|name| good.things.get(*name) != found.things.get(*name))
                .collect();
            self.violated(format!(
                "{what}: versions {:?}, and these are not as they should be: {other:?}",
                found.versions
            ));
        }
        Ok(())
    }

    async fn killed_at_each_write(&mut self, old: Option<u64>, good: &Schema) -> Result<(), Anyhow> {
        // How many there are is seen from one that nobody disturbs.
        let whole = self.spot(old, true).await?;
        let disk = whole.disk.as_ref().ok_or("a store without a disk")?;
        disk.die_at(MOST_WRITES)?;
        self.open_until_it_works(&whole).await?;
        let writes = disk.counted(crate::disk::Counted::Writes)?;
        if writes == 0 {
            return Err("a migration without a write".into());
        }
        let points = self.plan.points.min(writes);
        for point in 0..points {
            let write = 1 + point * writes / points;
            let spot = self.spot(old, true).await?;
            let disk = spot.disk.as_ref().ok_or("a store without a disk")?;
            disk.die_at(write)?;
            let mut process = self.start(&spot, None)?;
            let status = ended(&mut process).await?;
            disk.die_at(0)?;
            if status.success() {
                // It had less to do this time.
                continue;
            }
            self.count("migrations broken off");
            if self.chance.percent(50) {
                disk.lose_power(&mut self.chance)?;
                self.count("power losses");
            }
            self.is_good(&spot, good, &format!("killed at write {write} of {writes} from version {old:?}"))
                .await?;
        }
        Ok(())
    }

    async fn cut_at_any_byte(&mut self, old: Option<u64>, good: &Schema) -> Result<(), Anyhow> {
        // How many there are is seen from one that nobody disturbs.
        let whole = self.spot(old, true).await?;
        let before = whole.proxy.as_ref().map_or(0, Proxy::carried);
        self.open_until_it_works(&whole).await?;
        let bytes = whole.proxy.as_ref().map_or(0, Proxy::carried) - before;
        for point in 0..self.plan.points {
            let spot = self.spot(old, true).await?;
            let proxy = spot.proxy.as_ref().ok_or("a store without a proxy")?;
            // The last one is for the answer to the commit.
            let wrong = if point + 1 == self.plan.points { Wrong::LostAnswer } else { Wrong::Cut };
            let byte = bytes * point / self.plan.points + self.chance.between(0, bytes / self.plan.points);
            match wrong {
                Wrong::Cut => proxy.cut_after(byte),
                other => proxy.arm(other),
            }
            let mut process = self.start(&spot, None)?;
            let status = ended(&mut process).await?;
            if proxy.happened(wrong) == 0 {
                // Less was said this time.
                proxy.disarm();
                continue;
            }
            self.count("migrations broken off");
            let what = format!("{wrong:?} at byte {byte} of {bytes} from version {old:?}");
            if !status.success() && status.code() != Some(TRY_AGAIN.into()) {
                self.violated(format!("{what}: {status}, which does not say to try again"));
            }
            self.is_good(&spot, good, &what).await?;
        }
        Ok(())
    }

    async fn raced(&mut self, old: Option<u64>, good: &Schema) -> Result<(), Anyhow> {
        let spot = self.spot(old, false).await?;
        let mut racers = Vec::new();
        for _ in 0..RACERS {
            racers.push(self.start(&spot, None)?);
        }
        for racer in &mut racers {
            let status = ended(racer).await?;
            if !status.success() {
                self.violated(format!(
                    "one of {RACERS} that began at once from version {old:?} ended with {status}"
                ));
            }
        }
        self.count("migrations raced");
        self.is_good(&spot, good, &format!("raced from version {old:?}")).await
    }

    async fn schema(&self, spot: &Spot) -> Result<Schema, Anyhow> {
        match &self.server {
            None => schema_of_sqlite(&self.folder.path().join(&spot.name).join("prove.db")),
            Some(server) => schema_of_postgres(&Server::url_of(server.address().port(), &spot.name)).await,
        }
    }
}

async fn ended(process: &mut Process) -> Result<ExitStatus, Anyhow> {
    let until = Instant::now() + PATIENCE;
    loop {
        match process.ended()? {
            Some(status) => return Ok(status),
            None if Instant::now() > until => return Err("a process that migrates hangs".into()),
            None => sleep(Duration::from_millis(5)).await,
        }
    }
}

async fn connect(url: &str) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    // It ends with the client.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(client)
}

fn schema_of_sqlite(path: &Path) -> Result<Schema, Anyhow> {
    let store = rusqlite::Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let mut versions = store.prepare("SELECT version FROM longhaul_migrations ORDER BY version")?;
    let versions = versions.query_map((), |row| row.get(0))?.collect::<Result<_, _>>()?;
    let mut things = store.prepare("SELECT type || ' ' || name, coalesce(sql, '') FROM sqlite_schema")?;
    let things = things.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?;
    let sound: String = store.query_row("PRAGMA integrity_check", (), |row| row.get(0))?;
    if sound != "ok" {
        return Err(format!("the database file is damaged: {sound}").into());
    }
    Ok(Schema { versions, things })
}

async fn schema_of_postgres(url: &str) -> Result<Schema, Anyhow> {
    let client = connect(url).await?;
    let versions = client.query("SELECT version FROM longhaul_migrations ORDER BY version", &[]).await?;
    let things = client
        .query(
            "SELECT 'column ' || table_name || '.' || column_name, data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '')
               FROM information_schema.columns WHERE table_schema = 'public'
             UNION ALL SELECT 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
             UNION ALL SELECT 'trigger ' || tgname || ' of ' || tgrelid::regclass, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
             UNION ALL SELECT 'function ' || proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace
             UNION ALL SELECT 'constraint ' || conname || ' of ' || conrelid::regclass, pg_get_constraintdef(oid) FROM pg_constraint
               WHERE connamespace = 'public'::regnamespace
             UNION ALL SELECT 'sequence ' || sequence_name, data_type FROM information_schema.sequences WHERE sequence_schema = 'public'",
            &[],
        )
        .await?;
    Ok(Schema {
        versions: versions.iter().map(|row| row.get(0)).collect(),
        things: things.iter().map(|row| (row.get(0), row.get(1))).collect(),
    })
}
