//! `longhaul up`, `serve` and `worker`: one process that answers requests, runs tasks, or both.
//!
//! Told to stop (SIGTERM, Ctrl-C, with `--until-eof` the end of stdin), it takes no more requests and tasks, finishes what is under way or hands it
//! back, and ends.

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use longhaul::outbox::{IpRange, WebhookSecret};
use longhaul::{Client, Outbox, OutboxHandle, OutboxSettings, Webhook, Worker};
use longhaul_agent::model::{ModelSettings, Provider};
use longhaul_agent::{Agent, Artifacts, Host, Manifest, load, register};
use longhaul_server::{App, Rate, ServerSettings, serve};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::interval;

use crate::args::{Command, NodeArgs};
use crate::bus::{OnBus, use_locks};
use crate::config::{Config, Flags, LogForm, Origin};
use crate::exit::Failure;
use crate::notify;
use crate::telemetry::{Form, TelemetrySettings};

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Both.
    Up,
    /// Answers requests.
    Serve,
    /// Runs tasks.
    Worker,
}

pub(crate) async fn run(args: NodeArgs, part: Part) -> Result<(), Failure> {
    let config = configuration(&args)?;
    let manifests = match (&config.worker.manifests, part) {
        (_, Part::Serve) => Vec::new(),
        (Some(folder), _) => manifests(folder)?,
        (None, Part::Up) => vec![assistant(&config)],
        (None, Part::Worker) => {
            return Err(Failure::usage("a worker needs something to run: say --manifests DIR"));
        }
    };
    let artifacts = artifacts(&config)?;
    let stop = told_to_stop(args.until_eof)?;
    let mut server = match part {
        Part::Worker => None,
        Part::Up | Part::Serve => Some(Server::start(&config, artifacts.clone(), stop.clone()).await?),
    };
    let client = Client::open(&config.store.url).await?;
    client.configure(&config.settings()).await?;
    use_locks(&client, &config).await?;
    let bus = OnBus::start(&client, &config, server.as_ref().map(|server| server.app.clone())).await?;
    let outbox = match &mut server {
        Some(server) => Some(server.open(&client, &config, bus.as_ref()).await?),
        None => None,
    };
    let address = server.as_ref().map(|server| server.address);
    let working = async {
        if let Some(bus) = &bus {
            bus.begin();
        }
        // Programs that start a server read this line: from now on it does what it is there for.
        if let Some(address) = address {
            say(format_args!("listening on http://{address}"));
        }
        notify::ready();
        stopped(stop).await;
    };
    let worked = match worker(&client, &config, manifests, artifacts) {
        Some(worker) => worker.run(working).await,
        None => {
            working.await;
            Ok(())
        }
    };
    if let Some(server) = server {
        server.end().await;
    }
    if let Some(outbox) = outbox {
        outbox.stop().await;
    }
    if let Some(bus) = bus {
        bus.stop().await;
    }
    Ok(worked?)
}

fn configuration(args: &NodeArgs) -> Result<Config, Failure> {
    let flags = Flags::default()
        .set("--store", "store.url", args.store.as_deref())
        .set("--listen", "server.listen", args.listen.as_deref())
        .set("--manifests", "worker.manifests", args.manifests.as_deref())
        .set("--workers", "worker.slots", args.workers.as_deref())
        .set("--queues", "worker.queues", args.queues.as_deref())
        .set("--bus", "bus.url", args.bus.as_deref())
        .set("--locks", "locks.url", args.locks.as_deref())
        .set("--lease", "worker.lease", args.lease.as_deref())
        .set("--drain", "worker.drain", args.drain.as_deref());
    Ok(Config::load(flags)?)
}

/// How a command logs and traces: a process that stays as it is configured, all others as the environment says.
pub(crate) fn telemetry(command: &Command) -> Result<TelemetrySettings, Failure> {
    let (Command::Up(args) | Command::Serve(args) | Command::Worker(args)) = command else {
        return Ok(TelemetrySettings::from_env(|name| std::env::var(name).ok()));
    };
    let telemetry = configuration(args)?.telemetry;
    let form = match telemetry.log {
        LogForm::Human => Form::Human,
        LogForm::Json => Form::Json,
    };
    let (level, otlp_endpoint, service_name) = (telemetry.level, telemetry.otlp_endpoint, telemetry.service_name);
    Ok(TelemetrySettings { form, level, otlp_endpoint, service_name })
}

/// What a kill left half-written is removed after this time: nothing is written for so long.
const UNFINISHED: Duration = Duration::from_secs(24 * 60 * 60);

/// The storage of artifacts, tidied up. One that nobody asked for may be missing; what needs it says so then.
pub(crate) fn artifacts(config: &Config) -> Result<Option<Artifacts>, Failure> {
    let Some(url) = &config.artifacts.url else { return Ok(None) };
    let artifacts = match Artifacts::open(url) {
        Err(error) if *config.origin("artifacts.url") == Origin::Default => {
            tracing::warn!(%error, "there is no storage of artifacts; [artifacts] url names another");
            return Ok(None);
        }
        opened => opened.map_err(|error| Failure::usage(error.to_string()))?,
    };
    let tidied = artifacts.clone();
    tokio::spawn(async move {
        match tidied.tidy(UNFINISHED).await {
            Ok(0) => {}
            Ok(removed) => tracing::info!(removed, "artifacts that were never finished are removed"),
            Err(error) => tracing::warn!(%error, "artifacts that were never finished cannot be removed"),
        }
    });
    Ok(Some(artifacts))
}

