//! Waiting for a task: by a call that is answered when it has ended, or as an MCP task that the client polls.
//!
//! An MCP task made here is nothing but the task waited for, under another name: its status is read from the
//! store each time, so any server of the cluster can be asked, and nothing is lost when one of them dies. What the task asks of
//! people becomes an elicitation, for who may answer it.

use std::collections::BTreeMap;

use longhaul::{Ask, AskKind, Client, Error, Event, Role, State, Task, TaskId};
use rmcp::model::{
    CallToolResult, DetailedTask, InputRequest, JsonObject, ProgressNotificationParam, ProgressToken,
    Task as McpTask, TaskPayload, TaskStatus,
};
use rmcp::service::{Peer, RoleServer};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::tools::{Wait, arguments, task_answer};
use crate::auth::Caller;
use crate::body::task_id;
use crate::problem::Problem;
use crate::routes::Commands;
use crate::routes::tasks::wait_time;
use crate::state::App;

/// Stands before the id of the task waited for, so that other kinds of MCP tasks can come.
const PREFIX: &str = "wait-";
/// How often a client should look.
const POLL_MS: u64 = 1_000;

/// Who wants to hear of the progress, and by which token.
pub(super) struct Listener {
    pub(super) peer: Peer<RoleServer>,
    pub(super) token: Option<ProgressToken>,
}

/// Waits until the task has ended, the time is up, the client has lost interest or the server stops; gives the task as it stands.
pub(super) async fn wait(
    app: &App,
    caller: &Caller,
    given: &JsonObject,
    listener: Listener,
    cancelled: &CancellationToken,
) -> Result<Value, Problem> {
    let asked: Wait = arguments(given)?;
    let task = task_id(&asked.task_id)?;
    let client = &caller.client;
    let waited = tokio::select! {
        waited = client.wait(task, wait_time(asked.timeout.as_deref())?) => waited.map(drop),
        told = tell_progress(client, task, listener) => told,
        () = cancelled.cancelled() => Ok(()),
        () = app.stopping().cancelled() => Ok(()),
    };
    match waited {
        Ok(()) | Err(Error::TimedOut { .. }) => task_answer(client, task).await,
        Err(error) => Err(error.into()),
    }
}

/// Tells what the task does, for as long as this is polled.
async fn tell_progress(client: &Client, task: TaskId, listener: Listener) -> Result<(), Error> {
    if let Some(token) = listener.token {
        let newest = client.task(task).await?.last_seq;
        let mut events = client.events(task, newest).await?;
        while let Some(event) = events.next().await? {
            let Some(message) = message(&event) else { continue };
            // The number of the event only grows, as progress must.
            #[allow(clippy::cast_precision_loss, reason = "no task has so many events")]
            let progress = ProgressNotificationParam::new(token.clone(), event.seq as f64).with_message(message);
            if listener.peer.notify_progress(progress).await.is_err() {
                break;
            }
        }
    }
    // Ending is for the one who waits.
    std::future::pending().await
}

fn message(event: &Event) -> Option<String> {
    if event.kind != "progress" {
        return None;
    }
    let word = |name: &str| event.data[name].as_str().unwrap_or_default();
    let number = |name: &str| event.data[name].as_u64().unwrap_or(0);
    let place = match (number("step"), number("total_step")) {
        (0, _) => String::new(),
        (step, 0) => format!("step {step}: "),
        (step, total) => format!("step {step} of {total}: "),
    };
    Some(format!("{place}{} {}", word("status"), word("message")).trim().to_owned())
}

/// The task to wait for, if it has not ended: what is made an MCP task for a client that can poll one.
pub(super) async fn begin(caller: &Caller, given: &JsonObject) -> Result<Option<McpTask>, Problem> {
    let asked: Wait = arguments(given)?;
    wait_time(asked.timeout.as_deref())?;
    let task = caller.client.task(task_id(&asked.task_id)?).await?;
    Ok((!task.state.is_final()).then(|| seed(&task)))
}

fn seed(task: &Task) -> McpTask {
    let status = if task.state.is_final() { TaskStatus::Completed } else { TaskStatus::Working };
    let (created, updated) = (task.created_at.to_string(), task.updated_at.to_string());
    let mut seed =
        McpTask::new(format!("{PREFIX}{}", task.id), status, created, updated).with_poll_interval_ms(POLL_MS);
    seed.status_message = task.progress.as_ref().map(|progress| progress.message.clone());
    seed
}

