//! Servers of the suite: the real one (`longhaul serve` without its configuration), as processes that can be killed. Where
//! they are, and the tokens of each tenant, is in a file that clients and people read.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use clap::Args;
use longhaul::store::{NewToken, Role};
use longhaul::{Client, Outbox, OutboxHandle, OutboxSettings};
use longhaul_server::{App, ServerSettings};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::process::{Place, open, told_to_end};
use crate::program::TENANTS;

/// How long a request may take to arrive and an answer to be taken: who does not read is cut off after that.
pub const CUT_OFF: Duration = Duration::from_secs(4);

/// What a server is told.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// Where
    #[command(flatten)]
    pub place: Place,
    /// The address on which it answers
    #[arg(long)]
    pub listen: SocketAddr,
}

/// Where servers are and who may ask them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wires {
    /// The servers.
    pub servers: Vec<SocketAddr>,
    /// A token of each tenant.
    pub tokens: BTreeMap<String, String>,
    /// The receiver of webhooks.
    pub hook: SocketAddr,
    /// What webhooks are signed with.
    pub secret: String,
}

impl Wires {
    /// Addresses for so many servers and a receiver, and tokens; written to the folder.
    pub async fn lay(client: &Client, folder: &Path, servers: usize) -> Result<Self, Anyhow> {
        // All are held until the last is there, so that no two are the same.
        let free: Result<Vec<TcpListener>, _> = (0..=servers).map(|_| TcpListener::bind("127.0.0.1:0")).collect();
        let free: Result<Vec<SocketAddr>, _> = free?.iter().map(TcpListener::local_addr).collect();
        let (mut servers, mut tokens) = (free?, BTreeMap::new());
        let hook = servers.pop().ok_or("there is at least one address")?;
        for tenant in TENANTS {
            let token = NewToken {
                name: format!("prove {tenant}"),
                tenant: tenant.to_owned(),
                role: Role::Operator,
                expires_after: None,
            };
            tokens.insert(tenant.to_owned(), client.create_token(token).await?.1);
        }
        let secret = client.webhook_secret().await?.reveal();
        let wires = Self { servers, tokens, hook, secret };
        std::fs::write(folder.join("wires"), serde_json::to_vec(&wires)?)?;
        Ok(wires)
    }

    /// Those of a folder, if there are servers.
    pub fn find(folder: &Path) -> Result<Option<Self>, Anyhow> {
        match std::fs::read(folder.join("wires")) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Where webhooks go.
    pub fn hook_url(&self) -> String {
        format!("http://{}/hook", self.hook)
    }
}

/// Answers until it is told to stop, or killed; delivers webhooks meanwhile.
pub async fn serve(args: ServeArgs) -> Result<(), Anyhow> {
    use_tls();
    let stop = told_to_end()?;
    let listener = tokio::net::TcpListener::bind(args.listen).await?;
    let settings =
        ServerSettings { request_timeout: CUT_OFF, heartbeat: Duration::from_secs(1), ..Default::default() };
    let app = App::starting(settings);
    let served = tokio::spawn(longhaul_server::serve(listener, app.clone(), stop));
    let client = open(&args.place.store).await?;
    let outbox = outbox(&client).await?;
    app.open(client, true);
    served.await?;
    outbox.stop().await;
    Ok(())
}

/// Starts to deliver, again and again while the store is away.
async fn outbox(client: &Client) -> Result<OutboxHandle, Anyhow> {
    let settings = OutboxSettings {
        allow_loopback: true,
        timeout: Duration::from_secs(2),
        first_retry: Duration::from_millis(50),
        longest_retry: Duration::from_millis(500),
        ..OutboxSettings::default()
    };
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match Outbox::start(client, settings.clone()).await {
            Ok(outbox) => return Ok(outbox),
            Err(longhaul::Error::Store(error)) if error.is_unavailable() && Instant::now() < until => {
                sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whoever speaks HTTP needs it, also without TLS.
pub fn use_tls() {
    // Another may have installed it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
