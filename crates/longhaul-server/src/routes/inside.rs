//! Looking into a task: steps, checkpoints, state, why it stands where it stands.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Commands, json_answer};
use crate::auth::{Operator, Viewer, grant_stream};
use crate::body::{AnyJson, OfTask};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(steps))
        .routes(routes!(checkpoints))
        .routes(routes!(state, patch_state))
        .routes(routes!(why))
        .routes(routes!(stream_token))
}

/// The steps of a task and how each ended.
#[utoipa::path(get, path = "/v1/tasks/{id}/steps", tag = "inside", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Its steps, in the order in which they began", body = schema::Steps)))]
async fn steps(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &BTreeMap::from([("steps", caller.client.steps(id).await?)])))
}

/// The snapshots a task can go on from.
#[utoipa::path(get, path = "/v1/tasks/{id}/checkpoints", tag = "inside", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Its checkpoints, newest first", body = schema::Checkpoints)))]
async fn checkpoints(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"checkpoints": caller.client.checkpoint_list(id).await?})))
}

/// An agent's state.
#[utoipa::path(get, path = "/v1/tasks/{id}/state", tag = "inside", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "The state", body = schema::StateAnswer,
               headers(("ETag" = String, description = "The version")))))]
async fn state(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    let found = caller.client.state(id).await?;
    let (version, state) = found.ok_or_else(|| Problem::not_found("state of task", &id.to_string()))?;
    Ok(with_etag(json_answer(StatusCode::OK, &json!({"version": version, "state": state})), version))
}

/// Changes an agent's state. With `If-Match`, only when it is still of that version.
#[utoipa::path(patch, path = "/v1/tasks/{id}/state", tag = "inside", request_body = schema::StatePatch,
    params(("id" = String, Path, description = "The task's id"),
           ("If-Match" = Option<String>, Header, description = "The version it must still have, as in the ETag")),
    responses((status = 200, description = "The state", body = schema::StateAnswer,
               headers(("ETag" = String, description = "The version")))))]
async fn patch_state(
    Operator(caller): Operator,
    OfTask(task, ()): OfTask,
    headers: HeaderMap,
    AnyJson(patch): AnyJson,
) -> Result<Response, Problem> {
    let version = if_match(&headers)?;
    let commands = Commands { client: &caller.client, task };
    let version = commands.patch(patch.get().as_bytes(), version).await?;
    let state = caller.client.state(task).await?.map(|(_, state)| state);
    Ok(with_etag(json_answer(StatusCode::OK, &json!({"version": version, "state": state})), version))
}

fn with_etag(mut response: Response, version: u64) -> Response {
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{version}\"")) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// The version that `If-Match` names; `*` is any.
fn if_match(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let version = text.strip_prefix("W/").unwrap_or(text).trim_matches('"').parse();
    version
        .map(Some)
        .map_err(|_| Problem::parameter("If-Match", "must be an ETag of this state, like \"3\", or *"))
}

/// What a task waits for, and what would change that.
#[utoipa::path(get, path = "/v1/tasks/{id}/why", tag = "inside", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "One sentence, and its facts", body = schema::Why)))]
async fn why(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &caller.client.why(id).await?))
}

/// A short-lived token for one task's stream.
#[derive(Serialize, ToSchema)]
struct StreamToken {
    /// To be given as `?access_token=`.
    token: String,
    #[schema(format = "date-time")]
    expires_at: String,
}

/// A token with which a browser, which cannot set headers, reads this task's stream for a few minutes.
#[utoipa::path(post, path = "/v1/tasks/{id}/stream-token", tag = "inside", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "The token", body = StreamToken)))]
async fn stream_token(
    State(app): State<App>,
    Viewer(caller): Viewer,
    OfTask(id, ()): OfTask,
) -> Result<Response, Problem> {
    caller.client.task(id).await?;
    let (token, until) = grant_stream(&app, &caller, id).await?;
    Ok(json_answer(StatusCode::OK, &StreamToken { token, expires_at: until.to_string() }))
}
