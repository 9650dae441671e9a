//! The events of one task.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{BoxStream, try_unfold};
use futures_util::{StreamExt, TryStreamExt};
use longhaul::{Events, Live};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{CHUNK_BYTES, Source, answer, live_frame, resume_from, write_frame, write_live_frame};
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

/// The events of a task as they happen, as SSE: `id:` is the event's number. Ends after the final event. In between, without `id:`, comes what
/// a model writes (`"type": "live"`).
#[utoipa::path(get, path = "/v1/tasks/{id}/events", tag = "streams",
    params(("id" = String, Path, description = "The task's id"), EventsParams,
           ("Last-Event-ID" = Option<String>, Header, description = "The number of the last event seen")),
    responses((status = 200, description = "The stream; each `data:` is an event or live text", content_type = "text/event-stream", body = schema::Told),
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
    let live = caller.client.live(id);
    Ok(answer(&app, TaskStream::new(caller.client.events(id, after).await?, live, after)))
}

/// The events of a task, and what its model writes meanwhile.
pub(crate) struct TaskStream {
    /// Frames of events. A stream, so that reading goes on where it was whatever else comes in between.
    events: BoxStream<'static, Result<(String, u64), Problem>>,
    live: Live,
    /// The number of the last event given.
    last: u64,
}

impl TaskStream {
    pub(crate) fn new(events: Events, live: Live, last: u64) -> Self {
        let events = try_unfold(events, |mut events| async move {
            Ok(event_frames(&mut events).await?.map(|frames| (frames, events)))
        });
        Self { events: events.boxed(), live, last }
    }
}

impl Source for TaskStream {
    async fn next(&mut self, frames: &mut String) -> Result<bool, Problem> {
        tokio::select! {
            // An event never waits for live text.
            biased;
            events = self.events.try_next() => {
                let Some((events, last)) = events? else { return Ok(false) };
                frames.push_str(&events);
                self.last = last;
                Ok(true)
            }
            Some(text) = self.live.next() => {
                write_live_frame(frames, &live_frame(&text, self.last).to_string());
                Ok(true)
            }
        }
    }
}

/// As many frames as can be had at once, waiting for the first, and the number of the last; `None` when there is
/// nothing more.
async fn event_frames(events: &mut Events) -> Result<Option<(String, u64)>, Problem> {
    let (mut frames, mut last) = (String::new(), None);
    let mut event = events.next().await?;
    while let Some(told) = event {
        let data =
            serde_json::to_string(&told).map_err(|_| Problem::new("internal", "an event cannot be written"))?;
        write_frame(&mut frames, &told.seq.to_string(), &data);
        last = Some(told.seq);
        if frames.len() >= CHUNK_BYTES {
            break;
        }
        event = events.next_ready();
    }
    Ok(last.map(|last| (frames, last)))
}