/// What there is without any manifest: an agent without tools, so that a key is enough for a first task.
fn assistant(config: &Config) -> Manifest {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let openai = ["OPENAI_API_KEY", "OPENAI_API_KEY_FILE", "OPENAI_BASE_URL"].into_iter().any(set);
    let anthropic = ["ANTHROPIC_API_KEY", "ANTHROPIC_API_KEY_FILE", "ANTHROPIC_BASE_URL"].into_iter().any(set);
    let (provider, model) = match anthropic && !openai {
        true => (Provider::Anthropic, "claude-sonnet-4-5"),
        false => (Provider::OpenAi, "gpt-4o-mini"),
    };
    let model = config.worker.model.as_deref().unwrap_or(model);
    let mut agent = Agent::new("assistant", ModelSettings::new(provider, model));
    agent.description = Some("Answers questions; has no tools".to_owned());
    agent.system = "You are a helpful assistant.".to_owned();
    if !openai && !anthropic {
        tracing::warn!(
            "no manifests and no model: set OPENAI_API_KEY or OPENAI_BASE_URL for the agent 'assistant', or say \
             --manifests DIR ('longhaul init DIR' makes one)"
        );
    }
    Manifest::Agent(Box::new(agent))
}

/// A worker for what the manifests declare; none without any.
fn worker(
    client: &Client,
    config: &Config,
    manifests: Vec<Manifest>,
    artifacts: Option<Artifacts>,
) -> Option<Worker> {
    if manifests.is_empty() {
        return None;
    }
    let host = Host::new(client, artifacts);
    let names: Vec<&str> = manifests.iter().map(Manifest::name).collect();
    let settings = &config.worker;
    let mut queues = settings.queues.clone();
    for manifest in &manifests {
        // An agent that names a queue is served there too.
        if let Manifest::Agent(agent) = manifest
            && let Some(queue) = agent.queue.as_ref().filter(|queue| !queues.contains(queue))
        {
            queues.push(queue.clone());
        }
    }
    tracing::info!(handlers = names.join(", "), queues = queues.join(", "), "working");
    let worker = Worker::new(client).slots(settings.slots).queues(queues);
    Some(register(worker.lease(settings.lease).drain(settings.drain), manifests, &host))
}

/// The server, which lives before its store is open and is not ready until then.
struct Server {
    app: App,
    address: SocketAddr,
    served: JoinHandle<()>,
    /// Looks for the first token while there is none; ends with the server.
    looking: JoinSet<()>,
}

/// How often a server that is open to everyone on its machine looks whether there is a token now.
const LOOK_FOR_TOKENS: Duration = Duration::from_secs(2);

/// Whoever makes the first token wants the door closed, also that of a server that runs already.
async fn close_with_the_first_token(app: App, client: Client) {
    let mut look = interval(LOOK_FOR_TOKENS);
    loop {
        look.tick().await;
        match client.has_tokens().await {
            Ok(true) => {
                app.require_tokens();
                tracing::info!("there is a token now: from here on every request needs one");
                return;
            }
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "cannot look for tokens; trying again"),
        }
    }
}

impl Server {
    async fn start(
        config: &Config,
        artifacts: Option<Artifacts>,
        stop: watch::Receiver<bool>,
    ) -> Result<Self, Failure> {
        let listen = config.server.listen;
        if !listen.ip().is_loopback() && config.auth.required == Some(false) {
            return Err(Failure::usage(format!(
                "everyone who reaches {listen} could do anything: listen on 127.0.0.1, or remove 'required = false' from [auth]"
            )));
        }
        let listener = TcpListener::bind(listen).await.map_err(|error| {
            Failure::internal(format!("cannot listen on {listen}: {error}; say another --listen ADDRESS:PORT"))
        })?;
        let address = listener.local_addr().map_err(|error| Failure::internal(error.to_string()))?;
        let app = App::starting(ServerSettings { artifacts, ..settings(config) });
        let served = tokio::spawn(serve(listener, app.clone(), stopped(stop)));
        Ok(Self { app, address, served, looking: JoinSet::new() })
    }

