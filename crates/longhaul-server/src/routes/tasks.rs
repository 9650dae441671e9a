//! Submitting, reading, listing, waiting for and deleting tasks.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use longhaul::task::Deadline;
use longhaul::{Client, Error, Filter, NewTask, State, Task, TaskId, Webhook};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
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
use crate::time::{Span, span};

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

/// A task to be run. Every field but what the handler needs is optional.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Submit {
    /// What runs it; without, the server's default or the only one there is.
    handler: Option<String>,
    /// Its argument, any JSON.
    #[schema(value_type = Option<serde_json::Value>)]
    input: Option<Box<RawValue>>,
    /// The input, when it is a string: the same under another name.
    user_input: Option<String>,
    /// The line it stands in, `default` without.
    queue: Option<String>,
    /// 0 to 9, larger first, 5 without.
    #[schema(value_type = Option<i32>, minimum = 0, maximum = 9)]
    priority: Option<u8>,
    /// Not to be started before.
    #[schema(value_type = Option<String>, format = "date-time")]
    run_at: Option<Timestamp>,
    /// When it must be over.
    #[schema(value_type = Option<String>, format = "date-time")]
    deadline: Option<Timestamp>,
    /// How long it may take from now on, instead of `deadline`: `5m`.
    #[schema(value_type = Option<String>)]
    timeout: Option<Span>,
    /// At most so many tasks with this key run at once as its limit says, one without a limit.
    concurrency_key: Option<String>,
    /// Where to tell how it ended.
    webhook: Option<WebhookBody>,
    /// Free labels to filter by.
    tags: Option<BTreeMap<String, String>>,
    /// How many runs may end with the handler's error, 3 without.
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 1000)]
    max_attempts: Option<u32>,
    /// As the header `Idempotency-Key`: the same key and content is the same task.
    key: Option<String>,
    /// An equal submit within this time is the same task: `10s`.
    #[schema(value_type = Option<String>)]
    dedupe_window: Option<Span>,
}

/// Where a task's events go.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WebhookBody {
    /// http or https.
    url: String,
    /// Which types: `task.completed`, `task.*`, `*`; the final ones without.
    #[serde(default)]
    events: Vec<String>,
}

impl Submit {
    /// The task that is asked for.
    pub(crate) async fn into_task(self, app: &App, client: &Client) -> Result<NewTask, Problem> {
        let input = match (self.input, self.user_input) {
            (Some(_), Some(_)) => {
                return Err(Problem::field("user_input", "is another name of 'input'; give one of them"));
            }
            (Some(input), None) => input,
            (None, Some(text)) => to_raw_value(&text)
                .map_err(|error| Problem::field("user_input", format!("cannot be kept: {error}")))?,
            (None, None) if self.handler.is_none() => {
                return Err(Problem::field("input", "is missing, and so is 'handler'; say what is to be done"));
            }
            (None, None) => RawValue::NULL.to_owned(),
        };
        let handler = match self.handler {
            Some(handler) => handler,
            None => default_handler(app, client).await?,
        };
        let mut task = NewTask::with_raw(handler, input);
        task.deadline = match (self.deadline, self.timeout) {
            (Some(_), Some(_)) => {
                return Err(Problem::field("timeout", "and 'deadline' say the same; give one of them"));
            }
            (Some(at), None) => Some(Deadline::At(at)),
            (None, timeout) => timeout.map(|timeout| Deadline::After(timeout.0)),
        };
        if let Some(queue) = self.queue {
            task.queue = queue;
        }
        if let Some(priority) = self.priority {
            task.priority = priority;
        }
        if let Some(max_attempts) = self.max_attempts {
            task.max_attempts = max_attempts;
        }
        task.key = self.key;
        task.run_at = self.run_at;
        task.concurrency_key = self.concurrency_key;
        task.tags = self.tags.unwrap_or_default();
        task.dedupe_window = self.dedupe_window.map(|window| window.0);
        task.webhook = self.webhook.map(|webhook| Webhook { url: webhook.url, events: webhook.events });
        task.validate()?;
        Ok(task)
    }

    /// Submits it. When this returns, the task is on disk, or is the one accepted before.
    pub(crate) async fn accept(
        self,
        app: &App,
        client: &Client,
        traceparent: Option<String>,
    ) -> Result<Task, Problem> {
        let mut task = self.into_task(app, client).await?;
        task.traceparent = traceparent;
        let asked = task.clone();
        let accepted = client.submit(task).await?;
        app.metrics().submitted(1);
        if accepted.new { Ok(Task::accepted(asked, &accepted)) } else { Ok(client.task(accepted.id).await?) }
    }
}

async fn default_handler(app: &App, client: &Client) -> Result<String, Problem> {
    if let Some(handler) = &app.settings().default_handler {
        return Ok(handler.clone());
    }
    let mut handlers = client.handlers().await?;
    match (handlers.pop(), handlers.len()) {
        (Some(only), 0) => Ok(only.name),
        (None, _) => Err(Problem::new("unknown_handler", "no worker has registered a handler; start one first")),
        _ => Err(Problem::field("handler", "is missing, and there are several; say which")),
    }
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
        body.key = Some(key);
    }
    let task = body.accept(&app, &caller.client, Some(context.traceparent)).await?;
    let mut response = json_answer(StatusCode::ACCEPTED, &task);
    if let Ok(location) = HeaderValue::from_str(&format!("/v1/tasks/{}", task.id)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
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
            Ok(task) => json!({"status": 202, "task": task}),
            Err(problem) => json!({"status": problem.status().as_u16(), "error": problem.to_json()}),
        });
    }
    app.metrics().submitted(accepted_count);
    Ok(json_answer(StatusCode::OK, &json!({"results": results})))
}

/// An entry is read on its own, so that one that is wrong does not hurt the others.
async fn batch_task(
    app: &App,
    client: &Client,
    context: &RequestContext,
    entry: &RawValue,
) -> Result<NewTask, Problem> {
    let submit: Submit = crate::body::parse(entry.get().as_bytes())?;
    let mut task = submit.into_task(app, client).await?;
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

/// Tasks, newest first.
#[utoipa::path(get, path = "/v1/tasks", tag = "tasks", params(ListParams),
    responses((status = 200, description = "The tasks", body = schema::TaskList)))]
async fn list(Viewer(caller): Viewer, Params(params): Params<ListParams>) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &params.page(&caller.client).await?))
}

impl ListParams {
    /// A page of tasks, and where the next one begins.
    pub(crate) async fn page(self, client: &Client) -> Result<serde_json::Value, Problem> {
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
        Ok(json!({"tasks": page.tasks, "next_cursor": page.next.map(cursor)}))
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
async fn export(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &caller.client.export(id).await?).into_response())
}
