//! What is answered when something is wrong: RFC 9457 problems with a stable `code`. Every code has a page
//! with cause and remedy, `docs/errors/CODE.md`.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use longhaul::request::BadRequest;
use longhaul::store::{ControlRefused, StoreError, SubmitRefused};
use longhaul::task::Invalid;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Every code that is answered, with its status and a title that never changes.
pub const CODES: &[(&str, StatusCode, &str)] = &[
    ("invalid_json", StatusCode::BAD_REQUEST, "The body is not acceptable JSON"),
    ("invalid_parameter", StatusCode::BAD_REQUEST, "A parameter or header is wrong"),
    ("unauthorized", StatusCode::UNAUTHORIZED, "A valid token is needed"),
    ("forbidden", StatusCode::FORBIDDEN, "The token's role does not allow this"),
    ("host_not_allowed", StatusCode::FORBIDDEN, "This name of the server is not known to it"),
    ("origin_not_allowed", StatusCode::FORBIDDEN, "Pages of this origin may not do this"),
    ("not_found", StatusCode::NOT_FOUND, "There is no such thing"),
    ("unknown_handler", StatusCode::NOT_FOUND, "No worker has registered this handler"),
    ("method_not_allowed", StatusCode::METHOD_NOT_ALLOWED, "This path has other methods"),
    ("not_acceptable", StatusCode::NOT_ACCEPTABLE, "The client does not take what would be answered"),
    ("request_timeout", StatusCode::REQUEST_TIMEOUT, "The request did not arrive in time"),
    ("wrong_state", StatusCode::CONFLICT, "The task's state does not allow this"),
    ("version_conflict", StatusCode::PRECONDITION_FAILED, "It was changed meanwhile"),
    ("too_large", StatusCode::PAYLOAD_TOO_LARGE, "The body is too large"),
    ("unsupported_media_type", StatusCode::UNSUPPORTED_MEDIA_TYPE, "The body is not of a type that is taken"),
    ("range_not_satisfiable", StatusCode::RANGE_NOT_SATISFIABLE, "There are no such bytes"),
    ("invalid_field", StatusCode::UNPROCESSABLE_ENTITY, "A field of the body is wrong"),
    ("key_conflict", StatusCode::UNPROCESSABLE_ENTITY, "The idempotency key belongs to another request"),
    ("queue_full", StatusCode::TOO_MANY_REQUESTS, "The queue is full"),
    ("rate_limited", StatusCode::TOO_MANY_REQUESTS, "The tenant asks too often"),
    ("internal", StatusCode::INTERNAL_SERVER_ERROR, "The server failed"),
    ("store_unavailable", StatusCode::SERVICE_UNAVAILABLE, "The store does not answer"),
    ("artifacts_unavailable", StatusCode::SERVICE_UNAVAILABLE, "The storage of artifacts does not answer"),
    ("outbox_full", StatusCode::SERVICE_UNAVAILABLE, "Too many deliveries are waiting"),
    ("subscriber_behind", StatusCode::SERVICE_UNAVAILABLE, "A subscriber of events is too far behind"),
    ("overloaded", StatusCode::SERVICE_UNAVAILABLE, "The server has as much to do as it takes on"),
    ("starting", StatusCode::SERVICE_UNAVAILABLE, "The server is starting"),
    ("draining", StatusCode::SERVICE_UNAVAILABLE, "The server is stopping"),
];

/// A refusal on its way to the client.
#[derive(Clone, Debug)]
pub struct Problem {
    code: &'static str,
    status: StatusCode,
    title: &'static str,
    detail: String,
    more: Map<String, Value>,
    retry_after: Option<Duration>,
}

/// The form in which it is written.
#[derive(Serialize)]
struct Body<'a> {
    #[serde(rename = "type")]
    kind: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    code: &'a str,
    #[serde(flatten)]
    more: &'a Map<String, Value>,
}

impl Problem {
    /// A problem with one of [`CODES`] and a sentence that says what happened and what to do.
    pub fn new(code: &'static str, detail: impl Into<String>) -> Self {
        let known = CODES.iter().find(|(known, ..)| *known == code);
        debug_assert!(known.is_some(), "'{code}' is not in the table of codes");
        let (status, title) = known
            .map_or((StatusCode::INTERNAL_SERVER_ERROR, "The server failed"), |&(_, status, title)| {
                (status, title)
            });
        Self { code, status, title, detail: detail.into(), more: Map::new(), retry_after: None }
    }

    /// A query parameter, path segment or header that cannot be used.
    pub fn parameter(name: &str, problem: impl std::fmt::Display) -> Self {
        Self::new("invalid_parameter", format!("'{name}' {problem}")).with("parameter", name)
    }

    /// A field of a body that cannot be used.
    pub fn field(name: &str, problem: impl std::fmt::Display) -> Self {
        Self::new("invalid_field", format!("'{name}' {problem}")).with("field", name)
    }

    /// There is no such task, or none of this tenant.
    pub fn no_task(id: &str) -> Self {
        Self::new("not_found", format!("there is no task '{}'", shown(id)))
    }

    /// There is no such thing.
    pub fn not_found(what: &str, id: &str) -> Self {
        Self::new("not_found", format!("there is no {what} '{}'", shown(id)))
    }

