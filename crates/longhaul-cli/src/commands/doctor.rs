//! `longhaul doctor`: what is configured and from where, what is reachable, what is wrong, and what to do
//! about it. Changes nothing; a store that does not exist yet is not made.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path as FilePath, PathBuf};

use longhaul::store::{StoreError, SubscriberInfo};
use longhaul::{Client, Schedule};
use longhaul_agent::Artifacts;
use longhaul_agent::manifest::nearest;
use reqwest::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};

use super::count;
use crate::args::admin::DoctorArgs;
use crate::bus::{SUBSCRIBER, bus_remedy, lock_remedy};
use crate::config::{Config, Flags, Origin, Row};
use crate::exit::Failure;
use crate::http::{Path, Server, Trouble};
use crate::out;
use crate::table::{Table, state_style};
use crate::units;

/// Less free space than this is a fault: the next transactions may not fit.
const TOO_LITTLE: u64 = 200 << 20;
/// How long the storage of artifacts, the bus and the locks may take to answer.
const PROBE: std::time::Duration = std::time::Duration::from_secs(20);
/// Less than this is worth a word.
const LITTLE: u64 = 2 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warning,
    Fault,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    message: String,
    /// What to do; nothing when all is well.
    remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, message: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, message: message.into(), remedy: None }
    }

    fn warning(name: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Warning, message: message.into(), remedy: Some(remedy.into()) }
    }

    fn fault(name: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Fault, message: message.into(), remedy: Some(remedy.into()) }
    }
}

pub(crate) async fn run(args: DoctorArgs) -> Result<(), Failure> {
    let flags = Flags::default().set("--store", "store.url", args.direct.store.as_deref());
    let mut checks = vec![Check::ok("program", concat!("longhaul ", env!("CARGO_PKG_VERSION")))];
    let rows = match Config::load(flags) {
        Ok(config) => {
            checks.extend(configuration(&config));
            checks.extend(store(&config).await);
            checks.push(artifacts(&config).await);
            checks.extend(bus(&config).await);
            checks.extend(locks(&config).await);
            checks.extend(manifests(&config));
            config.rows
        }
        Err(wrong) => {
            let faults = wrong.0.into_iter();
            checks.extend(
                faults.map(|f| Check::fault("configuration", format!("{}: {}", f.place, f.message), f.remedy)),
            );
            Vec::new()
        }
    };
    checks.extend(server(&args.remote.server).await);
    let faults = checks.iter().filter(|check| check.status == Status::Fault).count();
    if args.remote.json {
        out::line(json!({"configuration": rows, "checks": checks, "faults": faults}).to_string())?;
    } else {
        print(&rows, &checks)?;
    }
    match faults {
        0 => Ok(()),
        found => Err(Failure::found(format!("{} found", count(found, "fault")))),
    }
}

fn print(rows: &[Row], checks: &[Check]) -> Result<(), Failure> {
    if !rows.is_empty() {
        let mut table = Table::new(&["SETTING", "FROM", "VALUE"]);
        for row in rows {
            table.row([row.key.clone(), row.origin.to_string(), row.value.clone()]);
        }
        table.print()?;
        out::line("")?;
    }
    let mut table = Table::new(&["CHECK", "STATUS", "FOUND"]).paint(1, state_style);
    for check in checks {
        table.row([check.name, check.status.name(), &check.message]);
        if let Some(remedy) = &check.remedy {
            table.row(["", "", &format!("→ {remedy}")]);
        }
    }
    table.print()
}

/// What the configuration says about itself.
fn configuration(config: &Config) -> Vec<Check> {
    let mut checks = Vec::new();
    let files: Vec<String> = config.files.iter().map(|file| file.display().to_string()).collect();
    checks.push(match files.as_slice() {
        [] => Check::ok("configuration", "no longhaul.toml; 'longhaul config' prints one"),
        files => Check::ok("configuration", format!("read {}", files.join(", "))),
    });
    for (name, _) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with("LONGHAUL_")) else { continue };
        // Those of the test programs are none of ours.
        if config.variables.iter().any(|known| known == name) || name.starts_with("LONGHAUL_TEST_") {
            continue;
        }
        let near = nearest_variable(name, &config.variables);
        let remedy = near.map_or_else(
            || "remove it, or see 'longhaul config' for the variables there are".to_owned(),
            |near| format!("did you mean {near}?"),
        );
        checks.push(Check::warning("environment", format!("{name} means nothing to longhaul"), remedy));
    }
    for file in &config.files {
        let secret = matches!(config.origin("webhook.secret"), Origin::File { path, .. } if path == file);
        if secret && open_to_others(file) {
            checks.push(Check::warning(
                "configuration",
                format!("{} has a secret and can be read by everyone on this machine", file.display()),
                format!("chmod 600 {}", file.display()),
            ));
        }
    }
    checks
}

