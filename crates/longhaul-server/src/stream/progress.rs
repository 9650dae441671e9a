//! Progress: what a person watches, made of a task's events.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use longhaul::{Event, Events, Progress, TaskId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{CHUNK_BYTES, Source, answer, resume_from, write_frame};
use crate::auth::Anyone;
use crate::body::{Params, task_id};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(progress))
}

#[derive(Deserialize, IntoParams)]
struct ProgressParams {
    /// The task.
    #[param(required)]
    task_id: Option<String>,
    /// The number of the last event seen; the header `Last-Event-ID` goes before it.
    #[param(minimum = 0)]
    after: Option<u64>,
    /// A stream token, for browsers.
    #[allow(dead_code, reason = "read where it is found out who asks")]
    access_token: Option<String>,
}

/// The progress of a task as SSE. `completed` and `error` are final, all else is not.
#[utoipa::path(get, path = "/api/progress", tag = "streams",
    params(ProgressParams, ("Last-Event-ID" = Option<String>, Header, description = "The number of the last event seen")),
    responses((status = 200, description = "The stream; each `data:` is a ProgressUpdate", content_type = "text/event-stream", body = schema::Progress),
              (status = 204, description = "The task has ended and its final update was seen")))]
async fn progress(
    State(app): State<App>,
    Anyone(caller): Anyone,
    headers: HeaderMap,
    Params(params): Params<ProgressParams>,
) -> Result<Response, Problem> {
    let id = params.task_id.filter(|id| !id.is_empty());
    let id = task_id(&id.ok_or_else(|| Problem::parameter("task_id", "is missing"))?)?;
    caller.may_follow(id)?;
    let after = resume_from(&headers, params.after)?;
    let task = caller.client.task(id).await?;
    if task.state.is_final() && after >= task.last_seq {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let place =
        if after == 0 { (0, 0) } else { task.progress.map_or((0, 0), |known| (known.step, known.total_step)) };
    let events = caller.client.events(id, after).await?;
    Ok(answer(&app, Updates { events, watched: Watched { task: id, place } }))
}

struct Updates {
    events: Events,
    watched: Watched,
}

impl Source for Updates {
    async fn next(&mut self, frames: &mut String) -> Result<bool, Problem> {
        loop {
            let Some(event) = self.events.next().await? else { return Ok(false) };
            let mut event = Some(event);
            while let Some(told) = event {
                if let Some(update) = self.watched.update(&told) {
                    let data = serde_json::to_string(&update)
                        .map_err(|_| Problem::new("internal", "an update cannot be written"))?;
                    write_frame(frames, &told.seq.to_string(), &data);
                }
                if frames.len() >= CHUNK_BYTES {
                    return Ok(true);
                }
                event = self.events.next_ready();
            }
            if !frames.is_empty() {
                return Ok(true);
            }
        }
    }
}

/// Where the task stood when it last said so: events that do not say keep it.
struct Watched {
    task: TaskId,
    place: (u32, u32),
}

impl Watched {
    /// What an event means to someone who watches, if anything.
    fn update(&mut self, event: &Event) -> Option<Progress> {
        let step = event.step.as_deref().unwrap_or_default();
        let text = |pointer: &str| event.data.pointer(pointer).and_then(|text| text.as_str()).unwrap_or_default();
        let (status, tool, message) = match event.kind.as_str() {
            "progress" => return self.said(event),
            "task.submitted" => ("queued", None, "Queued.".to_owned()),
            "task.started" => ("thinking", None, "Started.".to_owned()),
            "task.resumed" => ("queued", None, "Goes on.".to_owned()),
            "task.waiting" => {
                let kind = text("/kind");
                ("waiting", None, format!("Waits for {}.", if kind.is_empty() { "something" } else { kind }))
            }
            "step.completed" => ("tool_result", Some(step), format!("{step}: done.")),
            "step.failed" => ("retrying", Some(step), format!("{step}: {}", text("/error/message"))),
            "saga.compensated" => ("compensating", None, "What was done is undone.".to_owned()),
            "saga.compensation_failed" => ("compensating", None, "Something could not be undone.".to_owned()),
            "task.completed" => ("completed", None, "Done.".to_owned()),
            "task.failed" | "task.cancelled" => ("error", None, text("/error/message").to_owned()),
            _ => return None,
        };
        let (step, total_step) = self.place;
        let tool = tool.map(str::to_owned);
        Some(Progress {
            task_id: self.task,
            step,
            total_step,
            status: status.to_owned(),
            tool,
            message,
            time: event.time,
        })
    }

    /// What the handler itself said. Its words for the end are not the end.
    fn said(&mut self, event: &Event) -> Option<Progress> {
        let mut update: Progress = serde_json::from_value(event.data.clone()).ok()?;
        match update.status.as_str() {
            "completed" => "tool_result".clone_into(&mut update.status),
            "error" => "retrying".clone_into(&mut update.status),
            _ => {}
        }
        if update.step > 0 || update.total_step > 0 {
            self.place = (update.step, update.total_step);
        } else {
            (update.step, update.total_step) = self.place;
        }
        Some(update)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;
    use serde_json::{Value, json};

    fn event(kind: &str, step: Option<&str>, data: Value) -> Event {
        let task_id = TaskId::new();
        Event {
            seq: 1,
            task_id,
            kind: kind.into(),
            time: Timestamp::UNIX_EPOCH,
            run: 1,
            step: step.map(str::to_owned),
            data,
        }
    }

    fn said(status: &str, step: u32, total: u32) -> Event {
        let data = json!({"task_id": TaskId::new(), "step": step, "total_step": total, "status": status, "message": "m",
            "time": Timestamp::UNIX_EPOCH});
        event("progress", None, data)
    }

    #[test]
    fn only_the_end_of_the_task_is_final() {
        let mut watched = Watched { task: TaskId::new(), place: (0, 0) };
        let mut status = |event: &Event| watched.update(event).map(|update| update.status);
        for (told, expected) in [
            (said("completed", 1, 2), "tool_result"),
            (said("error", 1, 2), "retrying"),
            (said("thinking", 1, 2), "thinking"),
            (event("task.completed", None, json!({})), "completed"),
            (event("task.failed", None, json!({"error": {"message": "broke"}})), "error"),
            (event("task.cancelled", None, json!({"error": {"message": "by ann"}})), "error"),
        ] {
            assert_eq!(status(&told).as_deref(), Some(expected), "{}", told.kind);
        }
        assert_eq!(status(&event("state.patched", None, json!({}))), None);
    }

    #[test]
    fn a_bar_stays_where_it_was_while_nothing_new_is_said() {
        let mut watched = Watched { task: TaskId::new(), place: (0, 0) };
        watched.update(&said("thinking", 3, 10)).expect("an update");
        let update = watched.update(&event("step.completed", Some("dns"), json!({}))).expect("an update");
        assert_eq!((update.step, update.total_step, update.tool.as_deref()), (3, 10, Some("dns")));
    }
}
