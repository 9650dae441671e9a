//! What all requests share: the store, the settings, who may do what, and whether the server is starting or
//! stopping.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use longhaul::Client;
use longhaul_agent::Artifacts;
use tokio_util::sync::CancellationToken;

use crate::auth::{Rates, SigningKey, TokenCache};
use crate::dashboard::Pulses;
use crate::mcp::Watchers;
use crate::metrics::Metrics;
use crate::problem::Problem;

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Names and addresses (without port) that requests may call an unauthenticated server by, beside loopback's. Keeps
    /// pages of other origins from reaching it under a name of their own.
    pub hosts: Vec<String>,
    /// Origins whose pages may read answers; `*` for all.
    pub cors_origins: Vec<String>,
    /// The largest body, bytes.
    pub max_body: usize,
    /// How many connections are served at once; more wait to be accepted.
    pub max_connections: usize,
    /// How long the head and the body of a request may take to arrive, and an answer to be taken.
    pub request_timeout: Duration,
    /// The pause after which a silent stream gives a sign of life.
    pub heartbeat: Duration,
    /// Requests per second, by tenant; `*` is for tenants not named.
    pub rates: BTreeMap<String, Rate>,
    /// What runs a task that names no handler.
    pub default_handler: Option<String>,
    /// Where the artifacts of tasks are; without it, their bytes cannot be had here.
    pub artifacts: Option<Artifacts>,
}

/// How often a tenant may ask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests per second in the long run.
    pub per_second: f64,
    /// How many may come at once.
    pub burst: u32,
}

impl Default for ServerSettings {
    fn default() -> Self {
        Self {
            hosts: Vec::new(),
            cors_origins: Vec::new(),
            max_body: 5 * 1024 * 1024,
            max_connections: 10_000,
            request_timeout: Duration::from_secs(30),
            heartbeat: Duration::from_secs(15),
            rates: BTreeMap::new(),
            default_handler: None,
            artifacts: None,
        }
    }
}

/// The state behind the routes. Cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Open {
    client: Client,
    auth_required: AtomicBool,
}

struct Inner {
    settings: ServerSettings,
    /// Set once the store is open and migrated; until then the server is not ready.
    open: OnceLock<Open>,
    /// Told when `open` is set.
    opened: CancellationToken,
    stopping: CancellationToken,
    tokens: TokenCache,
    rates: Rates,
    /// Signs the tokens of streams.
    stream_key: SigningKey,
    /// Signs the sessions of the dashboard.
    session_key: SigningKey,
    pulses: Pulses,
    watchers: Watchers,
    metrics: Metrics,
}

impl App {
    /// A server whose store is still being opened: it lives, and is not ready.
    pub fn starting(settings: ServerSettings) -> Self {
        let rates = Rates::new(settings.rates.clone());
        Self(Arc::new(Inner {
            settings,
            open: OnceLock::new(),
            opened: CancellationToken::new(),
            stopping: CancellationToken::new(),
            tokens: TokenCache::default(),
            rates,
            stream_key: SigningKey::new("stream_key"),
            session_key: SigningKey::new("session_key"),
            pulses: Pulses::default(),
            watchers: Watchers::default(),
            metrics: Metrics::new(),
        }))
    }

    /// A server on an open store. Unless `auth_required`, everyone who reaches it is an admin of the tenant
    /// `default`; never do that beyond loopback.
    pub fn new(client: Client, auth_required: bool, settings: ServerSettings) -> Self {
        let app = Self::starting(settings);
        app.open(client, auth_required);
        app
    }

    /// The store is open: from now on the server is ready. See [`App::new`] for `auth_required`.
    pub fn open(&self, client: Client, auth_required: bool) {
        // A second store is a mistake of the caller; the first stays.
        let _ = self.0.open.set(Open { client, auth_required: AtomicBool::new(auth_required) });
        self.0.opened.cancel();
    }

    /// From now on every request needs a token.
    pub fn require_tokens(&self) {
        if let Some(open) = self.0.open.get() {
            open.auth_required.store(true, Ordering::Relaxed);
        }
    }

    /// From now on the server is not ready, and its streams end.
    pub fn stop(&self) {
        self.0.stopping.cancel();
    }

    pub(crate) fn client(&self) -> Result<&Client, Problem> {
        self.0.open.get().map(|open| &open.client).ok_or_else(|| {
            Problem::new("starting", "the server is opening its store; try again")
                .retry_after(Duration::from_secs(1))
        })
    }

    /// Waits until the store is open, for as long as a request may take.
    pub(crate) async fn wait_until_open(&self) {
        // Whether it is open by then is found out by who needs the store.
        let _ = tokio::time::timeout(self.0.settings.request_timeout, self.0.opened.cancelled()).await;
    }

    /// Whether every request needs a token.
    pub(crate) fn auth_required(&self) -> bool {
        self.0.open.get().is_none_or(|open| open.auth_required.load(Ordering::Relaxed))
    }

    pub(crate) fn settings(&self) -> &ServerSettings {
        &self.0.settings
    }

    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.0.stopping
    }

    pub(crate) fn tokens(&self) -> &TokenCache {
        &self.0.tokens
    }

    pub(crate) fn rates(&self) -> &Rates {
        &self.0.rates
    }

    pub(crate) fn stream_key(&self) -> &SigningKey {
        &self.0.stream_key
    }

    pub(crate) fn session_key(&self) -> &SigningKey {
        &self.0.session_key
    }

    pub(crate) fn pulses(&self) -> &Pulses {
        &self.0.pulses
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.0.watchers
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }
}
