//! Submitting, reading, listing, waiting for and deleting tasks.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use longhaul::request::{NoHandler, Submit, only_handler};
use longhaul::{Client, Error, Filter, NewTask, State, Task, TaskId};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::{Operator, Submitter, Viewer};
use crate::body::{Json, OfTask, Params};
use crate::problem::Problem;
use crate::request::RequestContext;
use crate::schema;
use crate::state::App;
use crate::time::span;

/// How long `wait` waits at most, so that proxies do not cut it off.
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// How many tasks one batch may have.
const MAX_BATCH: usize = 1_000;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(submit, list))
        .routes(routes!(submit_batch))
        .routes(routes!(show, delete))
        .routes(routes!(wait))
        .routes(routes!(export))
}

/// Submits it. When this returns, the task is on disk, or is the one accepted before.
pub(crate) async fn accept(
    submit: Submit,
    app: &App,
    client: &Client,
    traceparent: Option<String>,
) -> Result<Task, Problem> {
    let mut task = new_task(submit, app, client).await?;
    task.traceparent = traceparent;
    let asked = task.clone();
    let accepted = client.submit(task).await?;
    app.metrics().submitted(1);
    if accepted.new { Ok(Task::accepted(asked, &accepted)) } else { Ok(client.task(accepted.id).await?) }
}

/// The task that is asked for.
pub(super) async fn new_task(submit: Submit, app: &App, client: &Client) -> Result<NewTask, Problem> {
    submit.into_task(async || default_handler(app, client).await).await
}

async fn default_handler(app: &App, client: &Client) -> Result<String, Problem> {
    if let Some(handler) = &app.settings().default_handler {
        return Ok(handler.clone());
    }
    only_handler(client).await.map_err(|none| match none {
        NoHandler::Nobody => Problem::new("unknown_handler", none.to_string()),
        NoHandler::Several => Problem::field("handler", none),
        NoHandler::Client(error) => error.into(),
    })
}

/// Submits a task. When this is answered, the task is on disk.
#[utoipa::path(post, path = "/v1/tasks", tag = "tasks", request_body = Submit,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key and body is the same task")),
    responses((status = 202, description = "Accepted, or the task accepted before", body = schema::Task,
               headers(("Location" = String, description = "The task's path")))))]
async fn submit(
    app: axum::extract::State<App>,
    Submitter(caller): Submitter,
    context: RequestContext,
    headers: HeaderMap,
    Json(body): Json<Submit>,
) -> Result<Response, Problem> {
    let mut body = body;
    if let Some(key) = idempotency_key(&headers)? {
        if body.key.as_ref().is_some_and(|other| *other != key) {
            return Err(Problem::field(
                "key",
                "is another one than in the header Idempotency-Key; give one of them",
            ));
        }
        body.key = Some(key);
    }
    let task = accept(body, &app, &caller.client, Some(context.traceparent)).await?;
    let mut response = json_answer(StatusCode::ACCEPTED, &task);
    if let Ok(location) = HeaderValue::from_str(&format!("/v1/tasks/{}", task.id)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut keys = headers.get_all("idempotency-key").into_iter();
    let Some(key) = keys.next() else { return Ok(None) };
    if keys.next().is_some() {
        return Err(Problem::parameter("Idempotency-Key", "is there twice; give one"));
    }
    let key = key.to_str().map_err(|_| Problem::parameter("Idempotency-Key", "must be printable ASCII"))?;
    if key.is_empty() || key.len() > 255 {
        return Err(Problem::parameter("Idempotency-Key", "must have 1 to 255 characters"));
    }
    Ok(Some(key.to_owned()))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SubmitBatch {
    /// Up to 1,000.
    #[schema(max_items = 1000)]
    #[schema(value_type = Vec<Submit>)]
    tasks: Vec<Box<RawValue>>,
}

/// Submits many tasks, each on its own: one that is refused does not hurt the others.
#[utoipa::path(post, path = "/v1/tasks:batch", tag = "tasks", request_body = SubmitBatch,
    responses((status = 200, description = "What became of each", body = schema::BatchAnswer)))]
