//! The events of one task.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use longhaul::Events;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{CHUNK_BYTES, Source, answer, resume_from, write_frame};
use crate::auth::Anyone;
use crate::body::{OfTask, Params};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(events))
}

#[derive(Deserialize, IntoParams)]
pub(super) struct EventsParams {
    /// The number of the last event seen; the header `Last-Event-ID` goes before it.
    #[param(minimum = 0)]
    after: Option<u64>,
    /// A stream token, for browsers.
    #[allow(dead_code, reason = "read where it is found out who asks")]
    access_token: Option<String>,
}

/// The events of a task as they happen, as SSE: `id:` is the event's number. Ends after the final event.
#[utoipa::path(get, path = "/v1/tasks/{id}/events", tag = "streams",
    params(("id" = String, Path, description = "The task's id"), EventsParams,
           ("Last-Event-ID" = Option<String>, Header, description = "The number of the last event seen")),
    responses((status = 200, description = "The stream; each `data:` is an event", content_type = "text/event-stream", body = schema::EventDoc),
              (status = 204, description = "The task has ended and its final event was seen")))]
async fn events(
    State(app): State<App>,
    Anyone(caller): Anyone,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Params(params): Params<EventsParams>,
) -> Result<Response, Problem> {
    caller.may_follow(id)?;
    let after = resume_from(&headers, params.after)?;
    let task = caller.client.task(id).await?;
    if task.state.is_final() && after >= task.last_seq {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(answer(&app, TaskEvents(caller.client.events(id, after).await?)))
}

struct TaskEvents(Events);

impl Source for TaskEvents {
    async fn next(&mut self, frames: &mut String) -> Result<bool, Problem> {
        let mut event = self.0.next().await?;
        while let Some(told) = event {
            let data = serde_json::to_string(&told)
                .map_err(|_| Problem::new("internal", "an event cannot be written"))?;
            write_frame(frames, &told.seq.to_string(), &data);
            if frames.len() >= CHUNK_BYTES {
                return Ok(true);
            }
            event = self.0.next_ready();
        }
        Ok(!frames.is_empty())
    }
}
