//! The configuration: flag, then environment, then `longhaul.toml`, then default.
//!
//! [`Config::load`] gives every value typed, or all that is wrong at once. Two files are looked into:
//! the one of the working directory first, then the one of the user's configuration folder; with
//! `LONGHAUL_CONFIG` only the one that names. A key that does not exist is an error: one that is
//! spelt wrong would otherwise be a setting that is silently not in force. Relative paths in a file
//! are relative to its folder.
//!
//! Client commands do not read it: a server named by a file of the working directory would be
//! sent the token of the environment.
#![allow(dead_code, reason = "what a server is configured with is read where it starts")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use longhaul::{QueueSettings, Settings};

mod source;
mod value;

pub(crate) use source::{Environment, Fault, Flags, Origin, Row, variable};
pub(crate) use value::{Endpoint, EventForm, LogForm, Secret};

use source::Sources;
use value::{Address, Bytes, ServiceUrl};

use crate::exit::Failure;

/// All keys with their defaults, commented; printed by `longhaul config`.
pub(crate) const DEFAULT_FILE: &str = include_str!("config/default.toml");

/// The name of the file.
const FILE: &str = "longhaul.toml";

/// What is configured.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) server: Server,
    pub(crate) store: Store,
    pub(crate) artifacts: Artifacts,
    pub(crate) worker: Worker,
    pub(crate) queues: BTreeMap<String, Queue>,
    /// `[limit.KEY] max_running`, by concurrency key.
    pub(crate) limits: BTreeMap<String, u32>,
    pub(crate) webhook: Webhook,
    pub(crate) bus: Option<Bus>,
    pub(crate) locks: Locks,
    pub(crate) retention: Retention,
    pub(crate) tenants: BTreeMap<String, Tenant>,
    pub(crate) auth: Auth,
    pub(crate) telemetry: Telemetry,
    /// The files that were read, in the order in which they count.
    pub(crate) files: Vec<PathBuf>,
    /// Every value, as it may be shown, and where it came from.
    pub(crate) rows: Vec<Row>,
    /// The variables of the environment that mean something here.
    pub(crate) variables: Vec<String>,
}

/// `[server]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Server {
    pub(crate) listen: SocketAddr,
    /// Web pages that may use the server from a browser.
    pub(crate) cors_origins: Vec<String>,
    /// The largest request body, in bytes.
    pub(crate) max_body: u64,
    pub(crate) max_connections: usize,
    pub(crate) request_timeout: Duration,
    /// Further names that a server without authentication may be called by.
    pub(crate) hosts: Vec<String>,
    /// What runs a task that names no handler.
    pub(crate) default_handler: Option<String>,
}

/// `[store]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Store {
    pub(crate) url: String,
}

/// `[artifacts]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Artifacts {
    /// `None` without a home folder to put them into.
    pub(crate) url: Option<String>,
}

/// `[worker]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Worker {
    pub(crate) slots: usize,
    pub(crate) queues: Vec<String>,
    pub(crate) manifests: Option<PathBuf>,
    /// The model of the agent that is there without manifests.
    pub(crate) model: Option<String>,
    pub(crate) lease: Duration,
    pub(crate) drain: Duration,
}

/// `[queue.NAME]`; what is not set is as for every queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Queue {
    pub(crate) max_pending: Option<u64>,
    pub(crate) max_running: Option<u32>,
    pub(crate) ageing: Option<Duration>,
}

/// `[webhook]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Webhook {
    /// Ranges of private addresses that may be called.
    pub(crate) allow: Vec<String>,
    pub(crate) endpoints: Vec<Endpoint>,
    /// The first signs; the others are sent too while secrets rotate. Empty: the store has one.
    pub(crate) secrets: Vec<Secret>,
}

/// `[bus]`, when it names a broker
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bus {
    pub(crate) url: String,
    /// The topic of events.
    pub(crate) events: String,
    /// Which events.
    pub(crate) types: Vec<String>,
    pub(crate) form: EventForm,
    /// The topic whose messages are submits; none are taken in without.
    pub(crate) tasks: Option<String>,
    /// Whose tasks those are.
    pub(crate) tenant: String,
    /// Where results may be sent; the bus' own choice when empty.
    pub(crate) replies: Vec<String>,
    /// How long a message of `tasks` may stay unsettled before another process gets it.
    pub(crate) ack_wait: Duration,
    /// How old events may become that the broker does not take, before submits are refused.
    pub(crate) max_behind: Duration,
    /// All processes on the store have the bus, so PostgreSQL need not pass hints on.
    pub(crate) replaces_notify: bool,
}

