//! The processes of the suite: workers and clients, both this very program, started by the driver to be killed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use longhaul::{Client, Filter, SubscriberHandle, TaskId, Told, Worker};
use rustix::process::{Pid, Signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::Anyhow;
use crate::after::after;
use crate::handler::{Outside, prove, retries};
use crate::ledger::{Ledger, What, World, boot_micros, digest};
use crate::program::{HANDLER, Plan, Same};
use crate::readers::Reader;
use crate::records::{Records, Stream};
use crate::serve::Wires;
use crate::via::Via;
use crate::web::Web;

/// How many callers a crowd has: more than a pool has connections.
const CROWD: usize = 24;
/// How long each of them pauses between two questions.
const PAUSE: Duration = Duration::from_millis(400);

/// What every process of the suite is told.
#[derive(Args, Clone, Debug)]
pub struct Place {
    /// The store
    #[arg(long)]
    pub store: String,
    /// The folder of ledger, records and world
    #[arg(long)]
    pub folder: PathBuf,
}

/// What a worker is told.
#[derive(Args, Clone, Debug)]
pub struct WorkerArgs {
    /// Where
    #[command(flatten)]
    pub place: Place,
    /// How many tasks at once
    #[arg(long)]
    pub slots: usize,
    /// The lease, milliseconds
    #[arg(long)]
    pub lease_ms: u64,
}

/// What a listener is told.
#[derive(Args, Clone, Debug)]
pub struct ListenerArgs {
    /// Where
    #[command(flatten)]
    pub place: Place,
    /// The lease, milliseconds
    #[arg(long)]
    pub lease_ms: u64,
}

/// What a client is told.
#[derive(Args, Clone, Debug)]
pub struct ClientArgs {
    /// Where
    #[command(flatten)]
    pub place: Place,
    /// The seed of the tasks
    #[arg(long)]
    pub seed: u64,
    /// Which client this is
    #[arg(long)]
    pub client: u64,
    /// Of how many
    #[arg(long)]
    pub clients: u64,
    /// The first task
    #[arg(long)]
    pub from: u64,
    /// The task before which it ends
    #[arg(long)]
    pub tasks: u64,
    /// How many out of a hundred share a limit
    #[arg(long)]
    pub limited: u64,
    /// The time between tasks, microseconds
    #[arg(long)]
    pub every_us: u64,
    /// When to begin, by the host's boot clock, microseconds
    #[arg(long)]
    pub begin_at: i64,
    /// By the servers, not on the store itself
    #[arg(long)]
    pub http: bool,
}

/// This process is killed when the driver that started it ends, however that ends.
pub fn end_with_the_driver() -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// Runs programs until it is told to stop, or killed.
pub async fn worker(args: WorkerArgs) -> Result<(), Anyhow> {
    let client = open(&args.place.store).await?;
    let (ledger, world) = (Ledger::open(&args.place.folder)?, World::open(&args.place.folder)?);
    let outside = Arc::new(Outside::of_host(ledger, world));
    let worker = worker_of(&client, outside, args.slots, Duration::from_millis(args.lease_ms));
    Ok(worker.run(told_to_end()?).await?)
}

/// A worker of the suite.
pub fn worker_of(client: &Client, outside: Arc<Outside>, slots: usize, lease: Duration) -> Worker {
    Worker::new(client)
        .slots(slots)
        .lease(lease)
        .drain(Duration::from_secs(5))
        .cancel_grace(Duration::from_secs(2))
        .retry(retries())
        .handler(HANDLER, move |run, program| prove(Arc::clone(&outside), run, program))
}

/// Comes back when this process is told to end.
pub(crate) fn told_to_end() -> std::io::Result<impl Future<Output = ()> + Send> {
    let mut told = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    Ok(async move {
        told.recv().await;
    })
}

/// Hears every event until it is told to stop, or killed.
pub async fn listener(args: ListenerArgs) -> Result<(), Anyhow> {
    let client = open(&args.place.store).await?;
    let ledger = Ledger::open(&args.place.folder)?;
    let subscriber = listen(&client, ledger, Duration::from_millis(args.lease_ms)).await?;
    told_to_end()?.await;
    subscriber.stop().await;
    Ok(())
}

/// Notes every event in the ledger.
pub async fn listen(
    client: &Client,
    ledger: Ledger,
    lease: Duration,
) -> Result<SubscriberHandle, longhaul::Error> {
    let subscriber = client.subscriber("prove").all_tenants().from_start().lease(lease);
    subscriber
        .back_off(Duration::from_millis(20), Duration::from_millis(200))
        .start(move |Told { event, .. }| {
            let text = serde_json::to_string(&event).unwrap_or_default();
            let heard = What::Heard { task: event.task_id, seq: event.seq, digest: digest(&text) };
            std::future::ready(ledger.note(heard).map_err(Into::into))
        })
        .await
}

/// Asks all the time, with many callers at once, until it is told to stop, or killed: while the store does not answer, some of them
/// have no connection.
pub async fn crowd(place: Place) -> Result<(), Anyhow> {
    let client = open(&place.store).await?;
    let mut callers = JoinSet::new();
    for _ in 0..CROWD {
        let client = client.clone();
        callers.spawn(async move {
            loop {
                // Whatever it is told, it asks again.
                let _ = client.list(&Filter { limit: 1, ..Filter::default() }).await;
                sleep(PAUSE).await;
            }
        });
    }
    std::fs::write(crowd_path(&place.folder), "")?;
    told_to_end()?.await;
    Ok(())
}

/// What is there as soon as the crowd is.
pub fn crowd_path(folder: &Path) -> PathBuf {
    folder.join("crowd")
}

/// Opens the store, again and again while it is away.
pub async fn open(store: &str) -> Result<Client, Anyhow> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match Client::open(store).await {
            Ok(client) => return Ok(client),
            Err(longhaul::Error::Store(error)) if error.is_unavailable() && Instant::now() < until => {
                sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Submits its share of the tasks of a seed, cancels and follows some of them, and records what it is told. A task
/// that is to be recognised (by a key, or as equal) is submitted by every client, at the same moment.
pub async fn client(args: ClientArgs) -> Result<(), Anyhow> {
    let records = Arc::new(Records::open(&args.place.folder, &format!("client {}", args.client))?);
    let wires = Wires::find(&args.place.folder)?;
    let hook: Option<Arc<str>> = wires.as_ref().map(|wires| wires.hook_url().into());
    let (client, web) = match wires.filter(|_| args.http) {
        Some(wires) => (None, Some(Arc::new(Web::new(wires, Arc::clone(&records))?))),
        None => (Some(open(&args.place.store).await?), None),
    };
    let mut tasks = JoinSet::new();
    let begin = Instant::now() + Duration::from_micros((args.begin_at - boot_micros()).max(0).unsigned_abs());
    for number in args.from..args.tasks {
        let plan = Plan::draw(args.seed, number, args.limited);
        if plan.same == Same::Nothing && number % args.clients != args.client {
            continue;
        }
        sleep_until(begin + Duration::from_micros(args.every_us * (number - args.from))).await;
        let via = match (&client, &web) {
            (Some(client), _) => Via::Library(client.for_tenant(plan.tenant)),
            (None, Some(web)) => Via::Web(Arc::clone(web), plan.tenant),
            (None, None) => return Err("a client needs a store or a server".into()),
        };
        tasks.spawn(one_task(via, Arc::clone(&records), plan, hook.clone()));
        while let Some(done) = tasks.try_join_next() {
            done??;
        }
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// Submits a task, reads its events and does with it what is planned.
pub async fn one_task(via: Via, records: Arc<Records>, plan: Plan, hook: Option<Arc<str>>) -> Result<(), Anyhow> {
    let Some(id) = via.submit(&records, &plan, hook.as_deref()).await? else { return Ok(()) };
    let reading = async {
        match (plan.reconnects, &via) {
            (Some(reconnects), Via::Library(client)) => follow(client, &records, id, reconnects).await,
            (Some(reconnects), Via::Web(web, tenant)) => {
                Reader::of_client(tenant, id, reconnects).read(web, &records).await.map(drop)
            }
            (None, _) => Ok(()),
        }
    };
    tokio::try_join!(reading, after(&via, &records, &plan, id)).map(|((), ())| ())
}

/// Reads a task's events to their end, and connects anew so many times on the way.
async fn follow(client: &Client, records: &Records, task: TaskId, reconnects: u32) -> Result<(), Anyhow> {
    let mut chance = crate::chance::Chance::new(task.0.as_u128() as u64);
    let (mut after, mut left) = (0, reconnects);
    loop {
        let mut stream = Stream { task, after, events: Vec::new(), ended: false, reader: None };
        let most = if left > 0 { chance.between(0, 6) as usize } else { usize::MAX };
        left = left.saturating_sub(1);
        let opened = client.events(task, after).await;
        if matches!(opened, Err(longhaul::Error::NotFound(_))) {
            // Removed with its time; nothing more comes of it.
            return Ok(());
        }
        if let Ok(mut events) = opened {
            while stream.events.len() < most {
                match events.next().await {
                    Ok(Some(event)) => {
                        after = event.seq;
                        stream.events.push((event.seq, digest(&serde_json::to_string(&event)?)));
                    }
                    Ok(None) => {
                        stream.ended = true;
                        break;
                    }
                    // Cut off: it goes on where it was.
                    Err(_) => break,
                }
            }
        } else {
            sleep(Duration::from_millis(100)).await;
        }
        let ended = stream.ended;
        records.read_events(stream)?;
        if ended {
            return Ok(());
        }
    }
}

/// A process of the suite; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// What it was started with.
    command: Command,
    /// How often.
    starts: u32,
}

impl Process {
    /// Starts a program with these words and variables.
    pub fn start(program: &Path, words: &[String], variables: &[(String, String)]) -> std::io::Result<Self> {
        let mut command = Command::new(program);
        command.args(words).envs(variables.iter().map(|(name, value)| (name, value)));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        Ok(Self { child, command, starts: 1 })
    }

    /// Kills it, if it still runs, and starts the same anew.
    pub fn again(&mut self) -> std::io::Result<()> {
        self.kill()?;
        self.child = self.command.spawn()?;
        self.starts += 1;
        Ok(())
    }

    /// How often it was started.
    pub fn starts(&self) -> u32 {
        self.starts
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.child.id()).ok()?)
    }

    /// `kill -9`.
    pub fn kill(&mut self) -> std::io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Stops it where it is.
    pub fn freeze(&self) -> std::io::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on.
    pub fn thaw(&self) -> std::io::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Asks it to end.
    pub fn terminate(&self) -> std::io::Result<()> {
        self.signal(Signal::TERM)
    }

    fn signal(&self, signal: Signal) -> std::io::Result<()> {
        match self.pid() {
            Some(pid) => Ok(rustix::process::kill_process(pid, signal)?),
            None => Ok(()),
        }
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> std::io::Result<Option<std::process::ExitStatus>> {
        self.child.try_wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
