//! Reading requests: bodies, query strings and paths, with every malformed one answered as a problem
//! before anything else happens, the same whatever the store. JSON is read by [`longhaul::request`], which is strict.

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use longhaul::TaskId;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::problem::Problem;
use crate::state::App;

/// A JSON object. No body at all is read as `{}`, so that requests whose fields are all optional need none.
pub(crate) struct Json<T>(pub(crate) T);

/// Any JSON, as it was written.
pub(crate) struct AnyJson(pub(crate) Box<RawValue>);

impl FromRequest<App> for AnyJson {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &App) -> Result<Self, Problem> {
        let headers = request.headers().clone();
        let bytes = read(request.into_body(), &headers, app).await?;
        Ok(Self(longhaul::request::read_value(&bytes)?))
    }
}

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &App) -> Result<Self, Problem> {
        let headers = request.headers().clone();
        let bytes = read(request.into_body(), &headers, app).await?;
        parse(&bytes).map(Self)
    }
}

/// Reads a body of JSON within the server's bounds of size and time.
pub(crate) async fn read(body: Body, headers: &HeaderMap, app: &App) -> Result<Bytes, Problem> {
    let bytes = read_bytes(body, headers, app).await?;
    if !bytes.is_empty() && !is_json(headers) {
        return Err(Problem::new(
            "unsupported_media_type",
            "the body must be JSON, with Content-Type: application/json",
        ));
    }
    Ok(bytes)
}

/// Reads a body of any kind within the server's bounds of size and time.
pub(crate) async fn read_bytes(body: Body, headers: &HeaderMap, app: &App) -> Result<Bytes, Problem> {
    let settings = app.settings();
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return Err(Problem::new("unsupported_media_type", "a body must come without Content-Encoding"));
    }
    let collected =
        tokio::time::timeout(settings.request_timeout, Limited::new(body, settings.max_body).collect());
    match collected.await {
        Err(_) => {
            let seconds = settings.request_timeout.as_secs();
            Err(Problem::new("request_timeout", format!("the body did not arrive within {seconds} s")))
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let max = settings.max_body;
            Err(Problem::new("too_large", format!("the body has more than {max} bytes")).with("max", max))
        }
        Ok(Err(_)) => Err(Problem::new("invalid_json", "the body was cut off or malformed in transfer")),
        Ok(Ok(body)) => Ok(body.to_bytes()),
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind == "application/merge-patch+json" || kind.ends_with("+json")
}

/// Reads an object into a type, after looking through all of it.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    Ok(longhaul::request::read(bytes)?)
}

/// The query string.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<App> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let query = parts.uri.query().unwrap_or_default();
        if query.contains("%00") {
            return Err(Problem::new("invalid_parameter", "the query string has the character U+0000"));
        }
        match Query::<T>::from_request_parts(parts, app).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(error) => Err(Problem::new("invalid_parameter", error.body_text())),
        }
    }
}

/// The task that the path names, and the path's other segments.
pub(crate) struct OfTask<T = ()>(pub(crate) TaskId, pub(crate) T);

impl FromRequestParts<App> for OfTask {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let segment = Segment::from_request_parts(parts, app).await?;
        Ok(Self(task_id(&segment.0)?, ()))
    }
}

impl FromRequestParts<App> for OfTask<String> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let path = Path::<(String, String)>::from_request_parts(parts, app).await;
        let Path((id, other)) = path.map_err(|_| Problem::new("not_found", "there is no such path"))?;
        Ok(Self(task_id(&id)?, other))
    }
}

/// The only variable segment of the path.
pub(crate) struct Segment(pub(crate) String);

impl FromRequestParts<App> for Segment {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let path = Path::<String>::from_request_parts(parts, app).await;
        let Path(segment) = path.map_err(|_| Problem::new("not_found", "there is no such path"))?;
        Ok(Self(segment))
    }
}

/// What is not an id names no task.
pub(crate) fn task_id(text: &str) -> Result<TaskId, Problem> {
    text.parse().map_err(|_| Problem::no_task(text))
}
