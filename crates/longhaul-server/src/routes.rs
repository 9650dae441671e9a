//! The routes, by what they are about. `docs/http.md` and the OpenAPI document list them for users.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;

use crate::problem::Problem;
use crate::state::App;

pub(crate) mod artifacts;
mod control;
mod fleet;
pub(crate) mod health;
mod inside;
pub(crate) mod people;
mod schedules;
pub(crate) mod tasks;
mod tokens;
mod webhooks;

pub(crate) use artifacts::AsItIs;
pub(crate) use control::Commands;

/// Everything that needs to know who asks.
pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(tasks::router())
        .merge(control::router())
        .merge(inside::router())
        .merge(artifacts::router())
        .merge(people::router())
        .merge(webhooks::router())
        .merge(fleet::router())
        .merge(schedules::router())
        .merge(tokens::router())
}

/// An answer of JSON.
pub(crate) fn json_answer(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => {
            let mut response = (status, bytes).into_response();
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => {
            tracing::error!(%error, "an answer cannot be written");
            Problem::new("internal", "the answer cannot be written as JSON").into_response()
        }
    }
}
