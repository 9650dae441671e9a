//! A store of its own, and everything around it: ledger, records, world, and the processes that use them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use longhaul::{Client, QueueSettings, Settings};

use crate::Anyhow;
use crate::process::{Process, open};
use crate::program::{HANDLER, KEYS};
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

/// See the module.
pub struct Bed {
    /// The store, as the driver sees it.
    pub client: Client,
    /// The server, if the store is on one.
    pub server: Option<Server>,
    url: String,
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Bed {
    /// A new store; `None` where it cannot be had. `program` is what its processes run.
    pub async fn make(kind: Kind, program: &Path) -> Result<Option<Self>, Anyhow> {
        let folder = tempfile::tempdir()?;
        let (url, server) = match kind {
            Kind::Sqlite => (format!("sqlite:{}", folder.path().join("prove.db").display()), None),
            Kind::Postgres => match Server::start()? {
                Some(server) => (server.url(), Some(server)),
                None => return Ok(None),
            },
        };
        let client = open(&url).await?;
        make_ready(&client).await?;
        Ok(Some(Self { client, server, url, folder, program: program.to_owned() }))
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

    /// Starts a process: `worker`, `listener`, `people` or `client`, with more words and variables.
    pub fn start(&self, role: &str, words: &[String], variables: &[(String, String)]) -> Result<Process, Anyhow> {
        let mut all = vec![role.to_owned(), "--store".to_owned(), self.url.clone(), "--folder".to_owned()];
        all.push(self.folder().display().to_string());
        all.extend_from_slice(words);
        let mut variables = variables.to_vec();
        variables.push(("LONGHAUL_FAULTS_FIRED".to_owned(), self.fired_path().display().to_string()));
        Ok(Process::start(&self.program, &all, &variables)?)
    }

    fn fired_path(&self) -> PathBuf {
        self.folder().join("fired")
    }

    /// The faults that fired so far: point, kind, and the process.
    pub fn fired(&self) -> Vec<(String, String, u32)> {
        let text = std::fs::read_to_string(self.fired_path()).unwrap_or_default();
        let parse = |line: &str| {
            let mut words = line.split(' ');
            let (point, kind) = (words.next()?.to_owned(), words.next()?.to_owned());
            Some((point, kind, words.nth(1)?.parse().ok()?))
        };
        text.lines().filter_map(parse).collect()
    }

    /// The store's time, microseconds: both stores are on this host.
    pub fn now(&self) -> i64 {
        jiff::Timestamp::now().as_microsecond()
    }
}
