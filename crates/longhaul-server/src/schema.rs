//! The shapes of answers, for the OpenAPI document. What is really written comes from the engine's own types; a
//! test holds the two together by checking answers against the document.
#![allow(dead_code, reason = "described, never built")]

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A task as it stands.
#[derive(Serialize, ToSchema)]
pub(crate) struct Task {
    #[schema(format = "uuid")]
    id: String,
    /// The same as `id`.
    #[schema(format = "uuid")]
    task_id: String,
    handler: String,
    queue: String,
    state: State,
    phase: Phase,
    #[schema(required)]
    waiting_for: Option<Waiting>,
    #[schema(minimum = 0, maximum = 9)]
    priority: i32,
    /// The handler's argument, any JSON.
    input: Value,
    /// The input once more, when it is a string.
    #[schema(nullable = false)]
    user_input: Option<String>,
    /// What the handler returned, any JSON.
    result: Value,
    #[schema(required)]
    error: Option<TaskError>,
    /// Runs that ended with the handler's error.
    #[schema(minimum = 0)]
    attempts: i64,
    /// Leases lost since the last recorded step.
    #[schema(minimum = 0)]
    crashes: i64,
    #[schema(required)]
    progress: Option<Progress>,
    /// What it used: tokens, cost.
    usage: Value,
    tags: BTreeMap<String, String>,
    #[schema(required, format = "uuid")]
    parent_id: Option<String>,
    #[schema(required, format = "uuid")]
    fork_of: Option<String>,
    #[schema(required, format = "uuid")]
    undo_of: Option<String>,
    /// The task that undoes it, by request.
    #[schema(required, format = "uuid")]
    undone_by: Option<String>,
    #[schema(format = "date-time")]
    created_at: String,
    #[schema(format = "date-time")]
    updated_at: String,
    #[schema(required, format = "date-time")]
    finished_at: Option<String>,
    #[schema(required, format = "date-time")]
    deadline: Option<String>,
    /// The number of its newest event.
    #[schema(minimum = 0)]
    last_seq: i64,
    /// The fence of its newest run.
    #[schema(minimum = 0)]
    fence: i64,
    /// Where its result goes, by the bus.
    #[schema(nullable = false)]
    reply: Option<Reply>,
}

/// Where a task's result goes.
#[derive(Serialize, ToSchema)]
pub(crate) struct Reply {
    /// The destination, as the broker calls it.
    to: String,
    /// What the receiver knows the request by.
    #[schema(nullable = false)]
    correlation_id: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Pending,
    Running,
    Waiting,
    Completed,
    Failed,
    Cancelled,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    Forward,
    Compensating,
}

/// What a suspended task waits for.
#[derive(Serialize, ToSchema)]
pub(crate) struct Waiting {
    /// `in_doubt`, `approval`, `question`, `signal`, `timer`, `child` or `lock`.
    kind: String,
    id: String,
    #[schema(format = "date-time")]
    since: Option<String>,
    #[schema(format = "date-time")]
    until: Option<String>,
}

/// Why a task or a step failed.
#[derive(Serialize, ToSchema)]
pub(crate) struct TaskError {
    code: String,
    message: String,
    retryable: bool,
    details: Value,
    /// What caused it, another error.
    cause: Value,
}

