//! One task: what it does now, what it did when, what it knows, what was said, and what can be done about it.

use askama::Template;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use longhaul::state::{AgentState, ArtifactRef};
use longhaul::{Client, Delivery, DeliveryStatus, Filter, State, StepInfo, StepState, Task, TaskId};
use serde_json::Value;

use super::inbox::Card;
use super::page::{Frame, render};
use super::session::Visitor;
use super::show::{self, Badge, Moment, Piece};
use super::talk::Talk;
use super::tasks::Row;
use super::timeline::{Bar, Timeline};
use crate::body::OfTask;
use crate::problem::Problem;

/// How much of an input or a result is shown.
const SHOWN: usize = 20_000;
/// How much of a step's result is shown.
const STEP_SHOWN: usize = 4_000;
/// How many children and deliveries are shown.
const LISTED: usize = 50;

/// A step with its bars.
struct Step {
    name: String,
    kind: String,
    bars: Vec<Bar>,
    told: String,
    took: Option<String>,
    state: &'static str,
    effect: String,
    attempt: u32,
    result: Option<String>,
    error: Option<String>,
}

/// A budget: how much of it is used.
struct Gauge {
    name: &'static str,
    used: String,
    of: String,
    /// Of 100.
    part: u64,
    class: &'static str,
}

impl Gauge {
    fn new(name: &'static str, used: f64, of: f64, shown: impl Fn(f64) -> String) -> Self {
        let part = if of > 0.0 { (used / of * 100.0).clamp(0.0, 100.0) } else { 0.0 };
        let class = match part {
            80.0..=99.99 => "tight",
            100.0.. => "spent",
            _ => "",
        };
        Self { name, used: shown(used), of: shown(of), part: part.round() as u64, class }
    }
}

/// An entry of the plan.
struct Planned {
    text: String,
    /// `done`, `current` or nothing.
    class: &'static str,
}

struct Kept {
    id: String,
    address: String,
    kind: String,
    summary: String,
    size: String,
}

/// What an agent knows.
struct Mind {
    goal: String,
    plan: Vec<Planned>,
    facts: Vec<(String, String, String)>,
    questions: Vec<String>,
    flags: Vec<String>,
    artifacts: Vec<Kept>,
    gauges: Vec<Gauge>,
}

impl Mind {
    fn new(id: TaskId, task: &Task, state: AgentState) -> Self {
        let current = state.plan.iter().position(|entry| *entry == state.current_step);
        let ended = task.state == State::Completed;
        let plan = state.plan.iter().enumerate().map(|(place, text)| Planned {
            text: text.clone(),
            class: match current {
                _ if ended => "done",
                Some(current) if place == current => "current",
                Some(current) if place < current => "done",
                _ => "",
            },
        });
        let usage = task.usage.clone().unwrap_or_default();
        let used = |name: &str| usage.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        let budget = &state.budget;
        let tokens = used("input_tokens") + used("output_tokens");
        let count = |value: f64| show::number(value as u64);
        let time = |value: f64| show::exact(jiff::SignedDuration::from_millis(value as i64));
        let mut gauges = vec![
            Gauge::new("Turns", used("steps"), f64::from(budget.max_steps), count),
            Gauge::new("Tokens", tokens, budget.max_llm_tokens as f64, count),
            Gauge::new("Running time", used("wall_time_ms"), budget.max_wall_time_ms as f64, time),
        ];
        if let Some(most) = budget.max_cost_usd {
            gauges.push(Gauge::new("Cost", used("cost_usd"), most, show::dollars));
        }
        let artifacts = state.artifacts.iter().map(|artifact: &ArtifactRef| Kept {
            id: artifact.artifact_id.clone(),
            address: format!(
                "/tasks/{id}/artifacts/{}",
                show::query_value(&artifact.artifact_id).replace('/', "%2F")
            ),
            kind: artifact.kind.clone(),
            summary: artifact.summary.clone(),
            size: show::bytes(artifact.bytes),
        });
        let facts = state.known_facts.iter().rev();
        Self {
            plan: plan.collect(),
            facts: facts
                .map(|fact| (fact.key.clone(), show::pretty(&fact.value, STEP_SHOWN), fact.source.clone()))
                .collect(),
            artifacts: artifacts.collect(),
            gauges,
            goal: state.goal,
            questions: state.open_questions,
            flags: state.risk_flags,
        }
    }
}

struct Sent {
    id: uuid::Uuid,
    destination: String,
    url: String,
    event: String,
    status: &'static str,
    attempts: u32,
    answer: String,
    updated: Moment,
    /// Whether it can be sent once more.
    again: bool,
}

