//! A bad way to the PostgreSQL server, and a server in trouble.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

use super::Driver;
use super::trouble::{Trouble, Window};
use crate::Anyhow;
use crate::history::list;
use crate::ledger::{Ledger, What};
use crate::process::crowd_path;
use crate::program::TENANTS;
use crate::server::Server;

/// What goes wrong between a PostgreSQL store and those who use it, and with the server itself.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct NetworkFaults {
    /// Connections cut, after any byte
    #[arg(long, default_value_t = 0)]
    pub cuts: u32,
    /// Times that bytes are held back, also for longer than a lease
    #[arg(long, default_value_t = 0)]
    pub holds: u32,
    /// Commits whose answer is lost on the way
    #[arg(long, default_value_t = 0)]
    pub lost_answers: u32,
    /// Times that the server ends the connections that LISTEN
    #[arg(long, default_value_t = 0)]
    pub deaf: u32,
    /// Times that all of the server's connections are in use by someone else
    #[arg(long, default_value_t = 0)]
    pub exhausted: u32,
    /// Times that someone else locks the tasks for longer than a connection of a pool is waited for
    #[arg(long, default_value_t = 0)]
    pub locked: u32,
    /// A transaction of someone else is open all the time: until it ends, no event is delivered
    #[arg(long)]
    pub old_transaction: bool,
    /// Times that the server's disk is full
    #[arg(long, default_value_t = 0)]
    pub server_full: u32,
}

impl NetworkFaults {
    /// Whether a proxy is needed.
    pub fn is_proxied(&self) -> bool {
        self.cuts + self.holds + self.lost_answers > 0
    }
}

/// How long others have no connection.
const EXHAUSTED_FOR: Duration = Duration::from_millis(2_000);
/// How long the tasks are locked, at least: who waits for a connection of its pool gives up after five seconds.
const LOCKED_FOR: Duration = Duration::from_millis(6_500);
/// More connections than any server of the suite has.
const MOST_CONNECTIONS: usize = 400;
/// How long the server has to come back when there is room again.
const TO_COME_BACK: Duration = Duration::from_secs(60);

/// A connection of the driver's own, past the proxy.
async fn connect(server: &Server) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await?;
    // It ends with the client.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(client)
}

/// The same, also when all connections are in use for a moment, or the server is just starting.
async fn connect_patiently(server: &Server) -> Result<Client, Anyhow> {
    let until = Instant::now() + TO_COME_BACK;
    loop {
        match connect(server).await {
            Err(_) if Instant::now() < until => sleep(Duration::from_millis(50)).await,
            Err(error) => return Err(format!("cannot connect to the server: {}", with_cause(&error)).into()),
            Ok(client) => return Ok(client),
        }
    }
}

/// What the server said, which the error itself does not.
fn with_cause(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), ToString::to_string)
}

impl Driver<'_> {
    fn server(&self) -> Result<&Server, Anyhow> {
        Ok(self.bed.server.as_ref().ok_or("this fault needs a PostgreSQL server")?)
    }

    /// Ends the connections over which processes hear of each other.
    pub(super) async fn deafen(&mut self) -> Result<(), Anyhow> {
        let client = connect_patiently(self.server()?).await?;
        let ended = client
            .query_one(
                "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
                 WHERE application_name = 'longhaul' AND (query LIKE '%pg_notify(%' OR query LIKE '%LISTEN %')",
                &[],
            )
            .await?;
        self.count("times LISTEN was lost", 1);
        self.count("listening connections ended", ended.get::<_, i64>(0).unsigned_abs());
        Ok(())
    }

    /// Ends all connections of others and takes them for itself, until the window is closed.
    pub(super) async fn exhaust(&mut self) -> Result<Window, Anyhow> {
        let server = self.server()?;
        let first = connect_patiently(server).await?;
        let end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'longhaul'";
        first.batch_execute(end_all).await?;
        let mut held = vec![first];
        // Others connect anew at the same time; whoever comes last is refused.
        let refused = loop {
            match connect(server).await {
                Ok(client) if held.len() < MOST_CONNECTIONS => held.push(client),
                Ok(_) => break false,
                Err(error) if error.code() == Some(&SqlState::TOO_MANY_CONNECTIONS) => break true,
                Err(error) => return Err(error.into()),
            }
        };
        if !refused {
            return Err("the server has more connections than can be taken".into());
        }
        let mut window = Window::new(Trouble::Exhausted, EXHAUSTED_FOR, 0);
        window.held = held;
        Ok(window)
    }

    /// Locks the tasks, until the window is closed. The crowd is there then, and does not have enough connections.
    pub(super) async fn lock_tasks(&mut self) -> Result<Window, Anyhow> {
        let (crowd, until) = (crowd_path(self.bed.folder()), Instant::now() + TO_COME_BACK);
        while !crowd.exists() {
            if Instant::now() > until {
                return Err("the crowd did not come".into());
            }
            sleep(Duration::from_millis(50)).await;
        }
        let client = connect_patiently(self.server()?).await?;
        client.batch_execute("BEGIN; LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE").await?;
        let mut window = Window::new(Trouble::Locked, LOCKED_FOR, self.bed.empty_pools());
        window.held = vec![client];
        Ok(window)
    }

    /// Begins a transaction that stays open.
    pub(super) async fn hold_back(&self) -> Result<Option<Client>, Anyhow> {
        if !self.drive.faults.network.old_transaction {
            return Ok(None);
        }
        let client = connect_patiently(self.server()?).await?;
        client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()").await?;
        Ok(Some(client))
    }

    /// Ends it: until now tasks ended, and not all that they told was delivered.
    pub(super) async fn let_go(&mut self, holder: Option<Client>) -> Result<(), Anyhow> {
        let Some(holder) = holder else { return Ok(()) };
        let (mut ended, mut told) = (0, 0);
        for tenant in TENANTS {
            let tasks = list(&self.bed.client().await?.for_tenant(tenant), None).await?;
            ended += tasks.iter().filter(|task| task.state.is_final()).count() as u64;
            told += tasks.iter().map(|task| task.last_seq).sum::<u64>();
        }
        let lines = Ledger::read(self.bed.folder())?;
        let heard = lines.iter().filter(|line| matches!(line.what, What::Heard { .. })).count() as u64;
        holder.batch_execute("COMMIT").await?;
        self.count("tasks that ended beside an old transaction", ended);
        self.count("events held back by it", told.saturating_sub(heard));
        if ended == 0 {
            self.not_fired.push("a task that ends beside an old transaction".to_owned());
        }
        if heard >= told {
            self.not_fired.push("a feed held back by an old transaction".to_owned());
        }
        Ok(())
    }

    /// Waits until the server answers again. It may have restarted by itself, or ended, and then it is started.
    pub(super) async fn server_is_back(&mut self) -> Result<(), Anyhow> {
        let until = Instant::now() + TO_COME_BACK;
        let mut ended = 0;
        loop {
            let server = self.server()?;
            let why = match connect(server).await {
                Ok(client) => match client.batch_execute("SELECT 1").await {
                    Ok(()) => break,
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if !server.is_up()? {
                server.up()?;
                ended += 1;
            }
            if Instant::now() > until {
                return Err(format!("the server did not come back when its disk had room again: {why}").into());
            }
            sleep(Duration::from_millis(100)).await;
        }
        let panics = self.server()?.panics()?;
        self.counts.insert("times the server gave up and began anew by itself", panics);
        self.count("times the server ended of it", ended);
        Ok(())
    }
}