fn nearest_variable(name: &str, known: &[String]) -> Option<String> {
    // Compared as keys are, in lower case.
    let lower: Vec<String> = known.iter().map(|known| known.to_lowercase()).collect();
    nearest(name, lower.iter().map(String::as_str)).map(str::to_uppercase)
}

fn open_to_others(path: &FilePath) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

/// The store and what is in it.
async fn store(config: &Config) -> Vec<Check> {
    let mut checks = Vec::new();
    let url = &config.store.url;
    if url == "memory:" {
        checks.push(Check::warning(
            "store",
            "is in memory: everything is gone when the process ends",
            "set store.url to sqlite:PATH or postgres://…",
        ));
        checks.extend(access(config.server.listen, config.auth.required, false));
        return checks;
    }
    if let Some(path) = url.strip_prefix("sqlite:") {
        let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        checks.extend(disk(&path));
        if !path.exists() {
            checks.push(Check::ok("store", format!("{} is made at the first start", path.display())));
            checks.extend(access(config.server.listen, config.auth.required, false));
            return checks;
        }
        if open_to_others(&path) {
            checks.push(Check::warning(
                "store",
                format!("{} can be read by everyone on this machine", path.display()),
                format!("chmod 600 {}", path.display()),
            ));
        }
    }
    let inspected = match longhaul::store::inspect(url).await {
        Ok(inspected) => inspected,
        Err(error) => {
            let remedy = match error {
                StoreError::Unavailable(_) => "start it, or name another with --store",
                _ => "correct --store, LONGHAUL_STORE or store.url, or name another",
            };
            checks.push(Check::fault("store", error.to_string(), remedy));
            return checks;
        }
    };
    let what = format!("{}, schema {} (this program: {})", inspected.engine, inspected.schema, inspected.newest);
    if inspected.schema > inspected.newest + 1 {
        checks.push(Check::fault("store", what, "the store is of a newer version; use that version of longhaul"));
        return checks;
    }
    if inspected.schema < inspected.newest {
        checks.push(Check::warning(
            "store",
            what,
            "it is brought up to date at the next start of a server or worker; make a backup before",
        ));
        return checks;
    }
    checks.push(Check::ok("store", what));
    match Client::open(url).await {
        Ok(client) => match contents(config, &client).await {
            Ok(found) => checks.extend(found),
            Err(error) => checks.push(Check::fault("store", error.to_string(), "see what the store's log says")),
        },
        Err(error) => checks.push(Check::fault("store", error.to_string(), "see what the store's log says")),
    }
    checks
}

