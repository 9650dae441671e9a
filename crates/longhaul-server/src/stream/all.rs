//! The events of all tasks of a tenant: at least once, ordered per task, with opaque cursors.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use longhaul::{AllEvents, Cursor};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Source, answer, write_frame};
use crate::auth::Viewer;
use crate::body::Params;
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(events))
}

#[derive(Deserialize, IntoParams)]
struct AllParams {
    /// Only these types, separated by commas: `task.completed`, `task.*`.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Where the last stream ended: the `id:` of its last event. `0` is the oldest that is kept; without, what comes from now on.
    cursor: Option<String>,
}

/// The events of all tasks as they happen, as SSE: `id:` is a cursor to resume from. An event may come twice after
/// a reconnect; its `task_id` and `seq` tell.
#[utoipa::path(get, path = "/v1/events", tag = "streams",
    params(AllParams, ("Last-Event-ID" = Option<String>, Header, description = "The cursor of the last event seen")),
    responses((status = 200, description = "The stream; each `data:` is an event", content_type = "text/event-stream", body = schema::EventDoc)))]
async fn events(
    State(app): State<App>,
    Viewer(caller): Viewer,
    headers: HeaderMap,
    Params(params): Params<AllParams>,
) -> Result<Response, Problem> {
    let seen =
        headers.get("last-event-id").map(|value| value.to_str().unwrap_or("?").to_owned()).or(params.cursor);
    let cursor: Option<Cursor> = seen
        .map(|text| text.parse().map_err(|_| Problem::parameter("cursor", "is none that this server gave")))
        .transpose()?;
    let foreign = |_| Problem::parameter("cursor", "is none that this server gave");
    let events = match caller.client.all_events(cursor.as_ref()).await {
        Err(longhaul::Error::Invalid(invalid)) => return Err(foreign(invalid)),
        events => events?,
    };
    let kinds: Vec<&str> = params.kind.iter().flat_map(|kinds| kinds.split(',')).collect();
    let events = match kinds.as_slice() {
        [] => events,
        kinds => {
            events.types(kinds.iter().copied()).map_err(|invalid| Problem::parameter("type", invalid.problem))?
        }
    };
    Ok(answer(&app, Everything(events)))
}

struct Everything(AllEvents);

impl Source for Everything {
    async fn next(&mut self, frames: &mut String) -> Result<bool, Problem> {
        let (event, cursor) = self.0.next().await?;
        let data =
            serde_json::to_string(&event).map_err(|_| Problem::new("internal", "an event cannot be written"))?;
        write_frame(frames, &cursor.to_string(), &data);
        Ok(true)
    }
}
