//! A store of its own, and everything around it: ledger, records, world, and the processes that use them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use longhaul::{Client, QueueSettings, Settings};

use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::broker::Broker;
use crate::chance::Chance;
use crate::disk::Disk;
use crate::drive::{Drive, Faults};
use crate::process::{Place, Process, open};
use crate::program::{HANDLER, KEYS};
use crate::proxy::Proxy;
use crate::server::Server;

/// Which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A file.
    Sqlite,
    /// A server of the suite's own.
    Postgres,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sqlite => "SQLite",
            Self::Postgres => "PostgreSQL",
        })
    }
}

/// How long a store may take to be set up.
const TO_SET_UP: Duration = Duration::from_secs(60);

/// Gives a new store the limits that tasks of the suite share, and makes their handler known.
pub async fn make_ready(client: &Client) -> Result<(), longhaul::Error> {
    let queue = QueueSettings { max_pending: 10_000_000, ..QueueSettings::default() };
    let settings = Settings {
        queues: BTreeMap::from([("default".to_owned(), queue)]),
        key_max_running: KEYS.into_iter().map(|(key, max)| (key.to_owned(), max)).collect(),
        ..Settings::default()
    };
    client.configure(&settings).await?;
    client.announce(&[HANDLER]).await
}

/// A line of what processes noted: a point or what was met, its kind, and the process.
pub type Noted = (String, String, u32);

/// See the module.
pub struct Bed {
    client: OnceCell<Client>,
    /// The server, if the store is on one.
    pub server: Option<Server>,
    /// The disk under the store, if it can fail.
    pub disk: Option<Disk>,
    /// The broker that events are published to, if there is one.
    pub broker: Option<Broker>,
    proxy: Option<Proxy>,
    /// The store, as the driver sees it.
    url: String,
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Bed {
    /// A new store around which everything is sound; `None` where it cannot be had. `program` is what its processes run.
    pub async fn make(kind: Kind, program: &Path) -> Result<Option<Self>, Anyhow> {
        Self::made_of(kind, program, &Faults::default(), Chance::of(0, 0), Duration::ZERO).await
    }

    /// The same for what a drive does.
    pub async fn make_for(drive: &Drive, program: &Path) -> Result<Option<Self>, Anyhow> {
        let chance = Chance::of(drive.seed, u64::MAX - 1);
        Self::made_of(drive.kind, program, &drive.faults, chance, drive.lease).await
    }

    async fn made_of(
        kind: Kind,
        program: &Path,
        faults: &Faults,
        chance: Chance,
        lease: Duration,
    ) -> Result<Option<Self>, Anyhow> {
        let folder = tempfile::tempdir()?;
        let (mut disk, mut proxy) = (None, None);
        let (url, server) = match kind {
            Kind::Sqlite => {
                let store = folder.path().join("store");
                std::fs::create_dir(&store)?;
                if faults.disk.is_any() {
                    disk = Some(Disk::make(&store, &folder.path().join("disk"), true)?);
                }
                (format!("sqlite:{}", store.join("prove.db").display()), None)
            }
            Kind::Postgres => {
                let Some(server) = Server::start(faults.network.server_full > 0)? else { return Ok(None) };
                if faults.network.is_proxied() {
                    proxy = Some(Proxy::start(server.address(), lease.mul_f64(1.6), chance).await?);
                }
                (server.url(), Some(server))
            }
        };
        let mut broker = None;
        if faults.broker > 0 {
            broker = Broker::start().await?;
            if broker.is_none() {
                return Ok(None);
            }
        }
        let client = OnceCell::new();
        let bed = Self { client, server, disk, broker, proxy, url, folder, program: program.to_owned() };
        bed.set_up().await?;
        Ok(Some(bed))
    }

    /// A process sets the store up, on the disk that the others will have.
    async fn set_up(&self) -> Result<(), Anyhow> {
        let mut process = self.start("setup", &[], &[])?;
        let until = Instant::now() + TO_SET_UP;
        loop {
            match process.ended()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("the store could not be set up: {status}").into()),
                None if Instant::now() > until => return Err("the store could not be set up in time".into()),
                None => sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// The store, as the driver sees it: by a way that does not fail. On a disk that can, it must not be asked for before the
    /// last power loss.
    pub async fn client(&self) -> Result<&Client, Anyhow> {
        self.client.get_or_try_init(|| open(&self.url)).await
    }

    /// What is between processes and the server, if the network is bad.
    pub fn proxy(&self) -> Result<&Proxy, Anyhow> {
        Ok(self.proxy.as_ref().ok_or("this run has no proxy")?)
    }

    /// The store, as processes see it.
    fn url_for_processes(&self) -> String {
        match (&self.server, &self.proxy) {
            (Some(server), Some(proxy)) => server.url_at(proxy.port()),
            _ => self.url.clone(),
        }
    }

    /// Where ledger, records and world are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Keeps the folder when this value is gone, to be looked at.
    pub fn keep(&mut self) -> &Path {
        self.folder.disable_cleanup(true);
        self.folder.path()
    }

    /// Starts a process: `setup`, `worker`, `listener`, `people` or `client`, with more words and variables.
    pub fn start(&self, role: &str, words: &[String], variables: &[(String, String)]) -> Result<Process, Anyhow> {
        let mut all = vec![role.to_owned(), "--store".to_owned(), self.url_for_processes(), "--folder".to_owned()];
        all.push(self.folder().display().to_string());
        all.extend_from_slice(words);
        let mut variables = variables.to_vec();
        variables.extend(self.disk.iter().flat_map(Disk::variables));
        variables.push(("LONGHAUL_FAULTS_FIRED".to_owned(), self.fired_path().display().to_string()));
        Ok(Process::start(&self.program, &all, &variables)?)
    }

    fn fired_path(&self) -> PathBuf {
        self.folder().join("fired")
    }

    /// The faults that fired so far: point, kind, and the process.
    pub fn fired(&self) -> Vec<Noted> {
        let (_, fired) = self.noted();
        fired
    }

    /// How often a process had no connection of its pool free.
    pub fn empty_pools(&self) -> u64 {
        let (met, _) = self.noted();
        met.iter().filter(|(what, ..)| what == "empty_pool").count() as u64
    }

    /// What processes met, and the faults that fired in them.
    fn noted(&self) -> (Vec<Noted>, Vec<Noted>) {
        let text = std::fs::read_to_string(self.fired_path()).unwrap_or_default();
        let parse = |line: &str| {
            let mut words = line.split(' ');
            let (point, kind) = (words.next()?.to_owned(), words.next()?.to_owned());
            Some((point, kind, words.nth(1)?.parse().ok()?))
        };
        text.lines().filter_map(parse).partition(|(_, kind, _)| kind == "met")
    }

    /// The store's time, microseconds: both stores are on this host.
    pub fn now(&self) -> i64 {
        jiff::Timestamp::now().as_microsecond()
    }
}

/// Sets a new store up, with the limits of the suite.
pub async fn setup(place: Place) -> Result<(), Anyhow> {
    let client = open(&place.store).await?;
    Ok(make_ready(&client).await?)
}