/// What a person watches.
#[derive(Serialize, ToSchema)]
pub(crate) struct Progress {
    #[schema(format = "uuid")]
    task_id: String,
    #[schema(minimum = 0)]
    step: i64,
    /// 0 when unknown.
    #[schema(minimum = 0)]
    total_step: i64,
    /// `queued`, `thinking`, `tool_call`, `tool_result`, `waiting`, `retrying`, `compensating`, `completed` or `error`.
    status: String,
    #[schema(nullable = false)]
    tool: Option<String>,
    message: String,
    #[schema(format = "date-time")]
    time: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TaskList {
    tasks: Vec<Task>,
    /// Give it as `cursor` to get the next ones; null after the last.
    #[schema(required)]
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct BatchAnswer {
    /// In the order of the tasks.
    results: Vec<BatchResult>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct BatchResult {
    /// What a submit of its own would have been answered with.
    status: i32,
    #[schema(nullable = false)]
    task: Option<Task>,
    #[schema(nullable = false)]
    error: Option<Problem>,
}

/// RFC 9457.
#[derive(Serialize, ToSchema)]
pub(crate) struct Problem {
    #[serde(rename = "type")]
    kind: String,
    title: String,
    status: i32,
    /// What happened and what to do.
    detail: String,
    /// Stable, for programs.
    code: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Steps {
    steps: Vec<Step>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Step {
    name: String,
    kind: String,
    #[schema(required)]
    effect: Option<String>,
    state: String,
    #[schema(minimum = 0)]
    attempt: i64,
    result: Value,
    #[schema(required)]
    error: Option<TaskError>,
    #[schema(required, format = "date-time")]
    started_at: Option<String>,
    #[schema(required, format = "date-time")]
    finished_at: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Checkpoints {
    checkpoints: Vec<Checkpoint>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Checkpoint {
    id: Value,
    iteration: i64,
    bytes: i64,
    #[schema(format = "date-time")]
    created_at: String,
    valid: bool,
    #[schema(required)]
    why_not: Option<String>,
}

/// An agent's state and its version.
#[derive(Serialize, ToSchema)]
pub(crate) struct StateAnswer {
    #[schema(minimum = 0)]
    version: i64,
    state: Value,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Artifacts {
    artifacts: Vec<Artifact>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Artifact {
    artifact_id: String,
    #[serde(rename = "type")]
    kind: String,
    summary: String,
    #[schema(minimum = 0)]
    bytes: i64,
    #[schema(nullable = false)]
    step: Option<String>,
}

/// Why a task stands where it stands, and what would change that.
#[derive(Serialize, ToSchema)]
pub(crate) struct Why {
    sentence: String,
    code: String,
    details: Value,
    #[schema(required, format = "date-time")]
    until: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct EventDoc {
    #[schema(minimum = 1)]
    seq: i64,
    #[schema(format = "uuid")]
    task_id: String,
    #[serde(rename = "type")]
    kind: String,
    #[schema(format = "date-time")]
    time: String,
    run: i64,
    #[schema(required)]
    step: Option<String>,
    data: Value,
}

/// What a stream of a task tells.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
pub(crate) enum Told {
    Event(EventDoc),
    Live(LiveDoc),
}

/// Text of a model as it is written; not stored, and without `id:`. Text of a higher attempt replaces what came before.
#[derive(Serialize, ToSchema)]
pub(crate) struct LiveDoc {
    /// `live`
    #[serde(rename = "type")]
    kind: String,
    run: i64,
    step: String,
    #[schema(minimum = 1)]
    attempt: i64,
    /// The number of the last event before it.
    #[schema(minimum = 0)]
    after: i64,
    /// How many characters of this attempt came before; a gap says that some were lost.
    #[schema(minimum = 0)]
    offset: i64,
    text: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Handlers {
    handlers: Vec<Handler>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Handler {
    name: String,
    #[schema(format = "date-time")]
    first_seen: String,
    /// How many workers have it now.
    #[schema(minimum = 0)]
    workers: i64,
}

/// Nothing more is to be said.
#[derive(Serialize, ToSchema)]
pub(crate) struct Empty {}

/// A webhook of the tenant.
#[derive(Serialize, ToSchema)]
pub(crate) struct Endpoint {
    name: String,
    url: String,
    /// Empty: the final ones.
    events: Vec<String>,
    #[schema(format = "date-time")]
    created_at: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Endpoints {
    endpoints: Vec<Endpoint>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct WebhookSecret {
    /// `whsec_…`
    secret: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Deliveries {
    deliveries: Vec<Delivery>,
}

/// What became of an event for one destination.
#[derive(Serialize, ToSchema)]
pub(crate) struct Delivery {
    #[schema(format = "uuid")]
    id: String,
    #[schema(format = "uuid")]
    task_id: String,
    /// `webhook`, or `endpoint:NAME`.
    destination: String,
    #[schema(minimum = 1)]
    seq: i64,
    #[serde(rename = "type")]
    kind: String,
    url: String,
    status: DeliveryStatus,
    #[schema(minimum = 0)]
    attempts: i64,
    /// What the receiver answered last.
    #[schema(required)]
    http_status: Option<i32>,
    #[schema(required)]
    error: Option<String>,
    #[schema(required, format = "date-time")]
    next_at: Option<String>,
    #[schema(format = "date-time")]
    created_at: String,
    #[schema(format = "date-time")]
    updated_at: String,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeliveryStatus {
    Pending,
    Delivered,
    Failed,
    Dead,
}

/// A token without its secret.
#[derive(Serialize, ToSchema)]
pub(crate) struct Token {
    #[schema(format = "uuid")]
    id: String,
    name: String,
    tenant: String,
    /// `viewer`, `submitter`, `operator` or `admin`.
    role: String,
    #[schema(format = "date-time")]
    created_at: String,
    #[schema(required, format = "date-time")]
    expires_at: Option<String>,
    #[schema(required, format = "date-time")]
    revoked_at: Option<String>,
    #[schema(required, format = "date-time")]
    last_used_at: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Tokens {
    tokens: Vec<Token>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct NewToken {
    token: Token,
    /// Told this once: `lh_…`
    secret: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Schedules {
    schedules: Vec<Schedule>,
}

/// A schedule and its next tick.
#[derive(Serialize, ToSchema)]
pub(crate) struct Schedule {
    name: String,
    #[schema(required)]
    cron: Option<String>,
    #[schema(required)]
    time_zone: Option<String>,
    #[schema(required)]
    every: Option<String>,
    /// `skip` or `run_once`.
    missed: String,
    paused: bool,
    #[schema(required, format = "date-time")]
    next_at: Option<String>,
    #[schema(required, format = "date-time")]
    last_at: Option<String>,
    #[schema(required, format = "uuid")]
    last_task: Option<String>,
    /// Why the newest tick has no task.
    #[schema(required)]
    last_error: Option<String>,
    task: ScheduledTask,
}

/// What is submitted at every tick.
#[derive(Serialize, ToSchema)]
pub(crate) struct ScheduledTask {
    handler: String,
    input: Value,
    queue: String,
    priority: i32,
    tags: BTreeMap<String, String>,
    max_attempts: i64,
    #[schema(required)]
    concurrency_key: Option<String>,
    /// How long the task of a tick may take from then on.
    #[schema(required)]
    timeout: Option<String>,
    #[schema(required)]
    webhook: Option<Value>,
    #[schema(required)]
    reply: Option<Value>,
}

/// A change of an agent's state.
#[derive(Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatePatch {
    #[schema(nullable = false)]
    set_goal: Option<String>,
    #[schema(nullable = false)]
    add_facts: Option<Vec<Fact>>,
    #[schema(nullable = false)]
    replace_plan: Option<Vec<String>>,
    #[schema(nullable = false)]
    current_step: Option<String>,
    #[schema(nullable = false)]
    add_questions: Option<Vec<String>>,
    #[schema(nullable = false)]
    resolve_questions: Option<Vec<ResolvedQuestion>>,
    #[schema(nullable = false)]
    add_artifacts: Option<Vec<Artifact>>,
    #[schema(nullable = false)]
    add_risk_flags: Option<Vec<String>>,
    #[schema(nullable = false)]
    remove_risk_flags: Option<Vec<String>>,
}

#[derive(Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fact {
    key: String,
    value: Value,
    #[schema(nullable = false)]
    source: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResolvedQuestion {
    question: String,
    answer: String,
}
