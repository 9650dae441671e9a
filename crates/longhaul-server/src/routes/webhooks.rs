//! What was delivered to webhooks, and the endpoints that hear of every task.

use axum::http::StatusCode;
use axum::response::Response;
use longhaul::Webhook;
use serde::Deserialize;
use serde_json::json;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::{Admin, Operator, Viewer};
use crate::body::{Json, OfTask, Segment};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(deliveries))
        .routes(routes!(redeliver))
        .routes(routes!(endpoints))
        .routes(routes!(save, remove))
        .routes(routes!(secret))
        .routes(routes!(dead))
}

/// What was sent about a task, and how it was answered.
#[utoipa::path(get, path = "/v1/tasks/{id}/deliveries", tag = "webhooks", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Its deliveries, newest first", body = schema::Deliveries)))]
async fn deliveries(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"deliveries": caller.client.deliveries(id).await?})))
}

/// Sends an event once more.
#[utoipa::path(post, path = "/v1/tasks/{id}/deliveries/{did}/redeliver", tag = "webhooks",
    params(("id" = String, Path, description = "The task's id"), ("did" = String, Path, description = "The delivery's id")),
    responses((status = 202, description = "It will be sent", body = schema::Empty)))]
async fn redeliver(Operator(caller): Operator, OfTask(id, delivery): OfTask<String>) -> Result<Response, Problem> {
    let delivery = delivery.parse().map_err(|_| Problem::not_found("delivery", &delivery))?;
    caller.client.redeliver(id, delivery).await?;
    Ok(json_answer(StatusCode::ACCEPTED, &json!({})))
}

/// Deliveries that were given up, newest first.
#[utoipa::path(get, path = "/v1/webhooks/dead", tag = "webhooks",
    responses((status = 200, description = "At most 1,000", body = schema::Deliveries)))]
async fn dead(Viewer(caller): Viewer) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"deliveries": caller.client.dead_deliveries(1_000).await?})))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct EndpointBody {
    /// http or https.
    url: String,
    /// Which types: `task.completed`, `task.*`, `*`; the final ones without.
    #[serde(default)]
    events: Vec<String>,
}

/// The endpoints that hear of every task of the tenant.
#[utoipa::path(get, path = "/v1/webhooks", tag = "webhooks",
    responses((status = 200, description = "By name", body = schema::Endpoints)))]
async fn endpoints(Viewer(caller): Viewer) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"endpoints": caller.client.endpoints().await?})))
}

/// Adds an endpoint, or replaces it. It hears of tasks that are submitted from then on.
#[utoipa::path(put, path = "/v1/webhooks/{name}", tag = "webhooks", request_body = EndpointBody,
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, description = "The endpoint", body = schema::Endpoint)))]
async fn save(
    Admin(caller): Admin,
    Segment(name): Segment,
    Json(body): Json<EndpointBody>,
) -> Result<Response, Problem> {
    let webhook = Webhook { url: body.url, events: body.events };
    Ok(json_answer(StatusCode::OK, &caller.client.save_endpoint(&name, webhook).await?))
}

/// Removes an endpoint. What it was to hear of tasks that were submitted before is dropped.
#[utoipa::path(delete, path = "/v1/webhooks/{name}", tag = "webhooks", params(("name" = String, Path, description = "Its name")),
    responses((status = 204, description = "It is gone")))]
async fn remove(Admin(caller): Admin, Segment(name): Segment) -> Result<StatusCode, Problem> {
    caller.client.remove_endpoint(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What deliveries are signed with.
#[utoipa::path(get, path = "/v1/webhooks/secret", tag = "webhooks",
    responses((status = 200, description = "The secret, whsec_…", body = schema::WebhookSecret)))]
async fn secret(Admin(caller): Admin) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"secret": caller.client.webhook_secret().await?.reveal()})))
}
