//! `longhaul bench`: what this machine can do, measured the same way every time.
//!
//! Each scenario is a function that gives a [`Measured`]; what is around it (a store of its own,
//! the storage's floor beside it, the output) is here.

mod agent;
mod bus;
mod http;
mod scenarios;
mod store;

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use longhaul::Client;
use serde::Serialize;

use crate::args::{BenchArgs, Scenario};
use crate::exit::Failure;
use store::BenchStore;

/// How long the floor is measured beside a scenario.
const FLOOR_SECONDS: f64 = 1.0;

/// What a scenario found.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    tasks: usize,
    seconds: f64,
    per_second: f64,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    errors: usize,
    /// Only for `floor`.
    commits_per_second: Option<f64>,
    /// Only for `waiting` and `agent`: while everything waits.
    waiting: Option<WhileWaiting>,
    /// Only for `sse`.
    streams: Option<Streams>,
    /// Only for `bus`: how many were published.
    published: Option<usize>,
}

/// What tasks cost that only wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WhileWaiting {
    rss_mb: f64,
    cpu_percent: f64,
}

/// What readers of streams cost and were told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    per_client_kb: f64,
    events: usize,
}

/// The output; its names are relied on by others.
#[derive(Debug, Serialize)]
struct Report {
    scenario: &'static str,
    store: &'static str,
    tasks: usize,
    seconds: f64,
    per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    commits_per_second: Option<f64>,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    rss_mb: f64,
    idle_rss_mb: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kb_per_client: Option<f64>,
    errors: usize,
    floor: f64,
}

pub(crate) async fn run(args: BenchArgs) -> Result<(), Failure> {
    let store = BenchStore::make(args.store.as_deref()).await?;
    let result = measure(&args, &store).await;
    store.remove().await;
    let report = result?;
    if args.json {
        println!("{}", serde_json::json!(report));
    } else {
        print(&report);
    }
    if report.errors > 0 {
        return Err(Failure::found(format!("{} errors", report.errors)));
    }
    Ok(())
}

async fn measure(args: &BenchArgs, store: &BenchStore) -> Result<Report, Failure> {
    let client = Client::open(store.url()).await?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let idle_rss_mb = rss_mb();
    let progress = Progress::new(args.json);
    let measured = match args.scenario {
        Scenario::Floor => scenarios::floor(&client).await?,
        Scenario::Submit => scenarios::submit(&client, args, &progress).await?,
        Scenario::Drain => scenarios::drain(&client, args, &progress).await?,
        Scenario::Latency => scenarios::latency(&client, args, &progress).await?,
        Scenario::Steps => scenarios::steps(&client, args, &progress).await?,
        Scenario::Waiting => scenarios::waiting(&client, args, &progress).await?,
        Scenario::Http => http::submit(&client, args, &progress).await?,
        Scenario::Sse => http::follow(&client, store.url(), args, &progress).await?,
        Scenario::Agent => agent::turns(&client, args, &progress).await?,
        Scenario::Resume => scenarios::resume(&client, store.url(), args, &progress).await?,
        Scenario::Bus => bus::events_out(&client, args, &progress).await?,
    };
    progress.done();
    let rss_mb = measured.waiting.map_or_else(rss_mb, |waiting| waiting.rss_mb);
    let floor = match args.scenario {
        Scenario::Floor => measured.per_second,
        _ => client.floor(FLOOR_SECONDS).await?.rows_per_second,
    };
    Ok(Report {
        scenario: args.scenario.name(),
        store: store.kind(),
        tasks: measured.tasks,
        seconds: round(measured.seconds, 3),
        per_second: round(measured.per_second, 0),
        commits_per_second: measured.commits_per_second.map(|value| round(value, 0)),
        p50_ms: measured.p50_ms.map(|value| round(value, 3)),
        p99_ms: measured.p99_ms.map(|value| round(value, 3)),
        rss_mb: round(rss_mb, 1),
        idle_rss_mb: round(idle_rss_mb, 1),
        cpu_percent: measured.waiting.map(|waiting| round(waiting.cpu_percent, 2)),
        events: measured.streams.map(|streams| streams.events).or(measured.published),
        kb_per_client: measured.streams.map(|streams| round(streams.per_client_kb, 1)),
        errors: measured.errors,
        floor: round(floor, 0),
    })
}

fn print(report: &Report) {
    println!("{} on {}: {:.0}/s", report.scenario, report.store, report.per_second);
    println!("  {} tasks in {:.3} s, {} errors", report.tasks, report.seconds, report.errors);
    if let (Some(p50), Some(p99)) = (report.p50_ms, report.p99_ms) {
        println!("  p50 {p50:.3} ms, p99 {p99:.3} ms");
    }
    if let Some(commits) = report.commits_per_second {
        println!("  {commits:.0} single durable commits/s");
    }
    if let Some(cpu) = report.cpu_percent {
        println!("  {cpu:.2} % of a core while all of them wait");
    }
    if let (Some(events), Some(kb)) = (report.events, report.kb_per_client) {
        println!("  {events} events told, {kb:.1} KB of the server's memory per client that waits");
    }
    println!("  floor of the storage: {:.0} rows/s", report.floor);
    println!("  memory: {:.1} MB, {:.1} MB idle before", report.rss_mb, report.idle_rss_mb);
}

/// A bar on a terminal, nothing otherwise.
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(json: bool) -> Self {
        let bar = if json { ProgressBar::hidden() } else { ProgressBar::new(0) };
        // The template is a constant that parses.
        if let Ok(style) = ProgressStyle::with_template("{msg:20} {wide_bar} {pos}/{len} {per_sec} {eta}") {
            bar.set_style(style);
        }
        Self { bar }
    }

    fn phase(&self, name: &'static str, total: usize) {
        self.bar.reset();
        self.bar.set_length(total as u64);
        self.bar.set_message(name);
    }

    fn at(&self, position: usize) {
        self.bar.set_position(position as u64);
    }

    fn done(&self) {
        self.bar.finish_and_clear();
    }
}

/// The memory this process holds.
fn rss_mb() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: f64 = statm.split_whitespace().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0.0);
    pages * rustix::param::page_size() as f64 / 1e6
}

fn round(value: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (value * factor).round() / factor
}