async fn submit_batch(
    app: axum::extract::State<App>,
    Submitter(caller): Submitter,
    context: RequestContext,
    Json(body): Json<SubmitBatch>,
) -> Result<Response, Problem> {
    if body.tasks.len() > MAX_BATCH {
        return Err(Problem::field(
            "tasks",
            format!("has {} entries; at most {MAX_BATCH} are taken", body.tasks.len()),
        ));
    }
    let mut asked = Vec::with_capacity(body.tasks.len());
    for entry in body.tasks {
        asked.push(batch_task(&app, &caller.client, &context, &entry).await);
    }
    let tasks: Vec<NewTask> = asked.iter().filter_map(|task| task.as_ref().ok().cloned()).collect();
    let mut answers = caller.client.submit_many(tasks).await?.into_iter();
    let mut results = Vec::with_capacity(asked.len());
    let mut accepted_count = 0;
    for task in asked {
        let answer = match task {
            Err(problem) => Err(problem),
            Ok(task) => match answers.next() {
                Some(Ok(accepted)) if accepted.new => Ok(Task::accepted(task, &accepted)),
                Some(Ok(accepted)) => caller.client.task(accepted.id).await.map_err(Problem::from),
                Some(Err(error)) => Err(error.into()),
                None => Err(Problem::new("internal", "the store gave no answer")),
            },
        };
        accepted_count += u64::from(answer.is_ok());
        results.push(match answer {
            Ok(task) => BatchResult { status: 202, task: Some(task), error: None },
            Err(problem) => {
                BatchResult { status: problem.status().as_u16(), task: None, error: Some(problem.to_json()) }
            }
        });
    }
    app.metrics().submitted(accepted_count);
    Ok(json_answer(StatusCode::OK, &BTreeMap::from([("results", results)])))
}

/// An entry is read on its own, so that one that is wrong does not hurt the others.
async fn batch_task(
    app: &App,
    client: &Client,
    context: &RequestContext,
    entry: &RawValue,
) -> Result<NewTask, Problem> {
    let submit: Submit = crate::body::parse(entry.get().as_bytes())?;
    let mut task = new_task(submit, app, client).await?;
    task.traceparent = Some(context.traceparent.clone());
    Ok(task)
}

/// A task as it stands.
#[utoipa::path(get, path = "/v1/tasks/{id}", tag = "tasks", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "The task", body = schema::Task)))]
async fn show(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &caller.client.task(id).await?))
}

/// Removes a task that has ended, with everything that is kept of it.
#[utoipa::path(delete, path = "/v1/tasks/{id}", tag = "tasks", params(("id" = String, Path, description = "The task's id")),
    responses((status = 204, description = "It is gone")))]
async fn delete(Operator(caller): Operator, OfTask(id, ()): OfTask) -> Result<StatusCode, Problem> {
    caller.client.delete(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Which tasks are listed.
#[derive(Deserialize, IntoParams, ToSchema)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListParams {
    /// Only this state.
    #[param(value_type = Option<schema::State>)]
    #[schema(value_type = Option<schema::State>)]
    state: Option<State>,
    /// Only this handler.
    handler: Option<String>,
    /// Only this queue.
    queue: Option<String>,
    /// Only tasks with this label, `name=value`.
    tag: Option<String>,
    /// Only tasks whose input has this text in it.
    q: Option<String>,
    /// Only the children of this task.
    #[param(value_type = Option<String>, format = "uuid")]
    #[schema(value_type = Option<String>, format = "uuid")]
    parent: Option<TaskId>,
    /// `created_at` for oldest first; newest first without.
    order: Option<String>,
    /// Where the last answer ended: its `next_cursor`.
    cursor: Option<String>,
    /// How many, 100 without, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// What became of one task of a batch.
#[derive(Serialize)]
struct BatchResult {
    status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<Task>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<serde_json::Value>,
}

/// A page of tasks. Written as it is, never by way of a `Value`: what a task was given, or came to, may hold a number that
/// no `Value` can.
#[derive(Serialize)]
pub(crate) struct TaskPage {
    tasks: Vec<Task>,
    next_cursor: Option<String>,
}

/// Tasks, newest first.
#[utoipa::path(get, path = "/v1/tasks", tag = "tasks", params(ListParams),
    responses((status = 200, description = "The tasks", body = schema::TaskList)))]
