//! Queues and workers: what waits and why, who works on what, how fast it goes, and what nobody will try again.

use askama::Template;
use axum::extract::State as OfApp;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::stream::iter;
use futures_util::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use longhaul::{Client, Delivery, Filter, Schedule, State, Task, TaskId, When, Why};

use super::chart::{Latency, Throughput};
use super::page::{Frame, render};
use super::session::Visitor;
use super::show::{self, Moment, Piece};
use crate::problem::Problem;
use crate::state::App;
use crate::time::timestamp;

/// How many tasks are asked why they stand where they stand, of those that run and of those that wait.
const ASKED: usize = 20;
/// How many of those are asked at once.
const AT_ONCE: usize = 8;
/// How many failed tasks and dead deliveries are shown.
const SHOWN: usize = 20;
/// A worker that was silent for this long may be gone, microseconds.
const SILENT: i64 = 15_000_000;

struct Queue {
    name: String,
    pending: String,
    /// How full it is, of 100.
    full: u64,
    max_pending: String,
    running: String,
    max_running: String,
    oldest: Option<Moment>,
    paused: bool,
    address: String,
}

struct Worker {
    name: String,
    handlers: Vec<String>,
    queues: Vec<String>,
    running: u32,
    slots: u32,
    /// Of 100.
    busy: u32,
    started: Moment,
    seen: Moment,
    silent: bool,
}

/// A task and the sentence about it.
struct Told {
    id: TaskId,
    short: String,
    handler: String,
    why: Vec<Piece>,
    code: &'static str,
    worker: String,
    step: String,
    since: Option<Moment>,
}

impl Told {
    fn new(task: &Task, why: &Why, now: Timestamp) -> Self {
        let text = |name: &str| why.details[name].as_str().unwrap_or_default().to_owned();
        let since = why.details["since"].as_str().and_then(|since| since.parse().ok());
        Self {
            id: task.id,
            short: show::short(task.id),
            handler: task.handler.clone(),
            why: show::sentence(&why.sentence, now),
            code: why.code,
            worker: text("name"),
            step: text("step"),
            since: since.map(|since| Moment::new(since, now)),
        }
    }
}

struct Failed {
    id: TaskId,
    short: String,
    handler: String,
    code: String,
    message: String,
    at: Moment,
}

struct Dead {
    id: uuid::Uuid,
    task: TaskId,
    task_short: String,
    destination: String,
    event: String,
    url: String,
    attempts: u32,
    why: String,
    at: Moment,
}

impl Dead {
    fn new(delivery: &Delivery, now: Timestamp) -> Self {
        let status = delivery.http_status.map(|status| format!("{status} ")).unwrap_or_default();
        Self {
            id: delivery.id,
            task: delivery.task_id,
            task_short: show::short(delivery.task_id),
            destination: delivery.destination.clone(),
            event: delivery.event.clone(),
            url: delivery.url.clone(),
            attempts: delivery.attempts,
            why: show::cut(&format!("{status}{}", delivery.error.as_deref().unwrap_or_default()), 200).0,
            at: Moment::new(delivery.updated_at, now),
        }
    }
}

struct Planned {
    name: String,
    when: String,
    handler: String,
    paused: bool,
    next: Option<Moment>,
    last: Option<Moment>,
    last_task: Option<(TaskId, String)>,
    last_error: Option<String>,
}

impl Planned {
    fn new(schedule: &Schedule, now: Timestamp) -> Self {
        let when = match &schedule.when {
            When::Cron { expr, time_zone } => format!("{expr} ({time_zone})"),
            When::Every(every) => {
                format!("every {}", show::exact(jiff::SignedDuration::try_from(*every).unwrap_or_default()))
            }
        };
        Self {
            name: schedule.name.clone(),
            when,
            handler: schedule.task.handler.clone(),
            paused: schedule.paused,
            next: schedule.next_at.map(|at| Moment::new(at, now)),
            last: schedule.last_at.map(|at| Moment::new(at, now)),
            last_task: schedule.last_task.map(|id| (id, show::short(id))),
            last_error: schedule.last_error.clone(),
        }
    }
}

struct Hook {
    name: String,
    url: String,
    events: String,
}

#[derive(Template)]
#[template(path = "fleet.html")]
struct Page {
    frame: Frame,
    throughput: Throughput,
    latency: Latency,
    ended: String,
    waiting: String,
    queues: Vec<Queue>,
    workers: Vec<Worker>,
    leases: Vec<Told>,
    more_leases: bool,
    held: Vec<Told>,
    failed: Vec<Failed>,
    dead: Vec<Dead>,
    schedules: Vec<Planned>,
    hooks: Vec<Hook>,
    next: &'static str,
}

