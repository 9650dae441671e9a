//! Why a call of a model failed, in terms of what to do about it.

use std::fmt;
use std::time::Duration;

use longhaul::TaskError;
use serde_json::Value;

/// The most bytes of a provider's own words in an error.
const MAX_SAID_BYTES: usize = 1_000;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelErrorKind {
    /// There is no key, or the provider does not take it.
    RefusedKey,
    /// The provider has no such model, or nothing at this URL.
    NotFound,
    /// The conversation is longer than the model can take.
    ContextTooLong,
    /// The provider, or the settings, say that the call cannot be made like this.
    BadRequest,
    /// The provider cannot be reached, broke off, or says that it cannot answer now.
    Unavailable,
    /// The provider took too long.
    Timeout,
    /// Too many calls, or no credit left.
    RateLimited,
    /// What came back is not an answer.
    BadAnswer,
}

impl ModelErrorKind {
    /// The code of the [`TaskError`].
    pub fn code(self) -> &'static str {
        match self {
            Self::RefusedKey => "model_refused_key",
            Self::NotFound => "model_not_found",
            Self::ContextTooLong => "context_too_long",
            Self::BadRequest => "model_bad_request",
            Self::Unavailable => "model_unavailable",
            Self::Timeout => "model_timeout",
            Self::RateLimited => "model_rate_limited",
            Self::BadAnswer => "model_bad_answer",
        }
    }

    fn passes(self) -> bool {
        matches!(self, Self::Unavailable | Self::Timeout | Self::RateLimited | Self::BadAnswer)
    }
}

/// Why a call of a model failed. Has no key in it, whatever the provider said.
///
/// Like [`TaskError`], and so that it becomes one with its code, it is not a `std::error::Error`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelError {
    /// What is wrong.
    pub kind: ModelErrorKind,
    /// What happened and what to do, for people.
    pub message: String,
    /// Whether the same call may go well later.
    pub retryable: bool,
    /// The HTTP status, if the provider answered with a bad one.
    pub status: Option<u16>,
    /// How long the provider wants to be left alone.
    pub retry_after: Option<Duration>,
}

impl ModelError {
    pub(super) fn new(kind: ModelErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), retryable: kind.passes(), status: None, retry_after: None }
    }

    pub(super) fn fatal(self) -> Self {
        Self { retryable: false, ..self }
    }

    /// Whether another model may do what this one did not: also when this one does not exist.
    pub(super) fn another_may_help(&self) -> bool {
        self.retryable || self.kind == ModelErrorKind::NotFound
    }
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.message, self.kind.code())
    }
}

impl From<ModelError> for TaskError {
    fn from(error: ModelError) -> Self {
        let mut told = Self::retryable(error.kind.code(), error.message);
        told.retryable = error.retryable;
        if let Some(status) = error.status {
            told = told.detail("status", status);
        }
        if let Some(wait) = error.retry_after {
            told = told.detail("retry_after_ms", u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        }
        told
    }
}

/// A provider's complaint: the `error` of a body or of a stream, in one of the forms that they have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Complaint {
    /// Its words.
    pub(super) message: String,
    /// Its names for what is wrong: type and code.
    names: Vec<String>,
    /// The status that a complaint without one of its own stands for.
    status: Option<u16>,
}

impl Complaint {
    /// The complaint of this value, if it is one and not an answer.
    pub(super) fn of(value: &Value) -> Option<Self> {
        match value.get("error") {
            Some(Value::Null) | None => {}
            Some(error) => return Some(Self::read(error)),
        }
        // Older servers: {"object": "error", "message": …, "code": 400}
        let is_error = ["object", "type"].iter().any(|name| value.get(name).is_some_and(|it| it == "error"));
        is_error.then(|| Self::read(value))
    }

    /// The complaint of a body that came with a bad status.
    pub(super) fn of_body(body: &[u8]) -> Self {
        let value = serde_json::from_slice::<Value>(body).unwrap_or_default();
        let mut complaint = Self::of(&value).unwrap_or_else(|| Self::read(&value));
        if complaint.message.is_empty() {
            complaint.message = String::from_utf8_lossy(body).trim().to_owned();
        }
        complaint
    }

    fn read(error: &Value) -> Self {
        let words = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        let Value::Object(fields) = error else { return Self { message: words(error), ..Self::default() } };
        let message = ["message", "detail", "msg"].iter().find_map(|name| fields.get(*name)).map(words);
        let codes = || ["status", "code", "status_code"].iter().filter_map(|name| fields.get(*name));
        Self {
            message: message.unwrap_or_default(),
            names: ["type", "code", "status"]
                .iter()
                .filter_map(|name| fields.get(*name)?.as_str())
                .map(str::to_lowercase)
                .collect(),
            status: codes()
                .find_map(|code| code.as_u64().or_else(|| code.as_str()?.parse().ok()))
                .and_then(|code| u16::try_from(code).ok())
                .filter(|code| (400..600).contains(code)),
        }
    }

    fn named(&self, any: &[&str]) -> bool {
        self.names.iter().any(|name| any.iter().any(|part| name.contains(part)))
    }

    fn says(&self, any: &[&str]) -> bool {
        let message = self.message.to_lowercase();
        any.iter().any(|part| message.contains(part))
    }

