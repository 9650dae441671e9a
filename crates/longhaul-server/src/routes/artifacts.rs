//! What is kept outside of a task's state: the list of it, and its bytes.
//!
//! Only what stands in the task's state is given. The bytes of an id never change, so the id is their ETag. They go
//! out as they are, never compressed: ranges count these bytes.

use std::ops::Range;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    IF_NONE_MATCH, IF_RANGE, RANGE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::TryStreamExt;
use longhaul::state::ArtifactRef;
use longhaul::{Client, TaskId};
use longhaul_agent::Artifacts as Storage;
use longhaul_agent::artifact::{self, ArtifactError};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::{Caller, Viewer};
use crate::body::OfTask;
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

/// How much of an artifact is looked at to know whether it is text.
const SAMPLE_BYTES: u64 = 8 * 1024;

/// On an answer whose bytes must go out as they are.
#[derive(Clone, Copy)]
pub(crate) struct AsItIs;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(artifacts)).routes(routes!(content))
}

/// The large results of a task that are kept outside of its state.
#[utoipa::path(get, path = "/v1/tasks/{id}/artifacts", tag = "inside", params(("id" = String, Path, description = "The task's id")),
    responses((status = 200, description = "Its artifacts", body = schema::Artifacts)))]
async fn artifacts(Viewer(caller): Viewer, OfTask(id, ()): OfTask) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"artifacts": known(&caller.client, id).await?})))
}

async fn known(client: &Client, task: TaskId) -> Result<Vec<ArtifactRef>, Problem> {
    Ok(client.state(task).await?.map(|(_, state)| state.artifacts).unwrap_or_default())
}

/// The bytes of an artifact, all of them or a range.
#[utoipa::path(get, path = "/v1/tasks/{id}/artifacts/{artifact_id}", tag = "inside",
    params(("id" = String, Path, description = "The task's id"), ("artifact_id" = String, Path, description = "The artifact's id"),
           ("Range" = Option<String>, Header, description = "One range of bytes, like `bytes=0-999` or `bytes=-500`; several are answered with everything"),
           ("If-Range" = Option<String>, Header, description = "The range only if this is still the ETag"),
           ("If-None-Match" = Option<String>, Header, description = "Nothing if this is the ETag")),
    responses(
        (status = 200, description = "The artifact", headers(("ETag" = String, description = "Its id")),
         content((Vec<u8> = "application/octet-stream"), (String = "text/plain"))),
        (status = 206, description = "The range", headers(("Content-Range" = String, description = "Which bytes, of how many")),
         content((Vec<u8> = "application/octet-stream"), (String = "text/plain"))),
        (status = 304, description = "It is the one that the client has")))]
pub(crate) async fn content(
    State(app): State<App>,
    Viewer(caller): Viewer,
    OfTask(task, id): OfTask<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let (storage, size) = find(&app, &caller, task, &id).await?;
    let failed = |error: ArtifactError| refused(&error, &id);
    let tag = format!("\"{id}\"");
    if named(&headers, &IF_NONE_MATCH, &tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    let wanted = headers.get(RANGE).and_then(|range| range.to_str().ok());
    let wanted = wanted.filter(|_| !headers.contains_key(IF_RANGE) || named(&headers, &IF_RANGE, &tag));
    let wanted = wanted.map_or(Wanted::Everything, |range| Wanted::read(range, size));
    let (range, partial) = match wanted {
        Wanted::Everything => (0..size, false),
        Wanted::Part(range) => (range, true),
        Wanted::Nothing => return Ok(unsatisfiable(size)),
    };
    let sample = storage.read(&caller.tenant, &id, 0..SAMPLE_BYTES).await.map_err(failed)?;
    let bytes = storage.stream(&caller.tenant, &id, range.clone()).await.map_err(failed)?;
    let told = bytes.map_err(|error| {
        tracing::warn!(%error, "an artifact was cut off in the middle");
        std::io::Error::other(error)
    });
    let mut answer = Body::from_stream(told).into_response();
    answer.extensions_mut().insert(AsItIs);
    let mut set = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            answer.headers_mut().insert(name, value);
        }
    };
    if artifact::is_binary(&sample) {
        set(CONTENT_TYPE, "application/octet-stream");
        set(CONTENT_DISPOSITION, &format!("attachment; filename=\"{id}\""));
    } else {
        set(CONTENT_TYPE, "text/plain; charset=utf-8");
    }
    // What a tool has put out must not become a page of ours.
    set(X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(ACCEPT_RANGES, "bytes");
    set(ETAG, &tag);
    set(CACHE_CONTROL, "private, no-cache");
    set(CONTENT_LENGTH, &(range.end - range.start).to_string());
    if partial {
        set(CONTENT_RANGE, &format!("bytes {}-{}/{size}", range.start, range.end - 1));
        *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(answer)
}

/// Where the bytes of a task's artifact are, and how many.
async fn find<'a>(app: &'a App, caller: &Caller, task: TaskId, id: &str) -> Result<(&'a Storage, u64), Problem> {
    if !known(&caller.client, task).await?.iter().any(|known| known.artifact_id == id) {
        return Err(Problem::not_found("artifact", id));
    }
    let storage = app.settings().artifacts.as_ref().ok_or_else(|| {
        Problem::new("artifacts_unavailable", "this server was started without a storage of artifacts")
    })?;
    let size = storage.info(&caller.tenant, id).await.map_err(|error| refused(&error, id))?;
    Ok((storage, size.ok_or_else(|| Problem::not_found("content of artifact", id))?))
}

