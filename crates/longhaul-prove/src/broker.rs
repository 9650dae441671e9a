//! A broker of the suite's own, which can be killed and started: a Redis that writes before it acknowledges. A publisher of
//! [`longhaul_bus`] brings every event there, and what arrived is noted in the ledger.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use longhaul::{Client, Event};
use longhaul_bus::{Publisher, PublisherSettings, Subscription, Topic};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::Anyhow;
use crate::ledger::{Ledger, What, digest};
use crate::process::{Place, Process, open, told_to_end};

/// The program, if it is not among the programs of the system.
const VARIABLE: &str = "LONGHAUL_TEST_REDIS_BIN";
/// How long it may take to start.
const TO_START: Duration = Duration::from_secs(20);
/// When nothing came for so long, it is looked whether that was all.
const QUIET: Duration = Duration::from_millis(300);

/// What a publisher is told.
#[derive(Args, Clone, Debug)]
pub struct PublisherArgs {
    /// Where
    #[command(flatten)]
    pub place: Place,
    /// The broker
    #[arg(long)]
    pub bus: String,
}

/// A running broker; ends with this value.
#[derive(Debug)]
pub struct Broker {
    program: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
    process: Mutex<Option<Process>>,
}

/// `redis-server`, where it is.
fn program() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE) {
        return Some(named.into());
    }
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|path| path.join("redis-server")).find(|path| path.is_file())
}

impl Broker {
    /// A new broker; `None` where there is no `redis-server`.
    pub async fn start() -> Result<Option<Self>, Anyhow> {
        let Some(program) = program() else { return Ok(None) };
        let folder = tempfile::tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let broker = Self { program, folder, port, process: Mutex::default() };
        broker.up().await?;
        Ok(Some(broker))
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Starts it.
    pub async fn up(&self) -> Result<(), Anyhow> {
        let folder = self.folder.path().display().to_string();
        let port = self.port.to_string();
        let words = [
            ["--port", &port],
            ["--bind", "127.0.0.1"],
            ["--dir", &folder],
            ["--appendonly", "yes"],
            ["--appendfsync", "always"],
            ["--save", ""],
        ];
        let words: Vec<String> = words.into_iter().flatten().map(str::to_owned).collect();
        let process = Process::start(&self.program, &words, &[])?;
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
        let until = Instant::now() + TO_START;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if Instant::now() > until {
                return Err("the broker does not start".into());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&self) {
        // A process ends with its value.
        drop(self.process.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn settings() -> Result<PublisherSettings, Anyhow> {
    let mut settings = PublisherSettings::new(topic()?);
    settings.subscriber = "prove-broker".to_owned();
    Ok(settings)
}

fn topic() -> Result<Topic, Anyhow> {
    Ok(Topic::log("prove.events")?)
}

/// From now on everything is kept for the broker.
pub async fn keep_place(client: &Client) -> Result<(), Anyhow> {
    Ok(Publisher::keep_place(client, &settings()?).await?)
}

/// Publishes every event until it is told to stop, or killed.
pub async fn publisher(args: PublisherArgs) -> Result<(), Anyhow> {
    let client = open(&args.place.store).await?;
    let until = Instant::now() + Duration::from_secs(60);
    let bus = loop {
        match longhaul_bus::connect(&args.bus).await {
            Ok(bus) => break bus,
            Err(error) if Instant::now() > until => return Err(error.into()),
            Err(_) => sleep(Duration::from_millis(200)).await,
        }
    };
    let publisher = Publisher::start(&client, bus, settings()?).await?;
    told_to_end()?.await;
    publisher.stop().await;
    Ok(())
}

/// Reads what arrived there, until it is as many events as were told or for a while, and notes it in the ledger; gives how
/// many events that were.
pub async fn read_all(url: &str, folder: &Path, told: u64, bound: Duration) -> Result<u64, Anyhow> {
    let (bus, ledger) = (longhaul_bus::connect(url).await?, Ledger::open(folder)?);
    let mut consumer = bus.consume(&Subscription::new(topic()?, "prove")).await?;
    let mut arrived = std::collections::BTreeSet::new();
    let until = Instant::now() + bound;
    while (arrived.len() as u64) < told && Instant::now() < until {
        let Ok(delivery) = timeout(QUIET, consumer.next()).await else { continue };
        let delivery = delivery?;
        let event = event_of(&serde_json::from_slice(&delivery.message.body)?)?;
        let text = serde_json::to_string(&event)?;
        arrived.insert((event.task_id, event.seq));
        ledger.note(What::Arrived { task: event.task_id, seq: event.seq, digest: digest(&text) })?;
        delivery.ack().await?;
    }
    consumer.close().await;
    Ok(arrived.len() as u64)
}

/// The event that a CloudEvent tells of.
fn event_of(cloud: &Value) -> Result<Event, Anyhow> {
    let text = |name: &str| cloud[name].as_str().ok_or_else(|| format!("a CloudEvent without '{name}': {cloud}"));
    let kind = text("type")?;
    Ok(Event {
        seq: text("sequence")?.parse()?,
        task_id: serde_json::from_value(cloud["subject"].clone())?,
        kind: kind.strip_prefix("dev.longhaul.").unwrap_or(kind).to_owned(),
        time: text("time")?.parse()?,
        run: text("run")?.parse()?,
        step: cloud["step"].as_str().map(str::to_owned),
        data: cloud["data"].clone(),
    })
}
