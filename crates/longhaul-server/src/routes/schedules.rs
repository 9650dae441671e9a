//! Schedules: tasks that are submitted again and again.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use longhaul::request::{Span, Submit};
use longhaul::task::Deadline;
use longhaul::{Missed, Schedule, When};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use super::tasks::new_task;
use crate::auth::{Operator, Viewer};
use crate::body::{Json, Segment};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show, save, remove))
        .routes(routes!(pause))
        .routes(routes!(resume))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ScheduleBody {
    /// Minute, hour, day, month, weekday; with six fields the first is the second.
    cron: Option<String>,
    /// An IANA name, such as `Europe/Berlin`; `UTC` without.
    time_zone: Option<String>,
    /// Instead of `cron`: every so often, `10m`.
    #[schema(value_type = Option<String>)]
    every: Option<Span>,
    /// What happens to ticks that nobody was there for.
    missed: Option<MissedBody>,
    /// What is submitted at every tick.
    task: Submit,
}

#[derive(Deserialize, ToSchema, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum MissedBody {
    Skip,
    RunOnce,
}

/// As spans are read: `1h 30m`.
fn span(time: Duration) -> String {
    format!("{:#}", jiff::SignedDuration::try_from(time).unwrap_or_default())
}

/// As it was saved, so that it can be changed and saved again.
fn shown(schedule: &Schedule) -> Value {
    let (cron, time_zone, every) = match &schedule.when {
        When::Cron { expr, time_zone } => (Some(expr.clone()), Some(time_zone.clone()), None),
        When::Every(every) => (None, None, Some(span(*every))),
    };
    let task = &schedule.task;
    // No schedule has a moment for its deadline.
    let timeout = match task.deadline {
        Some(Deadline::After(time)) => Some(span(time)),
        Some(Deadline::At(_)) | None => None,
    };
    json!({
        "name": schedule.name, "cron": cron, "time_zone": time_zone, "every": every, "missed": schedule.missed,
        "paused": schedule.paused, "next_at": schedule.next_at, "last_at": schedule.last_at,
        "last_task": schedule.last_task, "last_error": schedule.last_error,
        "task": {
            "handler": task.handler, "input": task.input, "queue": task.queue, "priority": task.priority,
            "tags": task.tags, "max_attempts": task.max_attempts, "concurrency_key": task.concurrency_key,
            "timeout": timeout, "webhook": task.webhook, "reply": task.reply,
        },
    })
}

/// All schedules, by name.
#[utoipa::path(get, path = "/v1/schedules", tag = "schedules",
    responses((status = 200, description = "The schedules", body = schema::Schedules)))]
async fn list(Viewer(caller): Viewer) -> Result<Response, Problem> {
    let schedules: Vec<Value> = caller.client.schedules().await?.iter().map(shown).collect();
    Ok(json_answer(StatusCode::OK, &json!({"schedules": schedules})))
}

/// One schedule.
#[utoipa::path(get, path = "/v1/schedules/{name}", tag = "schedules", params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The schedule", body = schema::Schedule)))]
async fn show(Viewer(caller): Viewer, Segment(name): Segment) -> Result<Response, Problem> {
    let schedules = caller.client.schedules().await?;
    let found = schedules.iter().find(|schedule| schedule.name == name);
    found
        .map(|found| json_answer(StatusCode::OK, &shown(found)))
        .ok_or_else(|| Problem::not_found("schedule", &name))
}

/// Creates a schedule, or replaces it. A paused one stays paused.
#[utoipa::path(put, path = "/v1/schedules/{name}", tag = "schedules", request_body = ScheduleBody,
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The schedule with its next tick", body = schema::Schedule)))]
async fn save(
    State(app): State<App>,
    Operator(caller): Operator,
    Segment(name): Segment,
    Json(body): Json<ScheduleBody>,
) -> Result<Response, Problem> {
    let task = new_task(body.task, &app, &caller.client).await?;
    let schedule = match (body.cron, body.every) {
        (Some(cron), None) => {
            let schedule = Schedule::cron(name, cron, task);
            match body.time_zone {
                Some(zone) => schedule.time_zone(zone),
                None => schedule,
            }
        }
        (None, Some(_)) if body.time_zone.is_some() => {
            return Err(Problem::field("time_zone", "goes only with 'cron'"));
        }
        (None, Some(every)) => Schedule::every(name, every.0, task),
        _ => return Err(Problem::field("cron", "or 'every' must say when; give one of them")),
    };
    let missed = match body.missed {
        None | Some(MissedBody::Skip) => Missed::Skip,
        Some(MissedBody::RunOnce) => Missed::RunOnce,
    };
    let saved = caller.client.schedule(schedule.missed(missed)).await?;
    Ok(json_answer(StatusCode::OK, &shown(&saved)))
}

/// Removes a schedule; the tasks it submitted stay.
#[utoipa::path(delete, path = "/v1/schedules/{name}", tag = "schedules", params(("name" = String, Path, description = "Its name")),
    responses((status = 204, description = "It is gone")))]
async fn remove(Operator(caller): Operator, Segment(name): Segment) -> Result<StatusCode, Problem> {
    caller.client.unschedule(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets a schedule rest.
#[utoipa::path(post, path = "/v1/schedules/{name}/pause", tag = "schedules", params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The schedule", body = schema::Schedule)))]
async fn pause(Operator(caller): Operator, Segment(name): Segment) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &shown(&caller.client.pause_schedule(&name).await?)))
}

/// Lets a schedule go on with its next tick.
#[utoipa::path(post, path = "/v1/schedules/{name}/resume", tag = "schedules", params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The schedule", body = schema::Schedule)))]
async fn resume(Operator(caller): Operator, Segment(name): Segment) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &shown(&caller.client.resume_schedule(&name).await?)))
}