/// Some bytes of an artifact.
pub(crate) struct Piece {
    pub(crate) bytes: Bytes,
    /// How many there are in all.
    pub(crate) size: u64,
    /// Whether the artifact is no text.
    pub(crate) binary: bool,
}

/// At most `limit` bytes of a task's artifact from `offset` on.
pub(crate) async fn piece(
    app: &App,
    caller: &Caller,
    task: TaskId,
    id: &str,
    offset: u64,
    limit: u64,
) -> Result<Piece, Problem> {
    let (storage, size) = find(app, caller, task, id).await?;
    let failed = |error: ArtifactError| refused(&error, id);
    let sample = storage.read(&caller.tenant, id, 0..SAMPLE_BYTES).await.map_err(failed)?;
    let end = offset.saturating_add(limit).min(size);
    let bytes = storage.read(&caller.tenant, id, offset.min(end)..end).await.map_err(failed)?;
    Ok(Piece { bytes, size, binary: artifact::is_binary(&sample) })
}

/// Which bytes are asked for.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    /// All, also when what is asked for cannot be understood: that is how HTTP has it.
    Everything,
    /// These, at least one.
    Part(Range<u64>),
    /// Some that are not there.
    Nothing,
}

impl Wanted {
    fn read(header: &str, size: u64) -> Self {
        let Some((unit, range)) = header.split_once('=') else { return Self::Everything };
        let Some((first, last)) = range.trim().split_once('-') else { return Self::Everything };
        if !unit.trim().eq_ignore_ascii_case("bytes") || last.contains(',') {
            return Self::Everything;
        }
        let number =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().unwrap_or(u64::MAX));
        let range = match (first, last) {
            ("", "") => return Self::Everything,
            ("", suffix) => number(suffix).map(|suffix| size.saturating_sub(suffix)..size),
            (first, "") => number(first).map(|first| first..size),
            (first, last) => number(first).zip(number(last)).and_then(|(first, last)| {
                // The last is included.
                (first <= last).then(|| first..last.saturating_add(1).min(size))
            }),
        };
        match range {
            None => Self::Everything,
            Some(range) if range.is_empty() => Self::Nothing,
            Some(range) => Self::Part(range),
        }
    }
}

/// Whether a header names this ETag.
fn named(headers: &HeaderMap, name: &HeaderName, tag: &str) -> bool {
    let listed = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    listed.flat_map(|value| value.split(',')).any(|value| value.trim() == tag || value.trim() == "*")
}

fn unsatisfiable(size: u64) -> Response {
    let problem = Problem::new("range_not_satisfiable", format!("the artifact has {size} bytes"));
    let mut answer = problem.with("bytes", size).into_response();
    if let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}")) {
        answer.headers_mut().insert(CONTENT_RANGE, value);
    }
    answer
}

fn refused(error: &ArtifactError, id: &str) -> Problem {
    match error {
        // An id that someone outside gave to something elsewhere.
        ArtifactError::BadId(_) | ArtifactError::NotFound(_) => Problem::not_found("content of artifact", id),
        error => {
            // What the storage said stands in the log, not in the answer: it may name hosts and paths.
            tracing::warn!(%error, "the storage of artifacts failed");
            Problem::new("artifacts_unavailable", "the storage of artifacts does not answer; try again")
                .retry_after(Duration::from_secs(5))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_read_as_http_has_it() {
        let read = |header| Wanted::read(header, 1_000);
        assert_eq!(read("bytes=0-0"), Wanted::Part(0..1));
        assert_eq!(read("bytes=100-"), Wanted::Part(100..1_000));
        assert_eq!(read("bytes=-5"), Wanted::Part(995..1_000));
        assert_eq!(read("bytes=-5000"), Wanted::Part(0..1_000));
        assert_eq!(read("bytes=990-99999999999999999999999"), Wanted::Part(990..1_000));
        for nothing in ["bytes=1000-", "bytes=1000-2000", "bytes=-0"] {
            assert_eq!(read(nothing), Wanted::Nothing, "{nothing}");
        }
        for all in ["bytes=5-1", "bytes=0-1,5-6", "lines=1-2", "bytes=-", "bytes=a-b", "bytes", "bytes=+1-2", ""] {
            assert_eq!(read(all), Wanted::Everything, "{all}");
        }
    }
}
