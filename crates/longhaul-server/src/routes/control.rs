//! Steering a task: cancel, priority, resume, fork, undo, messages, signals, decisions.
//!
//! What a WebSocket may ask is here too, as [`Commands`], so that both ways do the same.

use axum::http::StatusCode;
use axum::response::Response;
use longhaul::{Client, Decision, TaskId};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::Operator;
use crate::body::{AnyJson, Json, OfTask, parse};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(cancel))
        .routes(routes!(priority))
        .routes(routes!(resume))
        .routes(routes!(fork))
        .routes(routes!(undo))
        .routes(routes!(message))
        .routes(routes!(signal))
        .routes(routes!(decide))
}

#[derive(Deserialize, ToSchema, Default)]
#[serde(deny_unknown_fields)]
struct CancelBody {
    /// Undo what was done, also where that is not done by itself.
    #[serde(default)]
    undo: bool,
    reason: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct PriorityBody {
    /// 0 to 9, larger first.
    #[schema(value_type = i32, minimum = 0, maximum = 9)]
    priority: u8,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct MessageBody {
    text: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ForkBody {
    /// The first step that is run again; what was recorded before it is taken over.
    from_step: String,
    /// Another input.
    #[schema(value_type = Option<serde_json::Value>)]
    input: Option<Box<RawValue>>,
}

#[derive(Deserialize, ToSchema, Default)]
#[serde(deny_unknown_fields)]
struct UndoBody {
    reason: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct DecisionBody {
    decision: DecisionWord,
    /// What the step gave, for `done`.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    reason: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum DecisionWord {
    Retry,
    Done,
    Fail,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct AnswerBody {
    pub(super) answer: String,
}

/// What can be asked of a task by one who steers it, with the bodies of the HTTP requests.
pub(crate) struct Commands<'a> {
    pub(crate) client: &'a Client,
    pub(crate) task: TaskId,
}

impl Commands<'_> {
    pub(crate) async fn cancel(&self, body: &[u8]) -> Result<(), Problem> {
        let body: CancelBody = parse(body)?;
        let reason = body.reason.as_deref();
        match body.undo {
            true => self.client.cancel_with_undo(self.task, reason).await?,
            false => self.client.cancel(self.task, reason).await?,
        };
        Ok(())
    }

    pub(crate) async fn priority(&self, body: &[u8]) -> Result<(), Problem> {
        let body: PriorityBody = parse(body)?;
        self.client.reprioritise(self.task, body.priority).await?;
        Ok(())
    }

    pub(crate) async fn message(&self, body: &[u8]) -> Result<(), Problem> {
        let body: MessageBody = parse(body)?;
        self.client.message(self.task, &body.text).await?;
        Ok(())
    }

    /// Answers the question named, or the only open one.
    pub(crate) async fn answer(&self, question: Option<&str>, body: &[u8]) -> Result<(), Problem> {
        let body: AnswerBody = parse(body)?;
        self.client.answer(self.task, question, &body.answer).await?;
        Ok(())
    }

    /// Decides about the approval named, or the only open one.
    pub(crate) async fn approval(
        &self,
        approval: Option<&str>,
        approve: bool,
        reason: Option<&str>,
        digest: Option<&str>,
    ) -> Result<(), Problem> {
        match approve {
            true => self.client.approve(self.task, approval, reason, digest).await?,
            false => self.client.deny(self.task, approval, reason).await?,
        };
        Ok(())
    }

    /// Changes the state; with `version`, only when it is still that one. Gives the new version.
    pub(crate) async fn patch(&self, body: &[u8], version: Option<u64>) -> Result<u64, Problem> {
        // Serde would take the members of an array for fields, in their order.
        if !body.trim_ascii_start().starts_with(b"{") {
            return Err(Problem::new("invalid_field", "a patch is an object"));
        }
        let patch = parse(body)?;
        // A task that has none yet gets one only from its own run.
        if self.client.state(self.task).await?.is_none() {
            return Err(Problem::not_found("state of task", &self.task.to_string()));
        }
        Ok(self.client.patch_state(self.task, patch, version).await?)
    }
}

/// A body that is read later, by its command.
struct Raw(Vec<u8>);

impl axum::extract::FromRequest<App> for Raw {
    type Rejection = Problem;

    async fn from_request(request: axum::extract::Request, app: &App) -> Result<Self, Problem> {
        let AnyJson(body) = AnyJson::from_request(request, app).await?;
        Ok(Self(body.get().as_bytes().to_vec()))
    }
}

async fn task_answer(client: &Client, id: TaskId) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &client.task(id).await?))
}

/// Cancels a task. A running one is told to stop; nothing forward is accepted of it from now on.
#[utoipa::path(post, path = "/v1/tasks/{id}/cancel", tag = "control", request_body = CancelBody,
    params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "The task", body = schema::Task)))]