    /// Adds a member for programs.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.more.insert(name.to_owned(), value.into());
        self
    }

    /// Says when to try again.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// Its code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// As JSON: the body of the answer, and the error of a WebSocket's or a batch's entry.
    pub fn to_json(&self) -> Value {
        let body = Body {
            kind: format!("urn:longhaul:problem:{}", self.code),
            title: self.title,
            status: self.status.as_u16(),
            detail: &self.detail,
            code: self.code,
            more: &self.more,
        };
        serde_json::to_value(body).unwrap_or_else(|_| json!({"code": self.code}))
    }

    /// Its sentence.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Its title.
    pub fn title(&self) -> &'static str {
        self.title
    }

    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

/// What a client sent, cut and printable: it may be anything.
fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(64).flat_map(char::escape_debug).collect();
    if text.chars().nth(64).is_some() {
        shown.push('…');
    }
    shown
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::warn!(code = self.code, detail = %self.detail, "answered with an error");
        }
        let mut response = (self.status, self.to_json().to_string()).into_response();
        // For those who answer people instead of programs.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(after) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            // What the store said stands in the log, not in the answer: it may name hosts and users.
            StoreError::Unavailable(why) => {
                tracing::warn!(%why, "the store does not answer");
                Self::new("store_unavailable", "the store does not answer; try again")
                    .retry_after(Duration::from_secs(1))
            }
            other => {
                tracing::error!(error = %other, "the store failed");
                Self::new("internal", "the store failed; the server's log says how")
            }
        }
    }
}

impl From<BadRequest> for Problem {
    fn from(bad: BadRequest) -> Self {
        match bad {
            BadRequest::Json(why) => Self::new("invalid_json", why),
            BadRequest::Shape(why) => Self::new("invalid_field", why),
            BadRequest::Field { field, why } => Self::field(&field, why),
        }
    }
}

impl From<Invalid> for Problem {
    fn from(invalid: Invalid) -> Self {
        if invalid.field == "input" && invalid.problem.contains("bytes; at most") {
            return Self::new("too_large", invalid.to_string()).with("field", invalid.field);
        }
        Self::field(invalid.field, invalid.problem)
    }
}

impl From<SubmitRefused> for Problem {
    fn from(refused: SubmitRefused) -> Self {
        let detail = refused.to_string();
        match refused {
            SubmitRefused::QueueFull { queue, max, retry_after } => Self::new("queue_full", detail)
                .with("queue", queue)
                .with("max_pending", max)
                .retry_after(retry_after),
            SubmitRefused::KeyConflict { key, existing } => {
                Self::new("key_conflict", detail).with("key", key).with("task_id", existing.to_string())
            }
            SubmitRefused::UnknownHandler { handler } => {
                Self::new("unknown_handler", detail).with("handler", handler)
            }
            SubmitRefused::OutboxFull { retry_after, .. } => {
                Self::new("outbox_full", detail).retry_after(retry_after)
            }
            SubmitRefused::SubscriberBehind { retry_after, subscriber, .. } => {
                Self::new("subscriber_behind", detail).with("subscriber", subscriber).retry_after(retry_after)
            }
            SubmitRefused::ParentEnded { .. } => Self::new("wrong_state", detail),
            SubmitRefused::Invalid(invalid) => invalid.into(),
        }
    }
}

impl From<ControlRefused> for Problem {
    fn from(refused: ControlRefused) -> Self {
        match refused {
            ControlRefused::NotFound => Self::new("not_found", "there is no such task"),
            ControlRefused::WrongState(why) => Self::new("wrong_state", why),
            ControlRefused::VersionConflict { current } => {
                Self::new("version_conflict", refused.to_string()).with("version", current)
            }
            ControlRefused::LockLost { .. } => Self::new("wrong_state", refused.to_string()),
            ControlRefused::Invalid(invalid) => invalid.into(),
        }
    }
}

impl From<longhaul::Error> for Problem {
    fn from(error: longhaul::Error) -> Self {
        match error {
            longhaul::Error::Store(error) => error.into(),
            longhaul::Error::Refused(refused) => refused.into(),
            longhaul::Error::Control(refused) => refused.into(),
            longhaul::Error::NotFound(id) => Self::no_task(&id.to_string()),
            longhaul::Error::NoSchedule(name) => Self::not_found("schedule", &name),
            longhaul::Error::NoEndpoint(name) => Self::not_found("endpoint", &name),
            longhaul::Error::NoDelivery { delivery, .. } => Self::not_found("delivery", &delivery.to_string()),
            longhaul::Error::Invalid(invalid) => invalid.into(),
            other @ longhaul::Error::TimedOut { .. } => Self::new("request_timeout", other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_page_with_cause_and_remedy() {
        let pages = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        for (code, status, title) in CODES {
            let page = pages.join(format!("{code}.md"));
            let text = std::fs::read_to_string(&page).unwrap_or_else(|_| panic!("{} is missing", page.display()));
            assert!(text.contains("## Cause") && text.contains("## Remedy"), "{code}: no cause or no remedy");
            assert!(
                text.contains(&status.as_u16().to_string()) && text.contains(title),
                "{code}: other status or title"
            );
        }
        let written = std::fs::read_dir(&pages).expect("docs/errors is there").count();
        assert_eq!(written, CODES.len(), "a page without a code");
    }

    #[test]
    fn what_a_client_sent_is_shown_cut_and_printable() {
        let problem = Problem::no_task(&format!("a\r\nb{}", "x".repeat(100)));
        assert!(problem.detail.len() < 110 && !problem.detail.contains('\n'), "{}", problem.detail);
    }
}