impl Sent {
    fn new(delivery: &Delivery, now: Timestamp) -> Self {
        let answer = match (delivery.http_status, &delivery.error) {
            (Some(status), Some(error)) => format!("{status}: {error}"),
            (Some(status), None) => status.to_string(),
            (None, error) => error.clone().unwrap_or_default(),
        };
        Self {
            id: delivery.id,
            destination: delivery.destination.clone(),
            url: delivery.url.clone(),
            event: delivery.event.clone(),
            status: status_name(delivery.status),
            attempts: delivery.attempts,
            answer: show::cut(&answer, 300).0,
            updated: Moment::new(delivery.updated_at, now),
            again: delivery.status != DeliveryStatus::Pending,
        }
    }
}

pub(super) fn status_name(status: DeliveryStatus) -> &'static str {
    match status {
        DeliveryStatus::Pending => "pending",
        DeliveryStatus::Delivered => "delivered",
        DeliveryStatus::Failed => "failed",
        DeliveryStatus::Dead => "dead",
    }
}

fn state_name(state: StepState) -> &'static str {
    match state {
        StepState::Pending => "pending",
        StepState::Running => "running",
        StepState::Completed => "completed",
        StepState::Failed => "failed",
        StepState::InDoubt => "in doubt",
        StepState::Undone => "undone",
        StepState::UndoFailed => "undo failed",
    }
}