async fn cancel(
    Operator(caller): Operator,
    OfTask(task, ()): OfTask,
    Raw(body): Raw,
) -> Result<Response, Problem> {
    Commands { client: &caller.client, task }.cancel(&body).await?;
    task_answer(&caller.client, task).await
}

/// Changes a task's priority, and with it its place in line.
#[utoipa::path(post, path = "/v1/tasks/{id}/priority", tag = "control", request_body = PriorityBody,
    params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "The task", body = schema::Task)))]
async fn priority(
    Operator(caller): Operator,
    OfTask(task, ()): OfTask,
    Raw(body): Raw,
) -> Result<Response, Problem> {
    Commands { client: &caller.client, task }.priority(&body).await?;
    task_answer(&caller.client, task).await
}

/// Opens a failed or cancelled task again, under the same id. Nothing happens to any other.
#[utoipa::path(post, path = "/v1/tasks/{id}/resume", tag = "control",
    params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "The task", body = schema::Task)))]
async fn resume(Operator(caller): Operator, OfTask(task, ()): OfTask) -> Result<Response, Problem> {
    caller.client.resume(task).await?;
    task_answer(&caller.client, task).await
}

/// Makes a new task that shares the recorded steps of one that has ended.
#[utoipa::path(post, path = "/v1/tasks/{id}/fork", tag = "control", request_body = ForkBody,
    params(("id" = String, Path, description = "The task's id")),
    responses((status = 202, description = "The new task", body = schema::Task)))]
async fn fork(
    Operator(caller): Operator,
    OfTask(task, ()): OfTask,
    Json(body): Json<ForkBody>,
) -> Result<Response, Problem> {
    let fork = caller.client.fork(task, &body.from_step, body.input).await?;
    Ok(json_answer(StatusCode::ACCEPTED, &caller.client.task(fork.id).await?))
}

/// Makes a new task that undoes what one that has ended did, the last step first.
#[utoipa::path(post, path = "/v1/tasks/{id}/undo", tag = "control", request_body = UndoBody,
    params(("id" = String, Path, description = "The task's id")),
    responses((status = 202, description = "The task that undoes", body = schema::Task)))]
async fn undo(
    Operator(caller): Operator,
    OfTask(task, ()): OfTask,
    Json(body): Json<UndoBody>,
) -> Result<Response, Problem> {
    let undo = caller.client.undo(task, body.reason.as_deref()).await?;
    Ok(json_answer(StatusCode::ACCEPTED, &caller.client.task(undo.id).await?))
}

/// Says something to a running task: it arrives as the signal `message`.
#[utoipa::path(post, path = "/v1/tasks/{id}/messages", tag = "control", request_body = MessageBody,
    params(("id" = String, Path, description = "The task's id")),
    responses((status = 202, description = "It is on record", body = schema::Empty)))]
async fn message(
    Operator(caller): Operator,
    OfTask(task, ()): OfTask,
    Raw(body): Raw,
) -> Result<Response, Problem> {
    Commands { client: &caller.client, task }.message(&body).await?;
    Ok(json_answer(StatusCode::ACCEPTED, &json!({})))
}

/// Sends a task a named message, any JSON. One that nobody waits for yet is kept.
#[utoipa::path(post, path = "/v1/tasks/{id}/signals/{name}", tag = "control", request_body = serde_json::Value,
    params(("id" = String, Path, description = "The task's id"), ("name" = String, Path, description = "The signal's name")),
    responses((status = 202, description = "It is on record", body = schema::Empty)))]
async fn signal(
    Operator(caller): Operator,
    OfTask(task, name): OfTask<String>,
    AnyJson(message): AnyJson,
) -> Result<Response, Problem> {
    caller.client.signal(task, &name, &message).await?;
    Ok(json_answer(StatusCode::ACCEPTED, &json!({})))
}

/// Says what became of a step in doubt.
#[utoipa::path(post, path = "/v1/tasks/{id}/steps/{step}/decision", tag = "control", request_body = DecisionBody,
    params(("id" = String, Path, description = "The task's id"), ("step" = String, Path, description = "The step's name")),
    responses((status = 200, description = "The task", body = schema::Task)))]
async fn decide(
    Operator(caller): Operator,
    OfTask(task, step): OfTask<String>,
    Json(body): Json<DecisionBody>,
) -> Result<Response, Problem> {
    let decision = match (body.decision, body.result) {
        (DecisionWord::Done, result) => Decision::Done(result.unwrap_or_else(|| RawValue::NULL.to_owned())),
        (_, Some(_)) => return Err(Problem::field("result", "goes only with the decision 'done'")),
        (DecisionWord::Retry, None) => Decision::Retry,
        (DecisionWord::Fail, None) => Decision::Fail,
    };
    caller.client.decide(task, &step, decision, body.reason.as_deref()).await?;
    task_answer(&caller.client, task).await
}
