//! What waits for people: approvals and questions.

use axum::http::StatusCode;
use axum::response::Response;
use longhaul::{Ask, AskKind, TaskId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::control::AnswerBody;
use super::{Commands, json_answer};
use crate::auth::{Operator, Viewer};
use crate::body::{Json, OfTask};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;
use crate::time::timestamp;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(all_approvals))
        .routes(routes!(approvals))
        .routes(routes!(decide))
        .routes(routes!(questions))
        .routes(routes!(answer))
}

#[derive(Serialize, ToSchema)]
struct Approvals {
    approvals: Vec<Approval>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Approval {
    id: String,
    #[schema(value_type = String, format = "uuid")]
    task_id: TaskId,
    /// `pending`, `approved`, `denied`, `expired` or `used`.
    status: &'static str,
    /// The tool, or what is asked.
    tool: String,
    /// What is asked, for people.
    question: String,
    arguments: Value,
    /// Names exactly what is approved.
    digest: String,
    /// `read_only`, `write_local` or `external_action`.
    risk: Value,
    #[schema(required)]
    reason: Option<String>,
    #[schema(format = "date-time")]
    requested_at: String,
    #[schema(required, format = "date-time")]
    expires_at: Option<String>,
    #[schema(required)]
    decided_by: Option<String>,
}

impl From<Ask> for Approval {
    fn from(ask: Ask) -> Self {
        let mut subject = ask.subject;
        let mut take = |name: &str| subject.get_mut(name).map(Value::take).unwrap_or_default();
        let tool = take("tool").as_str().map_or_else(|| ask.text.clone(), str::to_owned);
        Self {
            id: ask.id,
            task_id: ask.task_id,
            status: ask.status.name(),
            tool,
            arguments: take("arguments"),
            risk: take("risk"),
            question: ask.text,
            digest: ask.digest,
            reason: ask.reason,
            requested_at: timestamp(ask.requested_at).to_string(),
            expires_at: ask.expires_at.map(|at| timestamp(at).to_string()),
            decided_by: ask.decided_by,
        }
    }
}

#[derive(Serialize, ToSchema)]
struct Questions {
    questions: Vec<Question>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Question {
    id: String,
    #[schema(value_type = String, format = "uuid")]
    task_id: TaskId,
    question: String,
    #[schema(required)]
    answer: Option<String>,
    #[schema(format = "date-time")]
    asked_at: String,
    #[schema(required, format = "date-time")]
    answered_at: Option<String>,
}

impl From<Ask> for Question {
    fn from(ask: Ask) -> Self {
        Self {
            id: ask.id,
            task_id: ask.task_id,
            question: ask.text,
            answer: ask.reason,
            asked_at: timestamp(ask.requested_at).to_string(),
            answered_at: ask.decided_at.map(|at| timestamp(at).to_string()),
        }
    }
}

pub(crate) fn of_kind<T: From<Ask>>(asks: Vec<Ask>, kind: AskKind) -> Vec<T> {
    asks.into_iter().filter(|ask| ask.kind == kind).map(T::from).collect()
}

/// Every approval that waits for a person, oldest first.
#[utoipa::path(get, path = "/v1/approvals", tag = "people",
    responses((status = 200, description = "All that are open", body = Approvals)))]
async fn all_approvals(Viewer(caller): Viewer) -> Result<Response, Problem> {
    let approvals: Vec<Approval> = of_kind(caller.client.open_asks().await?, AskKind::Approval);
    Ok(json_answer(StatusCode::OK, &Approvals { approvals }))
}

/// The approvals of one task, oldest first.
#[utoipa::path(get, path = "/v1/tasks/{id}/approvals", tag = "people", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Its approvals", body = Approvals)))]
async fn approvals(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    let approvals: Vec<Approval> = of_kind(caller.client.asks(id).await?, AskKind::Approval);
    Ok(json_answer(StatusCode::OK, &Approvals { approvals }))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ApprovalDecision {
    decision: Verdict,
    reason: Option<String>,
    /// What the one who decides saw; another digest than the request's is refused.
    digest: Option<String>,
}

#[derive(Deserialize, ToSchema, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Approve,
    Deny,
}

/// Approves or denies.
#[utoipa::path(post, path = "/v1/tasks/{id}/approvals/{aid}", tag = "people", request_body = ApprovalDecision,
    params(("id" = String, Path, description = "The task's id"), ("aid" = String, Path, description = "The approval's id")),
    responses((status = 200, description = "The approval as it stands now", body = Approval)))]
async fn decide(
    Operator(caller): Operator,
    OfTask(task, approval): OfTask<String>,
    Json(body): Json<ApprovalDecision>,
) -> Result<Response, Problem> {
    let known = known(caller.client.asks(task).await?, AskKind::Approval, &approval, "approval")?;
    let commands = Commands { client: &caller.client, task };
    let approve = body.decision == Verdict::Approve;
    commands.approval(Some(&known), approve, body.reason.as_deref(), body.digest.as_deref()).await?;
    let now = caller.client.asks(task).await?.into_iter().find(|ask| ask.id == known);
    let now = now.ok_or_else(|| Problem::not_found("approval", &approval))?;
    Ok(json_answer(StatusCode::OK, &Approval::from(now)))
}

/// The questions of one task, oldest first.
#[utoipa::path(get, path = "/v1/tasks/{id}/questions", tag = "people", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Its questions", body = Questions)))]
async fn questions(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    let questions: Vec<Question> = of_kind(caller.client.asks(id).await?, AskKind::Question);
    Ok(json_answer(StatusCode::OK, &Questions { questions }))
}

/// Answers a question.
#[utoipa::path(post, path = "/v1/tasks/{id}/questions/{qid}", tag = "people", request_body = AnswerBody,
    params(("id" = String, Path, description = "The task's id"), ("qid" = String, Path, description = "The question's id")),
    responses((status = 200, description = "It is on record", body = schema::Empty)))]
async fn answer(
    Operator(caller): Operator,
    OfTask(task, question): OfTask<String>,
    Json(body): Json<AnswerBody>,
) -> Result<Response, Problem> {
    let known = known(caller.client.asks(task).await?, AskKind::Question, &question, "question")?;
    caller.client.answer(task, Some(&known), &body.answer).await?;
    Ok(json_answer(StatusCode::OK, &json!({})))
}

fn known(asks: Vec<Ask>, kind: AskKind, id: &str, what: &str) -> Result<String, Problem> {
    let found = asks.into_iter().find(|ask| ask.kind == kind && ask.id == id);
    found.map(|ask| ask.id).ok_or_else(|| Problem::not_found(what, id))
}