/// The page.
pub(super) async fn page(OfApp(app): OfApp<App>, visitor: Visitor) -> Result<Response, Problem> {
    let client = visitor.client();
    let of = |state, oldest_first, limit| Filter { state: Some(state), oldest_first, limit, ..Filter::default() };
    let (running, pending) = (of(State::Running, true, ASKED), of(State::Pending, true, ASKED));
    let failed = of(State::Failed, false, SHOWN);
    let (stats, running, pending, failed, dead, schedules, hooks) = tokio::try_join!(
        client.stats(),
        client.page(&running),
        client.page(&pending),
        client.page(&failed),
        client.dead_deliveries(SHOWN),
        client.schedules(),
        client.endpoints(),
    )?;
    let minutes = app.pulses().minutes(&app, client, &visitor.caller.tenant).await?;
    let now = client.clock().now();
    let leases = reasons(client, &running.tasks, now).await?;
    let mut held = reasons(client, &pending.tasks, now).await?;
    // Standing in line is no news.
    held.retain(|told| told.code != "behind");
    let counts = &stats.tasks;
    let view = Page {
        frame: Frame::new(&visitor, "Queues and workers", "fleet").await?,
        throughput: Throughput::of(&minutes),
        latency: Latency::of(&minutes),
        ended: show::number(minutes.iter().map(super::pulse::Minute::ended).sum()),
        waiting: show::number(counts.pending),
        queues: stats.queues.iter().map(|queue| shown_queue(queue, now)).collect(),
        workers: stats.workers.iter().map(|worker| shown_worker(worker, now)).collect(),
        more_leases: counts.running > leases.len() as u64,
        leases,
        held,
        failed: failed.tasks.iter().map(|task| shown_failed(task, now)).collect(),
        dead: dead.iter().map(|delivery| Dead::new(delivery, now)).collect(),
        schedules: schedules.iter().map(|schedule| Planned::new(schedule, now)).collect(),
        hooks: hooks
            .into_iter()
            .map(|hook| Hook { name: hook.name, url: hook.webhook.url, events: hook.webhook.events.join(", ") })
            .collect(),
        next: "/fleet",
    };
    Ok(render(StatusCode::OK, &view))
}

/// Why each of these stands where it stands. One that was removed meanwhile is left out.
async fn reasons(client: &Client, tasks: &[Task], now: Timestamp) -> Result<Vec<Told>, Problem> {
    let asked: Vec<_> = tasks.iter().map(|task| reason(client, task, now)).collect();
    let told: Vec<Option<Told>> = iter(asked).buffered(AT_ONCE).try_collect().await?;
    Ok(told.into_iter().flatten().collect())
}

async fn reason(client: &Client, task: &Task, now: Timestamp) -> Result<Option<Told>, Problem> {
    match client.why(task.id).await {
        Ok(why) => Ok(Some(Told::new(task, &why, now))),
        Err(longhaul::Error::NotFound(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn shown_queue(queue: &longhaul::store::QueueInfo, now: Timestamp) -> Queue {
    Queue {
        name: queue.name.clone(),
        pending: show::number(queue.pending),
        full: (queue.pending * 100).checked_div(queue.max_pending).unwrap_or(0).min(100),
        max_pending: show::number(queue.max_pending),
        running: show::number(queue.running),
        max_running: queue.max_running.map_or_else(|| "∞".to_owned(), |most| show::number(u64::from(most))),
        oldest: queue.oldest.map(|at| Moment::new(timestamp(at), now)),
        paused: queue.paused,
        address: format!("/?queue={}", show::query_value(&queue.name)),
    }
}

fn shown_worker(worker: &longhaul::store::WorkerInfo, now: Timestamp) -> Worker {
    Worker {
        name: worker.name.clone(),
        handlers: worker.handlers.clone(),
        queues: worker.queues.clone(),
        running: worker.running,
        slots: worker.slots,
        busy: (worker.running * 100).checked_div(worker.slots).unwrap_or(0).min(100),
        started: Moment::new(timestamp(worker.started_at), now),
        seen: Moment::new(timestamp(worker.seen_at), now),
        silent: now.as_microsecond() - worker.seen_at > SILENT,
    }
}

fn shown_failed(task: &Task, now: Timestamp) -> Failed {
    let (code, message) = task
        .error
        .as_ref()
        .map_or_else(Default::default, |error| (error.code.clone(), show::cut(&error.message, 200).0));
    Failed {
        id: task.id,
        short: show::short(task.id),
        handler: task.handler.clone(),
        code,
        message,
        at: Moment::new(task.finished_at.unwrap_or(task.updated_at), now),
    }
}
