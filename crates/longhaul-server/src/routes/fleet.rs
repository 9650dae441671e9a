//! Handlers, queues, workers, and numbers over all of them.

use axum::http::StatusCode;
use axum::response::Response;
use longhaul::store::{QueueInfo, WorkerInfo};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::{Admin, Viewer};
use crate::body::Segment;
use crate::problem::Problem;
use crate::schema;
use crate::state::App;
use crate::time::timestamp;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(handlers))
        .routes(routes!(queues))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(workers))
        .routes(routes!(stats))
}

/// The handlers that workers have registered.
#[utoipa::path(get, path = "/v1/handlers", tag = "fleet",
    responses((status = 200, description = "By name", body = schema::Handlers)))]
async fn handlers(Viewer(caller): Viewer) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"handlers": caller.client.handlers().await?})))
}

#[derive(Serialize, ToSchema)]
struct Queues {
    queues: Vec<Queue>,
}

#[derive(Serialize, ToSchema)]
struct Queue {
    name: String,
    /// Tasks that wait to be run, now or later.
    pending: u64,
    running: u64,
    max_pending: u64,
    #[schema(required)]
    max_running: Option<u32>,
    paused: bool,
    /// When the ready task at the head of the line was accepted.
    #[schema(required, format = "date-time")]
    oldest: Option<String>,
}

impl From<QueueInfo> for Queue {
    fn from(queue: QueueInfo) -> Self {
        Self {
            name: queue.name,
            pending: queue.pending,
            running: queue.running,
            max_pending: queue.max_pending,
            max_running: queue.max_running,
            paused: queue.paused,
            oldest: queue.oldest.map(|at| timestamp(at).to_string()),
        }
    }
}

/// All queues. They belong to all tenants; so do their numbers.
#[utoipa::path(get, path = "/v1/queues", tag = "fleet", responses((status = 200, description = "By name", body = Queues)))]
async fn queues(Viewer(caller): Viewer) -> Result<Response, Problem> {
    let queues = caller.client.queues().await?.into_iter().map(Queue::from).collect();
    Ok(json_answer(StatusCode::OK, &Queues { queues }))
}

#[derive(Serialize, ToSchema)]
struct PausedQueue {
    name: String,
    paused: bool,
}

/// Stops taking tasks from a queue; what runs goes on, and submits are still accepted.
#[utoipa::path(post, path = "/v1/queues/{queue}/pause", tag = "fleet", params(("queue" = String, Path, description = "The queue's name")),
    responses((status = 200, description = "It is paused", body = PausedQueue)))]
async fn pause(Admin(caller): Admin, Segment(queue): Segment) -> Result<Response, Problem> {
    caller.client.pause_queue(&queue, true).await?;
    Ok(json_answer(StatusCode::OK, &PausedQueue { name: queue, paused: true }))
}

/// Takes tasks from a queue again.
#[utoipa::path(post, path = "/v1/queues/{queue}/resume", tag = "fleet", params(("queue" = String, Path, description = "The queue's name")),
    responses((status = 200, description = "It goes on", body = PausedQueue)))]
async fn resume(Admin(caller): Admin, Segment(queue): Segment) -> Result<Response, Problem> {
    caller.client.pause_queue(&queue, false).await?;
    Ok(json_answer(StatusCode::OK, &PausedQueue { name: queue, paused: false }))
}

#[derive(Serialize, ToSchema)]
struct Workers {
    workers: Vec<Worker>,
}

#[derive(Serialize, ToSchema)]
struct Worker {
    #[schema(value_type = String, format = "uuid")]
    id: uuid::Uuid,
    /// Host and process.
    name: String,
    handlers: Vec<String>,
    queues: Vec<String>,
    /// How many tasks it runs at once.
    slots: u32,
    running: u32,
    #[schema(format = "date-time")]
    started_at: String,
    #[schema(format = "date-time")]
    seen_at: String,
}

impl From<WorkerInfo> for Worker {
    fn from(worker: WorkerInfo) -> Self {
        Self {
            id: worker.id,
            name: worker.name,
            handlers: worker.handlers,
            queues: worker.queues,
            slots: worker.slots,
            running: worker.running,
            started_at: timestamp(worker.started_at).to_string(),
            seen_at: timestamp(worker.seen_at).to_string(),
        }
    }
}

/// The workers that live.
#[utoipa::path(get, path = "/v1/workers", tag = "fleet",
    responses((status = 200, description = "All of them", body = Workers)))]
async fn workers(Viewer(caller): Viewer) -> Result<Response, Problem> {
    let workers = caller.client.workers().await?.into_iter().map(Worker::from).collect();
    Ok(json_answer(StatusCode::OK, &Workers { workers }))
}

#[derive(Serialize, ToSchema)]
struct Stats {
    tasks: Counts,
    queues: Vec<Queue>,
    workers: Vec<Worker>,
    /// When the task was accepted that is ready for the longest time.
    #[schema(required, format = "date-time")]
    oldest_ready: Option<String>,
}

/// Exact below 10,000 tasks; beyond that, `bounded` says that numbers other than `running` are "at least".
#[derive(Serialize, ToSchema)]
struct Counts {
    pending: u64,
    running: u64,
    waiting: u64,
    completed: u64,
    failed: u64,
    cancelled: u64,
    bounded: bool,
}

/// How many tasks are in which state, and what the queues and workers do.
#[utoipa::path(get, path = "/v1/stats", tag = "fleet",
    responses((status = 200, description = "The numbers", body = Stats)))]
async fn stats(Viewer(caller): Viewer) -> Result<Response, Problem> {
    let stats = caller.client.stats().await?;
    let tasks = stats.tasks;
    let tasks = Counts {
        pending: tasks.pending,
        running: tasks.running,
        waiting: tasks.waiting,
        completed: tasks.completed,
        failed: tasks.failed,
        cancelled: tasks.cancelled,
        bounded: tasks.bounded,
    };
    let stats = Stats {
        tasks,
        queues: stats.queues.into_iter().map(Queue::from).collect(),
        workers: stats.workers.into_iter().map(Worker::from).collect(),
        oldest_ready: stats.oldest_ready.map(|at| at.to_string()),
    };
    Ok(json_answer(StatusCode::OK, &stats))
}
