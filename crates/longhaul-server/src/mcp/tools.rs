//! The tools: what they are called, take and give, and what each does.
//!
//! They do what the HTTP routes do, by the same code: the same checks, roles, answers and refusals. A refusal is a result
//! that the model can read, the problem as JSON with its code and what to do, not an error of the protocol.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use longhaul::request::Submit;
use longhaul::{AskKind, Client, Role, TaskId};
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::describe::schema;
use super::resources;
use crate::auth::Caller;
use crate::body::{parse, task_id};
use crate::problem::Problem;
use crate::routes::Commands;
use crate::routes::artifacts::piece;
use crate::routes::people::{Approval, Question, of_kind};
use crate::routes::tasks::{ListParams, accept};
use crate::schema as shapes;
use crate::state::App;

/// The most of an artifact that one call gives, and what it gives unless asked otherwise.
const MAX_PIECE: u64 = 256 * 1024;
const PIECE: u64 = 32 * 1024;
/// The least: every character fits, so that each piece of a text goes on.
const MIN_PIECE: u64 = 4;

/// A task, and what of it waits for people.
#[derive(Serialize, ToSchema)]
struct TaskAnswer {
    #[serde(flatten)]
    task: shapes::Task,
    /// The approvals that wait for a decision.
    approvals: Vec<Approval>,
    /// The questions that wait for an answer.
    questions: Vec<Question>,
}

/// The state of a task as others see it.
#[derive(Serialize, ToSchema)]
struct StateAnswer {
    /// Its resource, which can be subscribed to.
    uri: String,
    agent_id: String,
    #[schema(format = "uuid")]
    task_id: String,
    /// The state of the task.
    state: shapes::State,
    plan: Vec<String>,
    /// The ids of its artifacts.
    artifacts: Vec<String>,
    /// Give it to patch_state.
    #[schema(minimum = 0)]
    version: i64,
    agent_state: Value,
}

/// What a patch has led to.
#[derive(Serialize, ToSchema)]
struct Patched {
    /// The version that this patch made.
    #[schema(minimum = 1)]
    version: i64,
    /// The state as it stands now; someone may have changed it once more.
    state: StateAnswer,
}