async fn contents(config: &Config, client: &Client) -> Result<Vec<Check>, longhaul::Error> {
    let mut checks = access(config.server.listen, config.auth.required, client.has_tokens().await?);
    let (workers, silent): (Vec<_>, Vec<_>) = {
        let now = client.clock().now().as_microsecond();
        client.workers().await?.into_iter().partition(|worker| !worker.is_silent(now))
    };
    let queues = client.queues().await?;
    let pending: u64 = queues.iter().map(|queue| queue.pending).sum();
    let silent = match silent.len() {
        0 => String::new(),
        lost => format!("; {} not heard of any more", count(lost, "worker")),
    };
    checks.push(match (workers.len(), pending) {
        (0, 0) => Check::ok("workers", format!("none is running, and nothing is pending{silent}")),
        (0, pending) => {
            let pending = count(usize::try_from(pending).unwrap_or(usize::MAX), "task");
            Check::fault(
                "workers",
                format!("none is running, with {pending} pending{silent}"),
                "start one: longhaul worker --manifests DIR",
            )
        }
        (many, _) => Check::ok("workers", format!("{} running{silent}", count(many, "worker"))),
    });
    for queue in &queues {
        let served = workers.iter().any(|worker| worker.queues.contains(&queue.name));
        if queue.pending > 0 && !served && !workers.is_empty() {
            checks.push(Check::fault(
                "queues",
                format!("no worker serves queue '{}', where {} are pending", queue.name, queue.pending),
                format!("start a worker with --queues {}", queue.name),
            ));
        }
        if queue.paused {
            checks.push(Check::warning(
                "queues",
                format!("queue '{}' is paused; {} wait in it", queue.name, queue.pending),
                format!("longhaul queues resume {}", queue.name),
            ));
        }
        if queue.pending >= queue.max_pending {
            checks.push(Check::warning(
                "queues",
                format!("queue '{}' is full ({} pending); submits are refused", queue.name, queue.pending),
                "add workers, or raise its max_pending",
            ));
        }
    }
    let schedules = client.schedules().await?;
    for Schedule { name, last_error, .. } in &schedules {
        if let Some(error) = last_error {
            checks.push(Check::warning(
                "schedules",
                format!("'{name}' could not submit its task: {error}"),
                format!("longhaul schedules show {name}"),
            ));
        }
    }
    checks.extend(client.subscribers().await?.iter().filter_map(|known| subscriber(known, client.clock().now())));
    let outbox = client.outbox_stats().await?;
    if outbox.dead > 0 {
        checks.push(Check::warning(
            "webhooks",
            format!("{} deliveries were given up", outbox.dead),
            "'longhaul webhooks deliveries ID' shows why, 'longhaul webhooks redeliver' sends one again",
        ));
    } else {
        checks.push(Check::ok("webhooks", format!("{} to send", outbox.due)));
    }
    Ok(checks)
}

/// A subscriber for which events are kept.
fn subscriber(known: &SubscriberInfo, now: jiff::Timestamp) -> Option<Check> {
    let name = &known.name;
    let oldest = known.oldest?;
    let behind = super::between(oldest, now);
    let bound = known.max_behind_seconds.map(std::time::Duration::from_secs);
    let rows = count(usize::try_from(known.rows_behind).unwrap_or(usize::MAX), "row");
    let what = match &known.held_by {
        Some(process) => format!("'{name}', which {process} runs, is {} behind ({rows})", units::brief(behind)),
        None => format!("'{name}' is {} behind ({rows}), and no process runs it", units::brief(behind)),
    };
    let what = match bound {
        Some(bound) if behind >= bound => format!("{what}; submits are refused"),
        Some(bound) => format!("{what}; at {} submits are refused", units::brief(bound)),
        None => what,
    };
    let remedy = match known.held_by {
        Some(_) => "see in its log what its handler, or the broker, fails at".to_owned(),
        None if name == SUBSCRIBER => format!(
            "start a process with --bus, or, if there is no broker any more: longhaul subscribers remove {name}"
        ),
        None => {
            format!("start the program that runs it, or, if there is none: longhaul subscribers remove {name}")
        }
    };
    match bound {
        Some(bound) if behind >= bound => Some(Check::fault("subscribers", what, remedy)),
        // One that runs is given its time.
        Some(bound) if known.held_by.is_some() && behind < bound / 4 => None,
        None if known.held_by.is_some() => None,
        _ => Some(Check::warning("subscribers", what, remedy)),
    }
}

/// Who may use the server that is configured.
fn access(listen: SocketAddr, required: Option<bool>, tokens: bool) -> Vec<Check> {
    let outside = !listen.ip().is_loopback();
    let make = "make a token: longhaul token create me --role admin";
    vec![match (outside, required, tokens) {
        (true, Some(false), _) => Check::fault(
            "access",
            format!("{listen} is reached from outside, but auth.required is false"),
            "remove auth.required, or listen on 127.0.0.1",
        ),
        (true, _, false) => {
            Check::fault("access", format!("{listen} is reached from outside, and there is no token"), make)
        }
        (false, Some(true), false) => Check::fault("access", "auth.required is true, and there is no token", make),
        (_, _, true) => Check::ok("access", format!("{listen}, there are tokens")),
        (false, _, false) => Check::ok("access", format!("{listen}, this machine only, without tokens")),
    }]
}

/// The space that is left where the store is.
fn disk(store: &FilePath) -> Vec<Check> {
    // The nearest folder that exists: the others are made at the first start.
    let absolute = std::path::absolute(store).unwrap_or_else(|_| store.to_owned());
    let Some(folder) = absolute.ancestors().skip(1).find(|folder| folder.is_dir()) else { return Vec::new() };
    let Ok(found) = rustix::fs::statvfs(folder) else { return Vec::new() };
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    let may_write = |path: &FilePath| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
    // SQLite makes files beside the store's, so the folder counts too.
    let mut checks = vec![space(folder, free, !may_write(folder))];
    if store.exists() && !may_write(store) {
        let remedy = format!("give it to the user that runs longhaul, or chmod u+w {}", store.display());
        checks.push(Check::fault("disk", format!("{} cannot be written to", store.display()), remedy));
    }
    checks
}