#[derive(Template)]
#[template(path = "task.html")]
struct Page {
    frame: Frame,
    id: TaskId,
    short: String,
    handler: String,
    queue: String,
    badge: Badge,
    why: Vec<Piece>,
    ended: bool,
    /// Whether a resume would open it again.
    resumable: bool,
    /// Whether it can be asked to undo what it did.
    undoable: bool,
    priority: u8,
    created: Moment,
    finished: Option<Moment>,
    took: String,
    attempts: u32,
    crashes: u32,
    deadline: Option<Moment>,
    tags: Vec<(String, String, String)>,
    kin: Vec<(&'static str, TaskId, String)>,
    cost: Option<String>,
    tokens: Option<String>,
    progress: String,
    step: u32,
    total: u32,
    done: u32,
    input: String,
    /// The input as it is, for a fork; nothing when it is too long to be edited here.
    input_json: Option<String>,
    result: Option<String>,
    error: Option<(String, String)>,
    cause: Vec<String>,
    own: Vec<Bar>,
    own_told: String,
    ticks: Vec<String>,
    folded: bool,
    steps: Vec<Step>,
    left_out: usize,
    forkable: Vec<String>,
    mind: Option<Mind>,
    talk: Talk,
    open: Vec<Card>,
    decided: Vec<Card>,
    doubt: Option<String>,
    children: Vec<Row>,
    sent: Vec<Sent>,
    last_seq: u64,
    /// Where forms of questions and approvals lead.
    next: String,
}

/// The page.
pub(super) async fn page(visitor: Visitor, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    let client = visitor.client();
    let task = client.task(id).await?;
    let children = Filter { parent: Some(id), limit: LISTED, ..Filter::default() };
    let (why, steps, state, asks, deliveries, children) = tokio::try_join!(
        client.why(id),
        client.steps(id),
        client.state(id),
        client.asks(id),
        client.deliveries(id),
        client.page(&children),
    )?;
    let timeline = timeline(client, &task).await?;
    let now = client.clock().now();
    let mut frame = Frame::new(&visitor, format!("{} {}", task.handler, show::short(id)), "tasks").await?;
    frame.stream = format!("/tasks/{id}/live?after={}", task.last_seq);
    let picture = timeline.picture(task.finished_at.unwrap_or(now));
    let end = task.finished_at.unwrap_or(now);
    let (open, decided): (Vec<_>, Vec<_>) =
        asks.iter().map(|ask| Card::new(ask, now)).partition(|card| card.status == "pending");
    let row = Row::new(&task, now);
    let doubt =
        task.waiting_for.as_ref().filter(|waiting| waiting.kind == "in_doubt").map(|waiting| waiting.id.clone());
    let kin = [
        ("Parent", task.parent_id),
        ("Fork of", task.fork_of),
        ("Undoes", task.undo_of),
        ("Undone by", task.undone_by),
    ];
    let view = Page {
        frame,
        id,
        short: row.short,
        badge: row.badge,
        why: show::sentence(&why.sentence, now),
        ended: task.state.is_final(),
        resumable: matches!(task.state, State::Failed | State::Cancelled)
            && task.undo_of.is_none()
            && task.undone_by.is_none(),
        undoable: task.state.is_final() && task.undo_of.is_none() && task.undone_by.is_none(),
        priority: row.priority,
        created: row.created,
        finished: task.finished_at.map(|at| Moment::new(at, now)),
        took: show::exact(end.duration_since(task.created_at)),
        attempts: task.attempts,
        crashes: task.crashes,
        deadline: task.deadline.map(|at| Moment::new(at, now)),
        tags: tags(&task),
        kin: kin.into_iter().filter_map(|(what, id)| id.map(|id| (what, id, show::short(id)))).collect(),
        cost: row.cost,
        tokens: show::tokens(&task).map(show::number),
        progress: row.message,
        step: row.step,
        total: row.total,
        done: row.done,
        input: show::pretty_raw(&task.input, SHOWN),
        input_json: (task.input.get().len() <= SHOWN).then(|| editable(&task)),
        result: task.result.as_ref().map(|result| show::pretty_raw(result, SHOWN)),
        error: task.error.as_ref().map(|error| (error.code.clone(), show::cut(&error.message, SHOWN).0)),
        cause: causes(&task),
        forkable: forkable(&task, &steps),
        talk: Talk::of(&steps, &timeline.calls),
        own: picture.own.bars,
        own_told: picture.own.told,
        ticks: picture.ticks,
        folded: picture.folded,
        left_out: picture.left_out,
        steps: joined(picture.rows, &steps),
        mind: state.map(|(_, state)| Mind::new(id, &task, state)),
        open,
        decided,
        doubt,
        children: children.tasks.iter().map(|child| Row::new(child, now)).collect(),
        sent: deliveries.iter().take(LISTED).map(|delivery| Sent::new(delivery, now)).collect(),
        last_seq: task.last_seq,
        next: format!("/tasks/{id}"),
        handler: task.handler,
        queue: task.queue,
    };
    Ok(render(StatusCode::OK, &view))
}

/// Its life so far, up to the events that are there.
async fn timeline(client: &Client, task: &Task) -> Result<Timeline, Problem> {
    let mut timeline = Timeline::new();
    let mut events = client.events(task.id, 0).await?;
    let mut seq = 0;
    while seq < task.last_seq {
        // A damaged log may have fewer than its task says.
        let Some(event) = events.next_stored().await? else { break };
        seq = event.seq;
        timeline.read(&event);
    }
    Ok(timeline)
}

/// The rows of the picture, with what is recorded of each.
fn joined(rows: Vec<super::timeline::Lines>, steps: &[StepInfo]) -> Vec<Step> {
    let of = |name: &str| steps.iter().rev().find(|step| step.name == name);
    rows.into_iter()
        .map(|row| {
            let step = of(&row.name);
            Step {
                state: step.map_or("", |step| state_name(step.state)),
                effect: step.and_then(|step| step.effect).map_or(String::new(), |effect| {
                    serde_json::to_value(effect)
                        .ok()
                        .and_then(|name| name.as_str().map(str::to_owned))
                        .unwrap_or_default()
                }),
                attempt: step.map_or(0, |step| step.attempt),
                result: step
                    .and_then(|step| step.result.as_ref())
                    .filter(|result| result.get() != "null")
                    .map(|result| show::pretty_raw(result, STEP_SHOWN)),
                error: step
                    .and_then(|step| step.error.as_ref())
                    .map(|error| show::cut(&error.message, STEP_SHOWN).0),
                kind: step.map_or(row.kind, |step| step.kind.to_string()),
                name: row.name,
                bars: row.bars,
                told: row.told,
                took: row.took,
            }
        })
        .collect()
}

/// The steps that a fork can begin at: those of a task that has ended, and that was not undone by request.
fn forkable(task: &Task, steps: &[StepInfo]) -> Vec<String> {
    let stands = task.state.is_final() && task.undone_by.is_none();
    let recorded = steps.iter().filter(|step| stands && step.started_at.is_some());
    let mut names: Vec<String> = recorded.map(|step| step.name.clone()).collect();
    names.dedup();
    names
}

/// The input as JSON over several lines; as it was written when it is not what it seems.
fn editable(task: &Task) -> String {
    let value: Option<Value> = serde_json::from_str(task.input.get()).ok();
    value
        .and_then(|value| serde_json::to_string_pretty(&value).ok())
        .unwrap_or_else(|| task.input.get().to_owned())
}

/// Each label, and the list of all tasks that have it.
fn tags(task: &Task) -> Vec<(String, String, String)> {
    let address = |name: &str, value: &str| format!("/?tag={}", show::query_value(&format!("{name}={value}")));
    task.tags.iter().map(|(name, value)| (name.clone(), value.clone(), address(name, value))).collect()
}

/// What caused its error, and what caused that.
fn causes(task: &Task) -> Vec<String> {
    let mut causes = Vec::new();
    let mut error = task.error.as_ref().and_then(|error| error.cause.as_deref());
    while let Some(cause) = error
        && causes.len() < 10
    {
        causes.push(format!("{}: {}", cause.code, show::cut(&cause.message, STEP_SHOWN).0));
        error = cause.cause.as_deref();
    }
    causes
}
