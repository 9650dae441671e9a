//! Live: events as SSE ([`sse`]) and over WebSocket ([`ws`]), the progress that people watch ([`progress`]), and
//! the events of all tasks ([`all`]).
//!
//! What a stream gives comes from the task's log, read from the last number on; nothing is kept for a reader but a
//! page of it. Live text is for who reads now: it stands between the events, without a number. A reader that does not read is cut off by the connection's write timeout and can resume exactly.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use longhaul::LiveText;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;

use crate::metrics::Reader;
use crate::problem::Problem;
use crate::state::App;

mod all;
mod progress;
pub(crate) mod sse;
mod ws;

pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().merge(sse::router()).merge(progress::router()).merge(all::router()).merge(ws::router())
}

/// How much of a page is written at once.
const CHUNK_BYTES: usize = 32 * 1024;

/// Where the frames of a stream come from.
pub(crate) trait Source: Send + 'static {
    /// Appends the next frames, waiting for them if there are none yet; `false` when there is nothing more.
    /// Dropping the future loses nothing.
    fn next(&mut self, frames: &mut String) -> impl Future<Output = Result<bool, Problem>> + Send;
}

/// One frame of a stream.
fn write_frame(frames: &mut String, id: &str, data: &str) {
    // JSON has no line breaks of its own.
    frames.extend(["id: ", id, "\ndata: ", data, "\n\n"]);
}

/// One frame that is not an event: it has no number, so who comes back does not ask for it.
pub(crate) fn write_live_frame(frames: &mut String, data: &str) {
    frames.extend(["data: ", data, "\n\n"]);
}

/// Text of a model as it is written, `last` being the number of the last event given before it.
fn live_frame(told: &LiveText, last: u64) -> Value {
    let LiveText { run, step, attempt, after, text } = told;
    json!({"type": "live", "run": run, "step": step, "attempt": attempt, "after": last, "offset": after, "text": text})
}

/// An answer that goes on until its source ends, its reader leaves, or the server stops.
pub(crate) fn answer(app: &App, source: impl Source) -> Response {
    let reader = app.metrics().sse_reader();
    let frames = frames(source, app.settings().heartbeat, app.stopping().clone(), reader);
    let mut response = Body::from_stream(frames).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Proxies that buffer would hold events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Writer<S> {
    source: S,
    heartbeat: Duration,
    stopping: CancellationToken,
    /// Counts in the metrics for as long as it lives.
    _reader: Reader,
    greeted: bool,
}

fn frames(
    source: impl Source,
    heartbeat: Duration,
    stopping: CancellationToken,
    reader: Reader,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> {
    let writer = Writer { source, heartbeat, stopping, _reader: reader, greeted: false };
    unfold(writer, |mut writer| async move {
        if !writer.greeted {
            // Headers leave with the first bytes: the reader knows at once that it is connected.
            writer.greeted = true;
            return Some((Ok(Bytes::from_static(b": longhaul\n\n")), writer));
        }
        let mut frames = String::new();
        let more = tokio::select! {
            more = writer.source.next(&mut frames) => more,
            () = tokio::time::sleep(writer.heartbeat) => {
                return Some((Ok(Bytes::from_static(b": alive\n\n")), writer));
            }
            () = writer.stopping.cancelled() => Ok(false),
        };
        match more {
            Ok(true) => Some((Ok(Bytes::from(frames)), writer)),
            Ok(false) => None,
            Err(problem) => {
                tracing::debug!(?problem, "a stream was cut off; its reader can resume");
                None
            }
        }
    })
}

/// The number that a reader has seen: the header of a reconnecting EventSource, or `?after=`.
pub(crate) fn resume_from(headers: &HeaderMap, after: Option<u64>) -> Result<u64, Problem> {
    let Some(value) = headers.get("last-event-id") else { return Ok(after.unwrap_or(0)) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| Problem::parameter("Last-Event-ID", "must be the number of an event of this task"))
}
