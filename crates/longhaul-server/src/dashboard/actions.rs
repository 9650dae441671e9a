//! What people do to tasks, queues and schedules. Each is a form of a page; a script gets the outcome as JSON, a browser
//! without one is sent back to the page.

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use longhaul::request::read_value;
use longhaul::{Decision, Role, TaskId};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::page::{see_other, wants_page};
use super::session::{Nothing, Posted, Visitor};
use crate::body::OfTask;
use crate::problem::Problem;
use crate::routes::json_answer;

/// It is done: where to look now, and what to say.
pub(super) fn done(headers: &HeaderMap, path: &str, message: &str) -> Response {
    match wants_page(headers) {
        true => see_other(path),
        false => json_answer(StatusCode::OK, &json!({"message": message, "location": path})),
    }
}

fn task_path(id: TaskId) -> String {
    format!("/tasks/{id}")
}

/// What was typed, if anything was.
fn typed(text: &str) -> Option<&str> {
    Some(text.trim()).filter(|text| !text.is_empty())
}

/// JSON that someone typed.
fn typed_json(field: &str, text: &str) -> Result<Option<Box<RawValue>>, Problem> {
    let Some(text) = typed(text) else { return Ok(None) };
    let value: Box<RawValue> =
        read_value(text.as_bytes()).map_err(|bad| Problem::field(field, bad.to_string()))?;
    Ok(Some(value))
}

#[derive(Deserialize)]
pub(super) struct CancelForm {
    undo: Option<String>,
    #[serde(default)]
    reason: String,
}

pub(super) async fn cancel(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<CancelForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    match form.undo.is_some() {
        true => visitor.client().cancel_with_undo(id, typed(&form.reason)).await?,
        false => visitor.client().cancel(id, typed(&form.reason)).await?,
    };
    Ok(done(&headers, &task_path(id), "Cancelled."))
}

pub(super) async fn resume(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    _: Posted<Nothing>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    visitor.client().resume(id).await?;
    Ok(done(&headers, &task_path(id), "Resumed: it is in the queue again."))
}

#[derive(Deserialize)]
pub(super) struct PriorityForm {
    priority: u8,
}

pub(super) async fn priority(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<PriorityForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    visitor.client().reprioritise(id, form.priority).await?;
    Ok(done(&headers, &task_path(id), &format!("Priority is {} now.", form.priority)))
}

#[derive(Deserialize)]
pub(super) struct MessageForm {
    text: String,
}

pub(super) async fn message(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<MessageForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let text = typed(&form.text).ok_or_else(|| Problem::field("text", "is empty; say something"))?;
    visitor.client().message(id, text).await?;
    Ok(done(&headers, &task_path(id), "Sent."))
}

#[derive(Deserialize)]
pub(super) struct ForkForm {
    from_step: String,
    #[serde(default)]
    input: String,
}

pub(super) async fn fork(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<ForkForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let input = typed_json("input", &form.input)?;
    let fork = visitor.client().fork(id, &form.from_step, input).await?;
    Ok(done(&headers, &task_path(fork.id), "Forked: this is the new task."))
}

#[derive(Deserialize)]
pub(super) struct UndoForm {
    #[serde(default)]
    reason: String,
}

pub(super) async fn undo(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<UndoForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let undo = visitor.client().undo(id, typed(&form.reason)).await?;
    Ok(done(&headers, &task_path(undo.id), "This task undoes it."))
}

#[derive(Deserialize)]
pub(super) struct DecideForm {
    step: String,
    decision: String,
    #[serde(default)]
    result: String,
    #[serde(default)]
    reason: String,
}

pub(super) async fn decide(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<DecideForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let decision = match form.decision.as_str() {
        "retry" => Decision::Retry,
        "fail" => Decision::Fail,
        "done" => {
            let result = typed_json("result", &form.result)?;
            Decision::Done(result.unwrap_or_else(|| RawValue::NULL.to_owned()))
        }
        _ => return Err(Problem::field("decision", "must be 'retry', 'done' or 'fail'")),
    };
    visitor.client().decide(id, &form.step, decision, typed(&form.reason)).await?;
    Ok(done(&headers, &task_path(id), "Decided."))
}

#[derive(Deserialize)]
pub(super) struct ApprovalForm {
    id: String,
    decision: String,
    /// What the one who decides saw.
    digest: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    next: String,
}

pub(super) async fn approval(
    visitor: Visitor,
    OfTask(task, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<ApprovalForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let reason = typed(&form.reason);
    let message = match form.decision.as_str() {
        "approve" => {
            visitor.client().approve(task, Some(&form.id), reason, Some(&form.digest)).await?;
            "Approved."
        }
        "deny" => {
            visitor.client().deny(task, Some(&form.id), reason).await?;
            "Denied."
        }
        _ => return Err(Problem::field("decision", "must be 'approve' or 'deny'")),
    };
    Ok(done(&headers, super::page::local_path(&form.next), message))
}

#[derive(Deserialize)]
pub(super) struct AnswerForm {
    id: String,
    answer: String,
    #[serde(default)]
    next: String,
}

pub(super) async fn answer(
    visitor: Visitor,
    OfTask(task, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<AnswerForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let answer = typed(&form.answer).ok_or_else(|| Problem::field("answer", "is empty; write one"))?;
    visitor.client().answer(task, Some(&form.id), answer).await?;
    Ok(done(&headers, super::page::local_path(&form.next), "Answered."))
}

#[derive(Deserialize)]
pub(super) struct RedeliverForm {
    delivery: uuid::Uuid,
    #[serde(default)]
    next: String,
}

pub(super) async fn redeliver(
    visitor: Visitor,
    OfTask(task, ()): OfTask,
    headers: HeaderMap,
    Posted(form): Posted<RedeliverForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    visitor.client().redeliver(task, form.delivery).await?;
    Ok(done(&headers, super::page::local_path(&form.next), "It is sent once more."))
}

/// Pausing, or going on.
#[derive(Deserialize)]
pub(super) struct PauseForm {
    name: String,
    pause: bool,
}

pub(super) async fn queue(
    visitor: Visitor,
    headers: HeaderMap,
    Posted(form): Posted<PauseForm>,
) -> Result<Response, Problem> {
    // As in the API: queues belong to all tenants.
    visitor.caller.has(Role::Admin)?;
    visitor.client().pause_queue(&form.name, form.pause).await?;
    Ok(done(&headers, "/fleet", if form.pause { "The queue is paused." } else { "The queue goes on." }))
}

pub(super) async fn schedule(
    visitor: Visitor,
    headers: HeaderMap,
    Posted(form): Posted<PauseForm>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    match form.pause {
        true => visitor.client().pause_schedule(&form.name).await?,
        false => visitor.client().resume_schedule(&form.name).await?,
    };
    Ok(done(&headers, "/fleet", if form.pause { "The schedule is paused." } else { "The schedule goes on." }))
}
