//! Whether the server lives and is ready, its numbers, and the description of all routes.

use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::Viewer;
use crate::problem::Problem;
use crate::state::App;

/// How long the store has to answer before the server counts as not ready.
const PATIENCE: Duration = Duration::from_secs(5);

/// For everyone.
pub(crate) fn open_router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(live)).routes(routes!(ready))
}

/// For those who may read.
pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(metrics))
}

/// The process lives.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, description = "It does", body = serde_json::Value)))]
async fn live() -> Response {
    json_answer(StatusCode::OK, &json!({"status": "live"}))
}

/// The store is open and answers, and the server is not stopping.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, description = "It is", body = serde_json::Value)))]
async fn ready(State(app): State<App>) -> Result<Response, Problem> {
    if app.stopping().is_cancelled() {
        return Err(Problem::new("draining", "the server is stopping"));
    }
    let answer = tokio::time::timeout(PATIENCE, app.client()?.queues()).await;
    answer.map_err(|_| Problem::new("store_unavailable", "the store does not answer in time"))??;
    Ok(json_answer(StatusCode::OK, &json!({"status": "ready"})))
}

/// Numbers for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "health",
    responses((status = 200, description = "The numbers", content_type = "application/openmetrics-text", body = String)))]
async fn metrics(State(app): State<App>, Viewer(caller): Viewer) -> Result<Response, Problem> {
    let text = app.metrics().text(&caller.client).await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