fn space(folder: &FilePath, free: u64, read_only: bool) -> Check {
    let what = format!("{} free in {}", units::show_bytes(free), folder.display());
    if read_only {
        let remedy = "put the store elsewhere, or make it writable";
        return Check::fault("disk", format!("{} cannot be written to", folder.display()), remedy);
    }
    match free {
        0..TOO_LITTLE => Check::fault("disk", what, "make room before the store cannot write any more"),
        TOO_LITTLE..LITTLE => Check::warning("disk", what, "make room, or set [retention] finished"),
        _ => Check::ok("disk", what),
    }
}

/// Whether large results can be kept.
async fn artifacts(config: &Config) -> Check {
    let name = "artifacts";
    let remedy = "set artifacts.url or LONGHAUL_ARTIFACTS to a folder or bucket that can be written to";
    let Some(url) = &config.artifacts.url else {
        return Check::warning(name, "there is no home folder to put large results into", remedy);
    };
    if url == "memory:" {
        return Check::warning(name, "are in memory: they are gone when the process ends", remedy);
    }
    let folder = FilePath::new(url.strip_prefix("file:").unwrap_or(url));
    if !url.contains("://") && !folder.exists() {
        return Check::ok(name, format!("{} is made at the first start", folder.display()));
    }
    let tried = async { Artifacts::open(url)?.probe().await };
    match tokio::time::timeout(PROBE, tried).await {
        Ok(Ok(())) => Check::ok(name, format!("{url} can be written to and read")),
        Ok(Err(error)) => Check::fault(name, error.to_string(), remedy),
        Err(_) => Check::fault(name, format!("{url} does not answer"), remedy),
    }
}

/// The broker, if one is configured.
async fn bus(config: &Config) -> Option<Check> {
    let bus = config.bus.as_ref()?;
    Some(match tokio::time::timeout(PROBE, longhaul_bus::connect(&bus.url)).await {
        Ok(Ok(bus)) => Check::ok("bus", format!("{} answers", bus.name())),
        Ok(Err(error)) => Check::fault("bus", error.to_string(), bus_remedy(&error)),
        Err(_) => {
            let what = format!("does not answer within {} s", PROBE.as_secs());
            Check::fault("bus", what, "start it, or correct bus.url")
        }
    })
}

/// The lock service, if one is configured.
async fn locks(config: &Config) -> Option<Check> {
    let url = config.locks.url.as_ref()?;
    Some(match tokio::time::timeout(PROBE, longhaul_bus::locks::connect(url)).await {
        Ok(Ok(Some(service))) => Check::ok("locks", format!("{} answers", service.name())),
        Ok(Ok(None)) => Check::ok("locks", "are kept by the store"),
        Ok(Err(error)) => Check::fault("locks", error.to_string(), lock_remedy(&error)),
        Err(_) => {
            let what = format!("do not answer within {} s", PROBE.as_secs());
            Check::fault("locks", what, "start it, or correct locks.url")
        }
    })
}

fn manifests(config: &Config) -> Vec<Check> {
    let Some(folder) = &config.worker.manifests else { return Vec::new() };
    let loaded = longhaul_agent::load(folder);
    if loaded.problems.is_empty() {
        let names: Vec<&str> = loaded.manifests.iter().map(longhaul_agent::Manifest::name).collect();
        return vec![Check::ok("manifests", format!("{}: {}", folder.display(), names.join(", ")))];
    }
    let remedy = format!("longhaul check {}", folder.display());
    let problems = count(loaded.problems.len(), "problem");
    vec![Check::fault("manifests", format!("{problems} in {}", folder.display()), remedy)]
}