    /// The store is open: from now on the server is ready, and webhooks are delivered.
    async fn open(
        &mut self,
        client: &Client,
        config: &Config,
        bus: Option<&OnBus>,
    ) -> Result<OutboxHandle, Failure> {
        let beyond = !self.address.ip().is_loopback();
        let has_tokens = client.has_tokens().await?;
        if beyond && !has_tokens {
            return Err(Failure::usage(format!(
                "there is no token, so nobody could use a server on {}: make one with 'longhaul token create', or listen on 127.0.0.1",
                self.address
            )));
        }
        let required = config.auth.required.unwrap_or(beyond || has_tokens);
        for endpoint in &config.webhook.endpoints {
            let webhook = Webhook { url: endpoint.url.clone(), events: endpoint.events.clone() };
            client.for_tenant(&endpoint.tenant).save_endpoint(&endpoint.name, webhook).await?;
        }
        let replies = bus.map(OnBus::replies);
        let outbox =
            Outbox::start(client, OutboxSettings { replies, ..outbox_settings(config, !beyond)? }).await?;
        self.app.open(client.clone(), required);
        if !required && config.auth.required.is_none() {
            self.looking.spawn(close_with_the_first_token(self.app.clone(), client.clone()));
        }
        Ok(outbox)
    }

    async fn end(self) {
        // A panic of the server was told on stderr when it happened.
        let _ = self.served.await;
    }
}

pub(crate) fn settings(config: &Config) -> ServerSettings {
    let rate = |tenant: &crate::config::Tenant| {
        let per_second = tenant.rate?;
        let burst = tenant.burst.unwrap_or_else(|| per_second.clamp(1.0, f64::from(u32::MAX)) as u32);
        Some(Rate { per_second, burst })
    };
    ServerSettings {
        cors_origins: config.server.cors_origins.clone(),
        hosts: config.server.hosts.clone(),
        max_body: usize::try_from(config.server.max_body).unwrap_or(usize::MAX),
        max_connections: config.server.max_connections,
        request_timeout: config.server.request_timeout,
        rates: config.tenants.iter().filter_map(|(name, tenant)| Some((name.clone(), rate(tenant)?))).collect(),
        default_handler: config.server.default_handler.clone(),
        ..ServerSettings::default()
    }
}

fn outbox_settings(config: &Config, allow_loopback: bool) -> Result<OutboxSettings, Failure> {
    let wrong = |error: longhaul::task::Invalid| Failure::usage(format!("[webhook] {error}"));
    let secrets: Result<Vec<WebhookSecret>, _> =
        config.webhook.secrets.iter().map(|secret| secret.expose().parse()).collect();
    let allow: Result<Vec<IpRange>, _> = config.webhook.allow.iter().map(|range| range.parse()).collect();
    let (secrets, allow) = (secrets.map_err(wrong)?, allow.map_err(wrong)?);
    Ok(OutboxSettings { secrets, allow, allow_loopback, ..OutboxSettings::default() })
}

/// Becomes true with SIGTERM or Ctrl-C, and with the end of stdin if that is wanted; a signal after that ends the
/// process at once.
fn told_to_stop(until_eof: bool) -> Result<watch::Receiver<bool>, Failure> {
    let deaf = |error: std::io::Error| Failure::internal(format!("cannot hear signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(deaf)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(deaf)?;
    let (stop, told) = watch::channel(false);
    let eof = until_eof.then(end_of_stdin);
    tokio::spawn(async move {
        let mut hear = async || {
            tokio::select! {
                _ = terminate.recv() => 143,
                _ = interrupt.recv() => 130,
            }
        };
        tokio::select! {
            _ = hear() => {}
            () = ended(eof) => {}
        }
        notify::stopping();
        // In a file of JSON lines a sentence would be in the way.
        if std::io::stderr().is_terminal() {
            say("longhaul: stopping; once more to stop at once");
        }
        stop.send_replace(true);
        std::process::exit(hear().await);
    });
    Ok(told)
}

/// Is dropped when stdin has ended: whoever holds its other end is gone, or wants this process to be.
fn end_of_stdin() -> oneshot::Receiver<()> {
    let (alive, ended) = oneshot::channel();
    // A thread of its own: reading cannot be given up, and ends with the process.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        drop(alive);
    });
    ended
}

async fn ended(eof: Option<oneshot::Receiver<()>>) {
    match eof {
        // Never said, only dropped.
        Some(eof) => drop(eof.await),
        None => std::future::pending().await,
    }
}

/// Tells whoever started this. They may be gone: a server goes on without them.
fn say(what: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

async fn stopped(mut told: watch::Receiver<bool>) {
    // The sender lives as long as the process.
    let _ = told.wait_for(|stop| *stop).await;
}

/// Runs a worker until it is told to stop, and then lets it drain.
pub(crate) async fn run_until_told(worker: Worker) -> Result<(), Failure> {
    worker.run(stopped(told_to_stop(false)?)).await?;
    Ok(())
}

/// The manifests of the folder. None is run when one of them is wrong: a worker that has half of
/// what it should have is found out late.
fn manifests(folder: &Path) -> Result<Vec<Manifest>, Failure> {
    let loaded = load(folder);
    if loaded.problems.is_empty() {
        return Ok(loaded.manifests);
    }
    for problem in &loaded.problems {
        eprintln!("{problem}");
    }
    let problems = if loaded.problems.len() == 1 { "problem" } else { "problems" };
    Err(Failure::found(format!("{} {problems} in the manifests; nothing was started", loaded.problems.len())))
}
