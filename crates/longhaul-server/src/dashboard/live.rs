//! What keeps pages live: that something changed, the events of a task as they come, and pages of those that came before.

use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use longhaul::AllEvents;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use super::session::Visitor;
use crate::body::{OfTask, Params};
use crate::problem::Problem;
use crate::routes::json_answer;
use crate::state::App;
use crate::stream::sse::TaskStream;
use crate::stream::{Source, answer, resume_from, write_live_frame};

/// What happens within this time is told as one change.
const GATHER: Duration = Duration::from_millis(300);
/// How many events a page of the log has at most, and how much they may weigh.
const MOST: usize = 500;
const MOST_BYTES: usize = 2 * 1024 * 1024;

/// Says that tasks changed, some times a second at most: what, the page finds out itself. The first word comes at once, for what
/// changed since the page was made or the connection was lost.
pub(super) async fn changes(State(app): State<App>, visitor: Visitor) -> Result<Response, Problem> {
    let events = visitor.client().all_events(None).await?;
    Ok(answer(&app, Changes { events, untold: true }))
}

struct Changes {
    events: AllEvents,
    /// Something was read and not told yet. Kept between calls, which may be dropped at every await.
    untold: bool,
}

impl Source for Changes {
    async fn next(&mut self, frames: &mut String) -> Result<bool, Problem> {
        if !self.untold {
            self.events.next().await?;
            self.untold = true;
            let until = Instant::now() + GATHER;
            while Instant::now() < until
                && let Ok(event) = timeout_at(until, self.events.next()).await
            {
                event?;
            }
        }
        self.untold = false;
        write_live_frame(frames, "{}");
        Ok(true)
    }
}

#[derive(Deserialize)]
pub(super) struct LiveParams {
    after: Option<u64>,
}

/// The events of a task as they come, and what its model writes. Goes on after the final event: the task may be resumed.
pub(super) async fn task(
    State(app): State<App>,
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    headers: HeaderMap,
    Params(params): Params<LiveParams>,
) -> Result<Response, Problem> {
    let after = resume_from(&headers, params.after)?;
    let live = visitor.client().live(id);
    let events = visitor.client().events(id, after).await?.endless();
    Ok(answer(&app, TaskStream::new(events, live, after)))
}

#[derive(Deserialize)]
pub(super) struct LogParams {
    #[serde(default)]
    after: u64,
    limit: Option<usize>,
}

/// The events of a task after a number, as many as there are at once.
pub(super) async fn log(
    visitor: Visitor,
    OfTask(id, ()): OfTask,
    Params(params): Params<LogParams>,
) -> Result<Response, Problem> {
    let client = visitor.client();
    let last = client.task(id).await?.last_seq;
    let limit = params.limit.unwrap_or(MOST).clamp(1, MOST);
    let mut found = Vec::new();
    let (mut seq, mut weight) = (params.after, 0);
    let mut events = client.events(id, params.after).await?;
    // Up to the last one that is there, so that nothing is waited for.
    while seq < last && found.len() < limit && weight < MOST_BYTES {
        let Some(event) = events.next_stored().await? else { break };
        seq = event.seq;
        let event =
            serde_json::to_string(&event).map_err(|_| Problem::new("internal", "an event cannot be written"))?;
        weight += event.len();
        let event = serde_json::value::RawValue::from_string(event);
        found.push(event.map_err(|_| Problem::new("internal", "an event cannot be written"))?);
    }
    Ok(json_answer(StatusCode::OK, &json!({"events": found, "last": last})))
}