/// The server that client commands would talk to.
async fn server(base: &str) -> Vec<Check> {
    let server = match Server::new(base) {
        Ok(server) => server,
        Err(failure) => {
            return vec![Check::fault(
                "server",
                failure.to_string(),
                "mend --server, LONGHAUL_SERVER or LONGHAUL_TOKEN",
            )];
        }
    };
    let base = server.base().to_owned();
    let mut checks = Vec::new();
    if server.has_token() && server.sends_in_the_open() {
        checks.push(Check::warning(
            "token",
            format!("LONGHAUL_TOKEN is sent to {base} without encryption"),
            "use https, or a tunnel",
        ));
    }
    match server.get(&Path::new(&["readyz"])).await {
        Ok(_) => {}
        Err(Trouble::Refused { status, .. }) if status == StatusCode::SERVICE_UNAVAILABLE => {
            checks.push(Check::warning(
                "server",
                format!("{base} is not ready"),
                "it starts or stops; look again in a moment",
            ));
            return checks;
        }
        Err(Trouble::Refused { status, .. }) => {
            let remedy = "is it Longhaul? check --server or LONGHAUL_SERVER";
            checks.push(Check::fault("server", format!("{base} answers {status}"), remedy));
            return checks;
        }
        Err(trouble) => {
            let why = Failure::from(trouble).to_string();
            let remedy = "start one with 'longhaul up', or set LONGHAUL_SERVER";
            // Without a server of one's own choice, having none may be meant.
            let named = std::env::var_os("LONGHAUL_SERVER").is_some() || !base.ends_with("//127.0.0.1:7171");
            checks.push(if named {
                Check::fault("server", why, remedy)
            } else {
                Check::warning("server", why, remedy)
            });
            return checks;
        }
    }
    checks.push(version(
        &base,
        server.get(&Path::new(&["openapi.json"])).await.ok().and_then(|answer| answer.json().ok()),
    ));
    match server.get(&Path::new(&["v1", "stats"])).await {
        Ok(_) => {}
        Err(Trouble::Refused { status: StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, message, .. }) => checks
            .push(Check::fault(
                "token",
                message.lines().next().unwrap_or_default(),
                "set LONGHAUL_TOKEN to a token that is good; 'longhaul token list' shows them",
            )),
        Err(trouble) => {
            checks.push(Check::fault("server", Failure::from(trouble).to_string(), "see the server's log"))
        }
    }
    checks
}

fn version(base: &str, document: Option<Value>) -> Check {
    let ours = env!("CARGO_PKG_VERSION");
    match document.as_ref().and_then(|document| document["info"]["version"].as_str()) {
        Some(theirs) if theirs != ours => Check::warning(
            "server",
            format!("{base} has version {}, this program {ours}", out::clean(theirs)),
            "use the same version on both sides",
        ),
        Some(theirs) => Check::ok("server", format!("{base} is ready, version {theirs}")),
        None => Check::ok("server", format!("{base} is ready")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_beyond_loopback_needs_tokens() {
        let status = |listen: &str, required, tokens| {
            access(listen.parse().expect("an address"), required, tokens)[0].status
        };
        assert_eq!(status("127.0.0.1:1", None, false), Status::Ok);
        assert_eq!(status("[::1]:1", None, false), Status::Ok);
        assert_eq!(status("0.0.0.0:1", None, false), Status::Fault);
        assert_eq!(status("0.0.0.0:1", None, true), Status::Ok);
        assert_eq!(status("0.0.0.0:1", Some(false), true), Status::Fault);
        assert_eq!(status("127.0.0.1:1", Some(true), false), Status::Fault);
    }

    #[test]
    fn little_space_is_told_before_it_is_too_little() {
        let status = |free| space(FilePath::new("/"), free, false).status;
        assert_eq!(
            (status(1 << 20), status(1 << 30), status(1 << 40)),
            (Status::Fault, Status::Warning, Status::Ok)
        );
        assert_eq!(space(FilePath::new("/"), 1 << 40, true).status, Status::Fault);
    }

    #[test]
    fn a_variable_that_is_spelt_wrong_is_told_with_the_one_that_was_meant() {
        let known = ["LONGHAUL_STORE".to_owned(), "LONGHAUL_LISTEN".to_owned()];
        assert_eq!(nearest_variable("LONGHAUL_STROE", &known), Some("LONGHAUL_STORE".to_owned()));
    }

    #[test]
    fn another_version_of_the_server_is_told() {
        let found = |version: &str| version_of(version).status;
        assert_eq!(found(env!("CARGO_PKG_VERSION")), Status::Ok);
        assert_eq!(found("99.0.0"), Status::Warning);
    }

    fn version_of(theirs: &str) -> Check {
        version("http://x", Some(json!({"info": {"version": theirs}})))
    }
}