/// `[locks]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Locks {
    /// `None`: as the store has it.
    pub(crate) url: Option<String>,
}

/// `[retention]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Retention {
    /// How long finished tasks are kept; `None` leaves it as the store has it.
    pub(crate) finished: Option<Duration>,
}

/// `[tenant.NAME]`
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tenant {
    pub(crate) max_running: Option<u32>,
    /// Requests per second.
    pub(crate) rate: Option<f64>,
    /// Requests at once.
    pub(crate) burst: Option<u32>,
}

/// `[auth]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Auth {
    /// `None`: exactly when the server listens beyond loopback, or there are tokens.
    pub(crate) required: Option<bool>,
}

/// `[telemetry]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Telemetry {
    pub(crate) log: LogForm,
    /// A level, or a filter like `info,longhaul=debug`.
    pub(crate) level: String,
    pub(crate) otlp_endpoint: Option<String>,
    pub(crate) service_name: String,
}

/// Everything that is wrong with the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Wrong(pub(crate) Vec<Fault>);

impl From<Wrong> for Failure {
    fn from(wrong: Wrong) -> Self {
        let faults: Vec<String> = wrong.0.iter().map(ToString::to_string).collect();
        Self::usage(format!("the configuration is wrong\n{}", faults.join("\n")))
    }
}

impl Config {
    /// What holds for this process.
    pub(crate) fn load(flags: Flags) -> Result<Self, Wrong> {
        Self::load_in(flags, &|name| std::env::var_os(name), Path::new("."))
    }

    /// The same, with an environment and a working directory that are given.
    pub(crate) fn load_in(
        flags: Flags,
        environment: Environment<'_>,
        working_directory: &Path,
    ) -> Result<Self, Wrong> {
        let mut sources = Sources::new(flags, environment);
        let files = read_files(&mut sources, environment, working_directory);
        let mut config = Self::take(&mut sources, environment);
        sources.finish();
        if !sources.faults.is_empty() {
            return Err(Wrong(sources.faults));
        }
        config.files = files;
        config.variables = sources.variables.into_iter().chain(OTHER_VARIABLES.map(str::to_owned)).collect();
        config.rows = sources.rows;
        Ok(config)
    }