/// A piece of an artifact.
#[derive(Serialize, ToSchema)]
struct ArtifactPiece {
    artifact_id: String,
    /// How many bytes it has in all.
    #[schema(value_type = i64, minimum = 0)]
    bytes: u64,
    /// Where this piece begins.
    #[schema(value_type = i64, minimum = 0)]
    offset: u64,
    /// Where to go on; null at the end.
    #[schema(value_type = Option<i64>, required)]
    next_offset: Option<u64>,
    /// The piece, when the artifact is a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    text: Option<String>,
    /// The piece in base64, when it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    base64: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct OfTask {
    /// The task's id.
    task_id: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Wait {
    /// The task's id.
    pub(super) task_id: String,
    /// How long at most: `30s` without, at most `5m`.
    #[schema(nullable = false)]
    pub(super) timeout: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Patch {
    /// The task's id.
    task_id: String,
    /// The version that get_state gave. If the state has another one by now, nothing is changed and the answer says which.
    #[schema(value_type = i64, minimum = 0)]
    version: u64,
    /// What to change.
    #[schema(value_type = shapes::StatePatch)]
    patch: Box<RawValue>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Answer {
    /// The task's id.
    task_id: String,
    /// The question's id; not needed when only one is open.
    #[schema(nullable = false)]
    question_id: Option<String>,
    /// The answer.
    answer: String,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Approve {
    /// The task's id.
    task_id: String,
    /// The approval's id; not needed when only one is open.
    #[schema(nullable = false)]
    approval_id: Option<String>,
    /// Why, for the record.
    #[schema(nullable = false)]
    reason: Option<String>,
    /// The digest of what was looked at; if the approval is for something else, it is refused.
    #[schema(nullable = false)]
    digest: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Deny {
    /// The task's id.
    task_id: String,
    /// The approval's id; not needed when only one is open.
    #[schema(nullable = false)]
    approval_id: Option<String>,
    /// Why: the task is told.
    #[schema(nullable = false)]
    reason: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Cancel {
    /// The task's id.
    task_id: String,
    /// Undo what was done, also where that is not done by itself.
    #[serde(default)]
    undo: bool,
    /// Why, for the record.
    #[schema(nullable = false)]
    reason: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ReadArtifact {
    /// The task's id.
    task_id: String,
    /// The artifact's id, as in the task's state.
    artifact_id: String,
    /// The first byte, 0 without.
    #[serde(default)]
    #[schema(value_type = i64, minimum = 0, default = 0)]
    offset: u64,
    /// How many bytes, 32768 without, at most 262144.
    #[schema(value_type = Option<i64>, minimum = 4, maximum = 262144, nullable = false)]
    limit: Option<u64>,
}

/// What a tool does to the world.
enum Kind {
    Reads,
    Adds,
    /// Once or twice is the same.
    AddsOnce,
    /// May set off, end or undo what cannot be taken back.
    Decides,
}

/// All tools, as clients see them.
pub(super) static TOOLS: LazyLock<Vec<Tool>> = LazyLock::new(|| {
    vec![
        tool::<Submit, shapes::Task>(
            "submit_task",
            "Submit a task",
            Kind::Adds,
            "Submits a task for an agent or another handler and returns at once with its id. It runs on, whatever becomes of this \
             connection; wait_task waits for it. With 'key', submitting the same twice is one task.",
        ),
        tool::<OfTask, TaskAnswer>(
            "get_task",
            "Look at a task",
            Kind::Reads,
            "A task as it stands: state, result or error, and what of it waits for people.",
        ),
        tool::<Wait, TaskAnswer>(
            "wait_task",
            "Wait for a task",
            Kind::Reads,
            "Waits until a task has ended (completed, failed or cancelled) or the time is up, and returns it as it stands then. \
             While 'state' is none of these, call it again; if it waits for an approval or an answer, someone must give it.",
        ),
        tool::<ListParams, shapes::TaskList>(
            "list_tasks",
            "List tasks",
            Kind::Reads,
            "Tasks, newest first. 'next_cursor' of an answer is the 'cursor' of the next call.",
        ),
        tool::<OfTask, StateAnswer>(
            "get_state",
            "Read an agent's state",
            Kind::Reads,
            "The shared state of an agent's task: goal, plan, facts, open questions, artifacts, and its version.",
        ),
        tool::<Patch, Patched>(
            "patch_state",
            "Change an agent's state",
            Kind::AddsOnce,
            "Changes the shared state of an agent's task, if it still has the version given; nobody's change is ever overwritten. \
             On 'version_conflict', read the state again and decide anew.",
        ),
        tool::<Answer, TaskAnswer>(
            "answer",
            "Answer a question",
            Kind::AddsOnce,
            "Answers a question that a task has asked.",
        ),
        tool::<Approve, TaskAnswer>(
            "approve",
            "Approve",
            Kind::Decides,
            "Approves what a task asks for: it will do it. Look at the approval's tool and arguments first (get_task), and ask the person \
             you work for.",
        ),
        tool::<Deny, TaskAnswer>("deny", "Deny", Kind::Decides, "Denies what a task asks for."),
        tool::<Cancel, TaskAnswer>(
            "cancel_task",
            "Cancel a task",
            Kind::Decides,
            "Ends a task; with 'undo', what it did is taken back.",
        ),
        tool::<ReadArtifact, ArtifactPiece>(
            "read_artifact",
            "Read an artifact",
            Kind::Reads,
            "Reads a large result of a task, piece by piece: 'next_offset' of an answer is the 'offset' of the next call.",
        ),
    ]
});

fn tool<I: ToSchema, O: ToSchema>(name: &'static str, title: &str, kind: Kind, description: &'static str) -> Tool {
    let annotations = ToolAnnotations::with_title(title).open_world(matches!(kind, Kind::Adds | Kind::Decides));
    let annotations = match kind {
        Kind::Reads => annotations.read_only(true).idempotent(true).destructive(false),
        Kind::Adds => annotations.read_only(false).idempotent(false).destructive(false),
        Kind::AddsOnce => annotations.read_only(false).idempotent(true).destructive(false),
        Kind::Decides => annotations.read_only(false).idempotent(true).destructive(true),
    };
    let mut takes = schema::<I>();
    takes.insert("additionalProperties".to_owned(), false.into());
    Tool::new(name, description, takes)
        .with_title(title)
        .with_raw_output_schema(schema::<O>().into())
        .with_annotations(annotations)
}

/// Reads a tool's arguments, with the same checks as the body of a request.
pub(super) fn arguments<T: serde::de::DeserializeOwned>(given: &JsonObject) -> Result<T, Problem> {
    let bytes =
        serde_json::to_vec(given).map_err(|_| Problem::new("invalid_json", "the arguments are no JSON"))?;
    parse(&bytes)
}

/// A word that a tool does not know is refused: the model meant something by it.
pub(super) fn known_words(tool: &Tool, given: &JsonObject) -> Result<(), Problem> {
    let Some(Value::Object(known)) = tool.input_schema.get("properties") else { return Ok(()) };
    match given.keys().find(|word| !known.contains_key(*word)) {
        None => Ok(()),
        Some(word) => {
            let known: Vec<&str> = known.keys().map(String::as_str).collect();
            Err(Problem::field(
                &word.escape_debug().to_string(),
                format!("is not known; there are {}", known.join(", ")),
            ))
        }
    }
}

/// Calls a tool; `None` when there is none of this name. `wait_task` is in `wait.rs`.
pub(super) async fn call(
    app: &App,
    caller: &Caller,
    name: &str,
    given: &JsonObject,
    traceparent: Option<String>,
) -> Option<Result<Value, Problem>> {
    let client = &caller.client;
    Some(match name {
        "submit_task" => submit(app, caller, given, traceparent).await,
        "get_task" => match arguments::<OfTask>(given).and_then(|of| task_id(&of.task_id)) {
            Ok(task) => task_answer(client, task).await,
            Err(problem) => Err(problem),
        },
        "list_tasks" => match arguments::<ListParams>(given) {
            Ok(params) => params.page(client).await.and_then(|page| written(&page)),
            Err(problem) => Err(problem),
        },
        "get_state" => match arguments::<OfTask>(given).and_then(|of| task_id(&of.task_id)) {
            Ok(task) => resources::state(client, task, None).await,
            Err(problem) => Err(problem),
        },
        "patch_state" => patch(caller, given).await,
        "answer" => answer(caller, given).await,
        "approve" => approve(caller, given).await,
        "deny" => deny(caller, given).await,
        "cancel_task" => cancel(caller, given).await,
        "read_artifact" => read_artifact(app, caller, given).await,
        _ => return None,
    })
}

async fn submit(
    app: &App,
    caller: &Caller,
    given: &JsonObject,
    traceparent: Option<String>,
) -> Result<Value, Problem> {
    caller.has(Role::Submitter)?;
    let submit: Submit = arguments(given)?;
    written(&accept(submit, app, &caller.client, traceparent).await?)
}

async fn patch(caller: &Caller, given: &JsonObject) -> Result<Value, Problem> {
    caller.has(Role::Operator)?;
    let patch: Patch = arguments(given)?;
    let task = task_id(&patch.task_id)?;
    let commands = Commands { client: &caller.client, task };
    let version = commands.patch(patch.patch.get().as_bytes(), Some(patch.version)).await?;
    Ok(json!({"version": version, "state": resources::state(&caller.client, task, None).await?}))
}

async fn answer(caller: &Caller, given: &JsonObject) -> Result<Value, Problem> {
    caller.has(Role::Operator)?;
    let answer: Answer = arguments(given)?;
    let task = task_id(&answer.task_id)?;
    caller.client.answer(task, answer.question_id.as_deref(), &answer.answer).await?;
    task_answer(&caller.client, task).await
}

async fn approve(caller: &Caller, given: &JsonObject) -> Result<Value, Problem> {
    caller.has(Role::Operator)?;
    let approve: Approve = arguments(given)?;
    let task = task_id(&approve.task_id)?;
    let (approval, reason) = (approve.approval_id.as_deref(), approve.reason.as_deref());
    let commands = Commands { client: &caller.client, task };
    commands.approval(approval, true, reason, approve.digest.as_deref()).await?;
    task_answer(&caller.client, task).await
}

async fn deny(caller: &Caller, given: &JsonObject) -> Result<Value, Problem> {
    caller.has(Role::Operator)?;
    let deny: Deny = arguments(given)?;
    let task = task_id(&deny.task_id)?;
    let commands = Commands { client: &caller.client, task };
    commands.approval(deny.approval_id.as_deref(), false, deny.reason.as_deref(), None).await?;
    task_answer(&caller.client, task).await
}

async fn cancel(caller: &Caller, given: &JsonObject) -> Result<Value, Problem> {
    caller.has(Role::Operator)?;
    let cancel: Cancel = arguments(given)?;
    let task = task_id(&cancel.task_id)?;
    let body = json!({"undo": cancel.undo, "reason": cancel.reason}).to_string();
    Commands { client: &caller.client, task }.cancel(body.as_bytes()).await?;
    task_answer(&caller.client, task).await
}

async fn read_artifact(app: &App, caller: &Caller, given: &JsonObject) -> Result<Value, Problem> {
    let asked: ReadArtifact = arguments(given)?;
    let task = task_id(&asked.task_id)?;
    let limit = match asked.limit {
        None => PIECE,
        Some(limit @ MIN_PIECE..=MAX_PIECE) => limit,
        Some(_) => return Err(Problem::field("limit", format!("must be {MIN_PIECE} to {MAX_PIECE}"))),
    };
    let piece = piece(app, caller, task, &asked.artifact_id, asked.offset, limit).await?;
    let mut bytes = &piece.bytes[..];
    let mut text = None;
    if !piece.binary {
        let (readable, rest) = whole_characters(bytes);
        if rest < 4 {
            // A character that the end of the piece cuts in two comes with the next one.
            bytes = &bytes[..readable.len()];
            text = Some(readable.to_owned());
        }
    }
    let base64 = text.is_none().then(|| STANDARD.encode(bytes));
    let end = asked.offset.saturating_add(bytes.len() as u64);
    written(&ArtifactPiece {
        artifact_id: asked.artifact_id,
        bytes: piece.size,
        offset: asked.offset,
        next_offset: (end < piece.size && !bytes.is_empty()).then_some(end),
        text,
        base64,
    })
}

/// The beginning of the bytes that is text, and how many are left.
fn whole_characters(bytes: &[u8]) -> (&str, usize) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text, 0),
        Err(error) => {
            let (text, rest) = bytes.split_at(error.valid_up_to());
            // Checked by the first call.
            (std::str::from_utf8(text).unwrap_or_default(), rest.len())
        }
    }
}

/// A task and what of it waits for people.
pub(super) async fn task_answer(client: &Client, task: TaskId) -> Result<Value, Problem> {
    let found = client.task(task).await?;
    let mut open = client.asks(task).await?;
    // What a task that has ended still asked for waits for nobody.
    open.retain(|ask| !found.state.is_final() && ask.decided_at.is_none() && ask.status.name() == "pending");
    let mut answer = written(&found)?;
    answer["approvals"] = written(&of_kind::<Approval>(open.clone(), AskKind::Approval))?;
    answer["questions"] = written(&of_kind::<Question>(open, AskKind::Question))?;
    Ok(answer)
}

fn written(answer: &impl Serialize) -> Result<Value, Problem> {
    serde_json::to_value(answer).map_err(|error| {
        tracing::error!(%error, "an answer cannot be written");
        Problem::new("internal", "the answer cannot be written as JSON")
    })
}