async fn list(Viewer(caller): Viewer, Params(params): Params<ListParams>) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &params.page(&caller.client).await?))
}

impl ListParams {
    /// A page of tasks, and where the next one begins.
    pub(crate) async fn page(self, client: &Client) -> Result<TaskPage, Problem> {
        let oldest_first = match self.order.as_deref() {
            None | Some("-created_at") => false,
            Some("created_at") => true,
            Some(_) => return Err(Problem::parameter("order", "must be 'created_at' or '-created_at'")),
        };
        let limit = match self.limit {
            None => 100,
            Some(limit @ 1..=1_000) => limit,
            Some(_) => return Err(Problem::parameter("limit", "must be 1 to 1000")),
        };
        let tag = self.tag.as_deref().map(|tag| {
            let (name, value) =
                tag.split_once('=').ok_or_else(|| Problem::parameter("tag", "must be name=value"))?;
            Ok::<_, Problem>((name.to_owned(), value.to_owned()))
        });
        let filter = Filter {
            state: self.state,
            handler: self.handler,
            queue: self.queue,
            tag: tag.transpose()?,
            q: self.q,
            parent: self.parent,
            oldest_first,
            after: self.cursor.as_deref().map(after).transpose()?,
            limit,
        };
        let page = client.page(&filter).await?;
        Ok(TaskPage { tasks: page.tasks, next_cursor: page.next.map(cursor) })
    }
}

/// Where a list goes on, as clients see it.
pub(crate) fn cursor(next: TaskId) -> String {
    URL_SAFE_NO_PAD.encode(next.0)
}

/// The task that a cursor of [`cursor`] names.
pub(crate) fn after(cursor: &str) -> Result<TaskId, Problem> {
    let bytes = URL_SAFE_NO_PAD.decode(cursor).ok().and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
    let id = bytes.map(uuid::Uuid::from_bytes).map(TaskId);
    id.ok_or_else(|| Problem::parameter("cursor", "is none that this server gave"))
}

#[derive(Deserialize, IntoParams)]
struct WaitParams {
    /// How long, `30s` without, at most `5m`.
    timeout: Option<String>,
}

/// Waits until the task has ended.
#[utoipa::path(get, path = "/v1/tasks/{id}/wait", tag = "tasks",
    params(("id" = String, Path, description = "The task's id"), WaitParams),
    responses((status = 200, description = "It has ended", body = schema::Task),
              (status = 202, description = "It has not ended yet", body = schema::Task)))]
async fn wait(
    app: axum::extract::State<App>,
    Viewer(caller): Viewer,
    OfTask(id, ()): OfTask,
    Params(params): Params<WaitParams>,
) -> Result<Response, Problem> {
    let timeout = wait_time(params.timeout.as_deref())?;
    let waited = tokio::select! {
        waited = caller.client.wait(id, timeout) => waited,
        () = app.stopping().cancelled() => caller.client.wait(id, Duration::ZERO).await,
    };
    match waited {
        Ok(task) => Ok(json_answer(StatusCode::OK, &task)),
        Err(Error::TimedOut { .. }) => Ok(json_answer(StatusCode::ACCEPTED, &caller.client.task(id).await?)),
        Err(error) => Err(error.into()),
    }
}

/// How long to wait when asked to for this long.
pub(crate) fn wait_time(asked: Option<&str>) -> Result<Duration, Problem> {
    Ok(span("timeout", asked)?.unwrap_or(Duration::from_secs(30)).min(LONGEST_WAIT))
}

/// Everything that is kept of a task, in one document.
#[utoipa::path(get, path = "/v1/tasks/{id}/export", tag = "tasks", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Task, events, steps, state, questions and approvals", body = serde_json::Value)))]
pub(crate) async fn export(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &caller.client.export(id).await?).into_response())
}