    /// What is wrong, by its own words and the status of the answer, which is 200 when the complaint
    /// came in place of an answer or in the middle of one.
    pub(super) fn judge(&self, status: u16) -> ModelError {
        let status = if status < 400 { self.status.unwrap_or_else(|| self.status_by_name()) } else { status };
        let too_long = self.named(&["context_length", "exceed_context", "request_too_large"])
            || self.says(&[
                "context length",
                "context window",
                "context limit",
                "maximum context",
                "context size",
                "prompt is too long",
                "input is too long",
                "too many tokens",
                "too many input tokens",
            ]);
        let kind = match status {
            400 | 413 | 422 if too_long => ModelErrorKind::ContextTooLong,
            401 | 403 => ModelErrorKind::RefusedKey,
            404 => ModelErrorKind::NotFound,
            408 | 504 => ModelErrorKind::Timeout,
            413 => ModelErrorKind::ContextTooLong,
            429 => ModelErrorKind::RateLimited,
            500.. => ModelErrorKind::Unavailable,
            _ => ModelErrorKind::BadRequest,
        };
        let mut error = ModelError::new(kind, String::new());
        error.status = Some(status);
        // A bill that is not paid does not pay itself while we wait.
        error.retryable &= !self.is_no_credit();
        error
    }

    /// Whether calls are refused until somebody pays.
    pub(super) fn is_no_credit(&self) -> bool {
        self.named(&["insufficient_quota", "billing"])
    }

    fn status_by_name(&self) -> u16 {
        const STATUSES: [(&[&str], u16); 8] = [
            (&["authentication", "invalid_api_key", "unauthorized"], 401),
            (&["permission", "forbidden", "billing"], 403),
            (&["not_found"], 404),
            (&["rate_limit", "insufficient_quota", "too_many_requests", "resource_exhausted"], 429),
            (&["request_too_large"], 413),
            (&["invalid_request", "bad_request", "context_length", "exceed_context", "invalid_argument"], 400),
            (&["timeout", "deadline_exceeded"], 504),
            (&["overloaded"], 529),
        ];
        STATUSES.iter().find(|(names, _)| self.named(names)).map_or(500, |&(_, status)| status)
    }
}

/// A provider's words, made fit for one line of an error.
pub(super) fn shortened(said: &str) -> String {
    let said = said.trim();
    if said.len() <= MAX_SAID_BYTES {
        return said.to_owned();
    }
    format!("{} …", &said[..said.floor_char_boundary(MAX_SAID_BYTES)])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judged(status: u16, body: Value) -> (&'static str, bool, Option<u16>) {
        let error = Complaint::of_body(body.to_string().as_bytes()).judge(status);
        (error.kind.code(), error.retryable, error.status)
    }

    #[test]
    fn a_status_says_what_is_wrong_and_whether_waiting_helps() {
        for (status, code, retryable) in [
            (400, "model_bad_request", false),
            (401, "model_refused_key", false),
            (403, "model_refused_key", false),
            (404, "model_not_found", false),
            (408, "model_timeout", true),
            (413, "context_too_long", false),
            (422, "model_bad_request", false),
            (429, "model_rate_limited", true),
            (500, "model_unavailable", true),
            (503, "model_unavailable", true),
            (504, "model_timeout", true),
            (529, "model_unavailable", true),
        ] {
            assert_eq!(judged(status, json!({})), (code, retryable, Some(status)));
        }
    }

    #[test]
    fn a_complaint_without_a_status_is_judged_by_its_names() {
        let judged = |error: Value| judged(200, json!({"error": error}));
        assert_eq!(judged(json!({"type": "overloaded_error"})), ("model_unavailable", true, Some(529)));
        assert_eq!(judged(json!({"code": 429, "message": "slow"})), ("model_rate_limited", true, Some(429)));
        assert_eq!(judged(json!({"code": "502"})), ("model_unavailable", true, Some(502)));
        assert_eq!(judged(json!({"type": "rate_limit_error"})), ("model_rate_limited", true, Some(429)));
        assert_eq!(judged(json!({"code": "insufficient_quota"})), ("model_rate_limited", false, Some(429)));
        assert_eq!(judged(json!({"code": "invalid_api_key"})), ("model_refused_key", false, Some(401)));
        assert_eq!(judged(json!("boom")), ("model_unavailable", true, Some(500)));
    }

    #[test]
    fn a_conversation_that_is_too_long_is_recognised_by_the_words_of_each_provider() {
        for error in [
            json!({"code": "context_length_exceeded", "message": "x"}),
            json!({"message": "This model's maximum context length is 8192 tokens."}),
            json!({"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens > 200000 maximum"}),
            json!({"type": "exceed_context_size_error", "message": "x"}),
        ] {
            assert_eq!(judged(400, json!({"error": error})).0, "context_too_long", "{error}");
        }
    }

    #[test]
    fn the_words_of_a_complaint_are_found_in_each_form() {
        for body in [
            json!({"error": {"message": "no"}}).to_string(),
            json!({"error": "no"}).to_string(),
            json!({"detail": "no"}).to_string(),
            json!({"object": "error", "message": "no", "code": 400}).to_string(),
            json!({"type": "error", "error": {"type": "api_error", "message": "no"}}).to_string(),
            " no\n".to_owned(),
        ] {
            assert_eq!(Complaint::of_body(body.as_bytes()).message, "no", "{body}");
        }
        assert_eq!(Complaint::of(&json!({"id": "x", "error": null, "choices": []})), None);
    }
}