    fn take(s: &mut Sources<'_>, environment: Environment<'_>) -> Self {
        let (server, store) = (server(s), store(s, environment));
        Self {
            server,
            artifacts: artifacts(s, &store.url, environment),
            store,
            worker: worker(s),
            queues: queues(s),
            limits: limits(s),
            webhook: webhook(s),
            bus: bus(s),
            locks: locks(s),
            retention: Retention { finished: s.get(&["retention", "finished"], &["LONGHAUL_RETENTION"], None) },
            tenants: tenants(s),
            auth: Auth { required: s.get(&["auth", "required"], &["LONGHAUL_AUTH_REQUIRED"], None) },
            telemetry: telemetry(s),
            files: Vec::new(),
            rows: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// What the store is told: queues, limits and retention. What is not configured stays as it is there.
    pub(crate) fn settings(&self) -> Settings {
        let queues = self.queues.iter().map(|(name, queue)| {
            let default = QueueSettings::default();
            let settings = QueueSettings {
                max_pending: queue.max_pending.unwrap_or(default.max_pending),
                max_running: queue.max_running,
                ageing: queue.ageing.unwrap_or(default.ageing),
            };
            (name.clone(), settings)
        });
        let tenants = self.tenants.iter().filter_map(|(name, tenant)| Some((name.clone(), tenant.max_running?)));
        Settings {
            queues: queues.collect(),
            tenant_max_running: tenants.collect(),
            key_max_running: self.limits.clone(),
            retention: self.retention.finished,
        }
    }

    /// Where a value came from, by its key: `server.listen`.
    pub(crate) fn origin(&self, key: &str) -> &Origin {
        self.rows.iter().find(|row| row.key == key).map_or(&Origin::Default, |row| &row.origin)
    }
}

/// Variables that are read elsewhere.
const OTHER_VARIABLES: [&str; 4] = ["LONGHAUL_CONFIG", "LONGHAUL_SERVER", "LONGHAUL_TOKEN", "LONGHAUL_TOKEN_FILE"];

fn read_files(s: &mut Sources<'_>, environment: Environment<'_>, working_directory: &Path) -> Vec<PathBuf> {
    let set = |name: &str| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = set("LONGHAUL_CONFIG") {
        return if s.read(&path, true) { vec![path] } else { Vec::new() };
    }
    let mut files = Vec::new();
    let here =
        if working_directory == Path::new(".") { PathBuf::from(FILE) } else { working_directory.join(FILE) };
    let home = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    for path in [Some(here), home.map(|home| home.join("longhaul").join(FILE))].into_iter().flatten() {
        // The working directory may be the configuration folder.
        let real = std::fs::canonicalize(&path).ok();
        let known =
            files.iter().any(|known: &PathBuf| real.is_some() && std::fs::canonicalize(known).ok() == real);
        if !known && s.read(&path, false) {
            files.push(path);
        }
    }
    files
}

fn server(s: &mut Sources<'_>) -> Server {
    let listen = s.get(&["server", "listen"], &["LONGHAUL_LISTEN"], SocketAddr::from(([127, 0, 0, 1], 7171)));
    let cors_origins: Vec<String> = s.get(&["server", "cors_origins"], &["LONGHAUL_CORS_ORIGINS"], Vec::new());
    if let Some(bad) = cors_origins.iter().find(|origin| !is_origin(origin)) {
        s.refuse(
            format!("has '{bad}', which is not an origin"),
            "write scheme and host only, like \"https://app.example.com\", or \"*\"",
        );
    }
    let Bytes(max_body) = s.get(&["server", "max_body"], &["LONGHAUL_MAX_BODY"], Bytes(5 << 20));
    at_least_one(s, max_body);
    let max_connections: u32 = s.get(&["server", "max_connections"], &["LONGHAUL_MAX_CONNECTIONS"], 10_000);
    at_least_one(s, max_connections);
    let request_timeout =
        s.get(&["server", "request_timeout"], &["LONGHAUL_REQUEST_TIMEOUT"], Duration::from_secs(30));
    more_than_nothing(s, request_timeout);
    let hosts = s.get(&["server", "hosts"], &["LONGHAUL_HOSTS"], Vec::new());
    let default_handler = s.get(&["server", "default_handler"], &["LONGHAUL_DEFAULT_HANDLER"], None);
    let max_connections = max_connections as usize;
    Server { listen, cors_origins, max_body, max_connections, request_timeout, hosts, default_handler }
}

fn is_http(url: &str) -> bool {
    reqwest::Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

fn is_origin(text: &str) -> bool {
    text == "*" || (is_http(text) && text.matches('/').count() == 2)
}

fn at_least_one(s: &mut Sources<'_>, number: impl Into<u64>) {
    if number.into() == 0 {
        s.refuse("is 0", "write a number from 1 on");
    }
}

fn more_than_nothing(s: &mut Sources<'_>, time: Duration) {
    if time.is_zero() {
        s.refuse("is 0", "write a time that is more than nothing");
    }
}

fn store(s: &mut Sources<'_>, environment: Environment<'_>) -> Store {
    let default = default_store(environment);
    let Address(mut url) =
        s.get(&["store", "url"], &["LONGHAUL_STORE"], Address(default.clone().unwrap_or_default()));
    if url.is_empty() && default.is_none() {
        s.refuse(
            "has no default, because there is no home folder",
            "say --store sqlite:PATH or set LONGHAUL_STORE",
        );
    } else if url != "memory:"
        && !["sqlite:", "postgres://", "postgresql://"].iter().any(|start| url.starts_with(start))
    {
        s.refuse("is not a store", "write sqlite:PATH, postgres://USER@HOST/DATABASE or memory:");
    }
    if let (Origin::File { path: file, .. }, Some(path)) = (s.origin(), url.strip_prefix("sqlite:")) {
        let path = path.strip_prefix("//").unwrap_or(path);
        url = format!("sqlite:{}", beside(file, Path::new(path)).display());
    }
    Store { url }
}

/// A file in the user's data folder.
fn default_store(environment: Environment<'_>) -> Option<String> {
    Some(format!("sqlite:{}", data_folder(environment)?.join("longhaul.db").display()))
}

fn data_folder(environment: Environment<'_>) -> Option<PathBuf> {
    let set = |name: &str| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")))?;
    Some(data.join("longhaul"))
}

fn artifacts(s: &mut Sources<'_>, store: &str, environment: Environment<'_>) -> Artifacts {
    let default = default_artifacts(store, environment);
    let mut url: Option<String> = s.get(&["artifacts", "url"], &["LONGHAUL_ARTIFACTS"], default);
    if let (Origin::File { path: file, .. }, Some(written)) = (s.origin(), &url)
        && written != "memory:"
        && !written.contains("://")
    {
        let folder = written.strip_prefix("file:").unwrap_or(written);
        url = Some(beside(file, Path::new(folder)).display().to_string());
    }
    Artifacts { url }
}

/// With the store: beside its file, or gone with it. A server's store is elsewhere; then in the user's data folder.
fn default_artifacts(store: &str, environment: Environment<'_>) -> Option<String> {
    if store == "memory:" {
        return Some(store.to_owned());
    }
    let folder = match store.strip_prefix("sqlite:") {
        Some(path) => Path::new(path.strip_prefix("//").unwrap_or(path)).with_file_name("artifacts"),
        None => data_folder(environment)?.join("artifacts"),
    };
    Some(folder.display().to_string())
}

/// A path that stands in a file is relative to it.
fn beside(file: &Path, path: &Path) -> PathBuf {
    file.parent().map_or_else(|| path.to_owned(), |folder| folder.join(path))
}

fn worker(s: &mut Sources<'_>) -> Worker {
    let slots: u32 = s.get(&["worker", "slots"], &["LONGHAUL_WORKERS"], 16);
    let queues: Vec<String> = s.get(&["worker", "queues"], &["LONGHAUL_QUEUES"], vec!["default".to_owned()]);
    if queues.is_empty() {
        s.refuse("is empty", "name at least one queue, like [\"default\"]");
    }
    let manifests: Option<PathBuf> = s.get(&["worker", "manifests"], &["LONGHAUL_MANIFESTS"], None);
    let manifests = manifests.map(|folder| match s.origin() {
        Origin::File { path, .. } => beside(path, &folder),
        _ => folder,
    });
    let lease = s.get(&["worker", "lease"], &["LONGHAUL_LEASE"], Duration::from_secs(15));
    more_than_nothing(s, lease);
    let drain = s.get(&["worker", "drain"], &["LONGHAUL_DRAIN"], Duration::from_secs(30));
    let model = s.get(&["worker", "model"], &["LONGHAUL_MODEL"], None);
    Worker { slots: slots as usize, queues, manifests, model, lease, drain }
}

fn queues(s: &mut Sources<'_>) -> BTreeMap<String, Queue> {
    let names = s.names("queue");
    let read = |name: String| {
        let max_pending: Option<u64> = s.get(&["queue", &name, "max_pending"], &[], None);
        at_least_one(s, max_pending.unwrap_or(1));
        let max_running: Option<u32> = s.get(&["queue", &name, "max_running"], &[], None);
        at_least_one(s, max_running.unwrap_or(1));
        let ageing = s.get(&["queue", &name, "ageing"], &[], None);
        (name, Queue { max_pending, max_running, ageing })
    };
    let queues: BTreeMap<_, _> = names.into_iter().map(read).collect();
    s.know(&["queue.*.max_pending", "queue.*.max_running", "queue.*.ageing"]);
    queues
}

fn limits(s: &mut Sources<'_>) -> BTreeMap<String, u32> {
    let mut limits = BTreeMap::new();
    for key in s.names("limit") {
        let max_running: Option<u32> = s.get(&["limit", &key, "max_running"], &[], None);
        at_least_one(s, max_running.unwrap_or(1));
        limits.extend(max_running.map(|max| (key, max)));
    }
    s.know(&["limit.*.max_running"]);
    limits
}

fn webhook(s: &mut Sources<'_>) -> Webhook {
    let allow = s.get(&["webhook", "allow"], &["LONGHAUL_WEBHOOK_ALLOW"], Vec::new());
    let endpoints: Vec<Endpoint> = s.get(&["webhook", "endpoints"], &[], Vec::new());
    if let Some(bad) = endpoints.iter().find(|endpoint| !is_http(&endpoint.url)) {
        s.refuse(
            format!("has '{}', whose url is not one", bad.name),
            "write it like \"https://example.com/hook\"",
        );
    }
    let mut names: Vec<(&str, &str)> = endpoints.iter().map(|e| (e.tenant.as_str(), e.name.as_str())).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        s.refuse(format!("has two endpoints named '{}'", twice[0].1), "give one of them another name");
    }
    let secrets = s.get(&["webhook", "secret"], &["LONGHAUL_WEBHOOK_SECRET"], Vec::new());
    Webhook { allow, endpoints, secrets }
}

/// Brokers throw members of a group out that are silent for less.
const SHORTEST_ACK_WAIT: Duration = Duration::from_secs(10);

fn bus(s: &mut Sources<'_>) -> Option<Bus> {
    let url: Option<ServiceUrl> = s.get(&["bus", "url"], &["LONGHAUL_BUS"], None);
    let events = s.get(&["bus", "events"], &[], "longhaul.events".to_owned());
    let types = s.get(&["bus", "types"], &[], vec!["*".to_owned()]);
    let form = s.get(&["bus", "form"], &[], EventForm::Structured);
    let tasks = s.get(&["bus", "tasks"], &["LONGHAUL_BUS_TASKS"], None);
    let tenant = s.get(&["bus", "tenant"], &[], "default".to_owned());
    let replies = s.get(&["bus", "replies"], &[], Vec::new());
    let ack_wait = s.get(&["bus", "ack_wait"], &[], Duration::from_secs(60));
    if ack_wait < SHORTEST_ACK_WAIT {
        s.refuse("is too short", "write at least \"10s\": what takes longer would be taken in twice at once");
    }
    let max_behind = s.get(&["bus", "max_behind"], &[], Duration::from_secs(3 * 24 * 60 * 60));
    more_than_nothing(s, max_behind);
    let replaces_notify = s.get(&["bus", "replaces_notify"], &[], false);
    let ServiceUrl(url) = url?;
    Some(Bus { url, events, types, form, tasks, tenant, replies, ack_wait, max_behind, replaces_notify })
}

fn locks(s: &mut Sources<'_>) -> Locks {
    let url: Option<ServiceUrl> = s.get(&["locks", "url"], &["LONGHAUL_LOCKS"], None);
    Locks { url: url.map(|ServiceUrl(url)| url) }
}

fn tenants(s: &mut Sources<'_>) -> BTreeMap<String, Tenant> {
    let names = s.names("tenant");
    let read = |name: String| {
        let max_running: Option<u32> = s.get(&["tenant", &name, "max_running"], &[], None);
        at_least_one(s, max_running.unwrap_or(1));
        let rate = s.get(&["tenant", &name, "rate"], &[], None);
        let burst: Option<u32> = s.get(&["tenant", &name, "burst"], &[], None);
        at_least_one(s, burst.unwrap_or(1));
        (name, Tenant { max_running, rate, burst })
    };
    let tenants = names.into_iter().map(read).collect();
    s.know(&["tenant.*.max_running", "tenant.*.rate", "tenant.*.burst"]);
    tenants
}

fn telemetry(s: &mut Sources<'_>) -> Telemetry {
    let log = s.get(&["telemetry", "log"], &["LONGHAUL_LOG_FORMAT"], LogForm::Human);
    let level: String = s.get(&["telemetry", "level"], &["LONGHAUL_LOG"], "warn".to_owned());
    if level.parse::<tracing_subscriber::EnvFilter>().is_err() {
        s.refuse(
            format!("is '{level}', which is no level"),
            "write error, warn, info, debug or trace, or a filter like \"info,longhaul=debug\"",
        );
    }
    let variables = ["LONGHAUL_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    let otlp_endpoint: Option<String> = s.get(&["telemetry", "otlp_endpoint"], &variables, None);
    if otlp_endpoint.as_deref().is_some_and(|url| !is_http(url)) {
        s.refuse("is not a URL", "write it like \"http://127.0.0.1:4318\"");
    }
    let variables = ["LONGHAUL_SERVICE_NAME", "OTEL_SERVICE_NAME"];
    let service_name = s.get(&["telemetry", "service_name"], &variables, "longhaul".to_owned());
    Telemetry { log, level, otlp_endpoint, service_name }
}

#[cfg(test)]
mod tests;