fn waited_for(id: &str) -> Result<TaskId, Problem> {
    let task = id.strip_prefix(PREFIX).and_then(|task| task.parse().ok());
    task.ok_or_else(|| Problem::not_found("task", id))
}

/// How an MCP task stands. `may_ask`: whether the client can put questions to its user.
pub(super) async fn look(caller: &Caller, id: &str, may_ask: bool) -> Result<DetailedTask, Problem> {
    let id = waited_for(id)?;
    let task = caller.client.task(id).await?;
    let seed = seed(&task);
    if task.state.is_final() {
        let result = CallToolResult::structured(task_answer(&caller.client, id).await?);
        return Ok(DetailedTask::new(seed, TaskPayload::Completed { result: object(&result) }));
    }
    if task.state == State::Waiting && may_ask && caller.has(Role::Operator).is_ok() {
        let input_requests: BTreeMap<String, InputRequest> =
            open(&caller.client, id).await?.iter().filter_map(elicitation).collect();
        if !input_requests.is_empty() {
            return Ok(DetailedTask::new(seed, TaskPayload::InputRequired { input_requests }));
        }
    }
    Ok(DetailedTask::new(seed, TaskPayload::Working))
}

async fn open(client: &Client, task: TaskId) -> Result<Vec<Ask>, Problem> {
    let mut asks = client.asks(task).await?;
    asks.retain(|ask| ask.status.name() == "pending");
    Ok(asks)
}

fn object(result: &CallToolResult) -> JsonObject {
    match serde_json::to_value(result) {
        Ok(Value::Object(result)) => result,
        _ => JsonObject::new(),
    }
}

/// What the client asks its user.
fn elicitation(ask: &Ask) -> Option<(String, InputRequest)> {
    let (message, schema) = match ask.kind {
        AskKind::Question => (
            ask.text.clone(),
            json!({
                "type": "object", "required": ["answer"],
                "properties": {"answer": {"type": "string", "title": "Answer"}},
            }),
        ),
        AskKind::Approval => (
            format!("{}\n\n{}", ask.text, ask.subject),
            json!({
                "type": "object", "required": ["approve"],
                "properties": {
                    "approve": {"type": "boolean", "title": "Approve", "description": "No denies it"},
                    "reason": {"type": "string", "title": "Why"},
                },
            }),
        ),
    };
    let request = json!({
        "method": "elicitation/create",
        "params": {"mode": "form", "message": message, "requestedSchema": schema},
    });
    match serde_json::from_value(request) {
        Ok(request) => Some((ask.id.clone(), request)),
        Err(error) => {
            tracing::error!(%error, "a question cannot be put to a client");
            None
        }
    }
}

/// What the client's user said.
#[derive(Deserialize)]
struct Said {
    action: String,
    #[serde(default)]
    content: Value,
}

/// Passes on what the client's user said. One who would rather not say leaves the question open.
pub(super) async fn update(caller: &Caller, id: &str, said: BTreeMap<String, Value>) -> Result<(), Problem> {
    let task = waited_for(id)?;
    caller.has(Role::Operator)?;
    let asks = open(&caller.client, task).await?;
    for (id, response) in said {
        // One that was answered meanwhile needs no answer any more.
        let Some(ask) = asks.iter().find(|ask| ask.id == id) else { continue };
        let said: Said = serde_json::from_value(response).map_err(|error| {
            Problem::field("inputResponses", format!("has no answer that can be read: {error}"))
        })?;
        if said.action != "accept" {
            continue;
        }
        match ask.kind {
            AskKind::Question => {
                let answer = said.content["answer"].as_str();
                let answer = answer.ok_or_else(|| Problem::field("answer", "is missing"))?;
                caller.client.answer(task, Some(&id), answer).await?;
            }
            AskKind::Approval => {
                let approve = said.content["approve"].as_bool();
                let approve = approve.ok_or_else(|| Problem::field("approve", "must be true or false"))?;
                let commands = Commands { client: &caller.client, task };
                commands.approval(Some(&id), approve, said.content["reason"].as_str(), Some(&ask.digest)).await?;
            }
        }
    }
    Ok(())
}

/// Nobody waits any more: nothing has to be done, as nothing was held. The task itself goes on; `cancel_task` ends it.
pub(super) async fn forget(caller: &Caller, id: &str) -> Result<(), Problem> {
    caller.client.task(waited_for(id)?).await?;
    Ok(())
}
