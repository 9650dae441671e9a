//! One try of a call: a request out, an answer back, whole or not at all.

use std::time::Duration;

use jiff::Timestamp;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{Client, Response, Url};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};

use super::draft::Draft;
use super::environment::{Key, secret_value};
use super::error::{Complaint, ModelError, ModelErrorKind, shortened};
use super::protocol::{Broken, Protocol};
use super::sse::Events;
use super::{Answer, Request, Timeouts, pause};
use crate::net::causes;

/// The most bytes of an answer.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// The most bytes that are read of a complaint.
const MAX_COMPLAINT_BYTES: usize = 64 * 1024;
/// What is read after the end of an answer.
const DRAIN_TIME: Duration = Duration::from_secs(1);
const MAX_DRAINED_CHUNKS: usize = 8;
/// How the end of OpenAI's streams is written.
const DONE: &str = "[DONE]";

/// One try of a call.
pub(super) struct Exchange<'a> {
    pub(super) protocol: &'static dyn Protocol,
    pub(super) client: &'a Client,
    pub(super) request: &'a Request,
    pub(super) stream: bool,
    pub(super) timeouts: &'a Timeouts,
    /// When the whole call must be over.
    pub(super) deadline: Instant,
    pub(super) url: &'a Url,
    pub(super) key: Option<&'a Key>,
}

/// What the body is; its first bytes say it. Some providers answer in one piece although they were
/// asked for a stream.
enum Form {
    Unknown,
    Events(Events),
    Whole(Vec<u8>),
}

/// Why no more of an answer comes.
enum End {
    Closed,
    Lost(String),
    Late(ModelError),
}

impl Exchange<'_> {
    /// `heard` gets every piece of text.
    pub(super) async fn run(self, heard: &mut (dyn FnMut(&str) + Send)) -> Result<Answer, ModelError> {
        let began = Instant::now();
        let response = self.send(began).await?;
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        let mask = Key::mask(self.key);
        let mut masking = mask.stream();
        let mut tell = |shown: &[u8]| {
            if !shown.is_empty() {
                heard(&String::from_utf8_lossy(shown));
            }
        };
        let answer = self.receive(response, began, &mut |text| tell(&masking.take(text.as_bytes()))).await?;
        tell(&masking.rest());
        Ok(answer.without(&mask))
    }

    /// Until when the first token must be there.
    fn first_limit(&self, began: Instant) -> Instant {
        if self.stream { self.deadline.min(began + self.timeouts.first_token) } else { self.deadline }
    }

    async fn send(&self, began: Instant) -> Result<Response, ModelError> {
        let host = self.url.host_str().unwrap_or_default();
        let body = self.protocol.body(self.request, self.stream, host);
        let accept = if self.stream { "text/event-stream, application/json" } else { "application/json" };
        let mut request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, accept)
            .body(body.to_string());
        for (name, value) in self.protocol.headers() {
            request = request.header(*name, *value);
        }
        if let Some(key) = self.key {
            let (name, value) = self.protocol.key_header(key.expose());
            let value = secret_value(&value)
                .ok_or_else(|| self.error(ModelErrorKind::RefusedKey, "cannot be sent this key"))?;
            request = request.header(name, value);
        }
        match timeout_at(self.first_limit(began), request.send()).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) if error.is_connect() && error.is_timeout() => {
                let limit = self.timeouts.connect;
                Err(self.error(ModelErrorKind::Timeout, &format!("cannot be connected to within {limit:?}")))
            }
            Ok(Err(error)) if error.is_connect() => {
                let why = format!("cannot be connected to ({}); check {}", causes(&error), self.base_url_name());
                Err(self.error(ModelErrorKind::Unavailable, &why))
            }
            Ok(Err(error)) => {
                let why = format!("broke the connection off before it answered ({})", causes(&error));
                Err(self.error(ModelErrorKind::Unavailable, &why))
            }
            Err(_) => Err(self.late(self.timeouts.first_token, "did not answer")),
        }
    }

    /// The error of an answer with a bad status.
    async fn refused(&self, mut response: Response) -> ModelError {
        let status = response.status();
        let retry_after = pause::retry_after(response.headers(), Timestamp::now());
        if status.is_redirection() {
            let what = format!("answered {status}; set {} to the final address", self.base_url_name());
            return ModelError { status: Some(status.as_u16()), ..self.error(ModelErrorKind::BadRequest, &what) };
        }
        let mut body = Vec::new();
        // The status says enough; the body only helps to understand it.
        let limit = self.deadline.min(Instant::now() + self.timeouts.silence);
        while let Ok(Ok(Some(chunk))) = timeout_at(limit, response.chunk()).await {
            body.extend_from_slice(&chunk);
            if body.len() >= MAX_COMPLAINT_BYTES {
                break;
            }
        }
        let complaint = Complaint::of_body(&body);
        ModelError { retry_after, ..self.complaint(&complaint, status.as_u16()) }
    }

    /// The error that a provider's complaint is.
    fn complaint(&self, complaint: &Complaint, status: u16) -> ModelError {
        let error = complaint.judge(status);
        let mut what = match (status, error.status) {
            (..400, _) | (_, None) => "answered with an error".to_owned(),
            (_, Some(status)) => format!("answered {status}"),
        };
        // Hidden before it is cut: half a key is too much.
        let said = shortened(&Key::hide(self.key, &complaint.message));
        if !said.is_empty() {
            what = format!("{what}: {said}");
        }
        let hint = self.hint(&error, complaint);
        ModelError { message: self.sentence(&format!("{what}{hint}")), ..error }
    }

    fn hint(&self, error: &ModelError, complaint: &Complaint) -> String {
        let variables = self.protocol.variables();
        match error.kind {
            ModelErrorKind::RefusedKey if self.key.is_none() => {
                format!("; set {} or {}", variables.key, variables.key_file)
            }
            ModelErrorKind::RefusedKey => {
                format!("; check the key in {} or {}, and what it may use", variables.key, variables.key_file)
            }
            ModelErrorKind::NotFound => format!("; check the model's name and {}", variables.base_url),
            ModelErrorKind::ContextTooLong => {
                "; the conversation is too long for this model: set context_window to what it can take".to_owned()
            }
            ModelErrorKind::BadRequest if complaint.message.contains("stream") => {
                "; if it cannot stream, set stream = false".to_owned()
            }
            _ if complaint.is_no_credit() => "; the account has no credit left".to_owned(),
            _ => String::new(),
        }
    }

    async fn receive(
        &self,
        mut response: Response,
        began: Instant,
        heard: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Answer, ModelError> {
        let mut draft = Draft::default();
        let mut form = Form::Unknown;
        let mut bytes = 0;
        let end = loop {
            let whole = matches!(form, Form::Whole(_));
            let begun = whole || draft.has_begun();
            let limit = if begun { Instant::now() + self.timeouts.silence } else { self.first_limit(began) };
            let chunk = match timeout_at(limit.min(self.deadline), response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => break End::Closed,
                Ok(Err(error)) => break End::Lost(causes(&error)),
                Err(_) if begun => break End::Late(self.late(self.timeouts.silence, "fell silent")),
                Err(_) => break End::Late(self.late(self.timeouts.first_token, "sent no token")),
            };
            bytes += chunk.len();
            if bytes > MAX_ANSWER_BYTES {
                let what = format!("answered more than {MAX_ANSWER_BYTES} bytes");
                return Err(self.error(ModelErrorKind::BadAnswer, &what).fatal());
            }
            self.take(&chunk, &mut form, &mut draft, heard)?;
            if draft.ended {
                drain(response);
                break End::Closed;
            }
        };
        self.finish(form, draft, end, heard)
    }

    fn take(
        &self,
        chunk: &[u8],
        form: &mut Form,
        draft: &mut Draft,
        heard: &mut (dyn FnMut(&str) + Send),
    ) -> Result<(), ModelError> {
        let mut chunk = chunk;
        if let Form::Unknown = form {
            chunk = chunk.trim_ascii_start();
            *form = match chunk.first() {
                None => return Ok(()),
                Some(b'{') => Form::Whole(Vec::new()),
                Some(_) => Form::Events(Events::default()),
            };
        }
        match form {
            Form::Events(events) => events.take(chunk, &mut |data| self.event(&data, draft, heard)),
            Form::Whole(bytes) => {
                bytes.extend_from_slice(chunk);
                Ok(())
            }
            Form::Unknown => Ok(()),
        }
    }

    fn event(
        &self,
        data: &str,
        draft: &mut Draft,
        heard: &mut (dyn FnMut(&str) + Send),
    ) -> Result<(), ModelError> {
        let data = data.trim();
        if data == DONE {
            draft.ended = true;
        }
        if draft.ended || data.is_empty() {
            return Ok(());
        }
        let event: Value = serde_json::from_str(data)
            .map_err(|error| self.broken(&Broken(format!("one of its events is not JSON ({error})"))))?;
        self.check(&event)?;
        let before = draft.text.len();
        self.protocol.event(event, draft).map_err(|broken| self.broken(&broken))?;
        if draft.text.len() > before {
            heard(&draft.text[before..]);
        }
        Ok(())
    }

    fn finish(
        &self,
        form: Form,
        mut draft: Draft,
        end: End,
        heard: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Answer, ModelError> {
        let closed = matches!(end, End::Closed);
        match form {
            Form::Whole(bytes) if closed => {
                let answer: Value = serde_json::from_slice(&bytes)
                    .map_err(|error| self.broken(&Broken(format!("it is not JSON ({error})"))))?;
                self.check(&answer)?;
                self.protocol.whole(answer, &mut draft).map_err(|broken| self.broken(&broken))?;
                if !draft.text.is_empty() {
                    heard(&draft.text);
                }
                return Ok(draft.answer(self.request));
            }
            Form::Events(events) if closed && !draft.ended => {
                if let Some(data) = events.rest()
                    && (data.trim() == DONE || serde_json::from_str::<Value>(&data).is_ok())
                {
                    self.event(&data, &mut draft, heard)?;
                }
            }
            _ => {}
        }
        if draft.is_whole() {
            return Ok(draft.answer(self.request));
        }
        Err(match end {
            End::Late(error) => error,
            End::Lost(why) => {
                self.error(ModelErrorKind::Unavailable, &format!("broke off in the middle of its answer ({why})"))
            }
            End::Closed if draft.has_begun() || draft.ended => {
                self.error(ModelErrorKind::Unavailable, "ended in the middle of its answer")
            }
            End::Closed => self.broken(&Broken("it is neither JSON nor a stream of events".to_owned())),
        })
    }

    /// Whether a value is an answer, or a part of one, and not a complaint.
    fn check(&self, value: &Value) -> Result<(), ModelError> {
        match Complaint::of(value) {
            Some(complaint) => Err(self.complaint(&complaint, 200)),
            None => Ok(()),
        }
    }

    fn broken(&self, Broken(why): &Broken) -> ModelError {
        self.error(ModelErrorKind::BadAnswer, &format!("answered what is no answer: {why}"))
    }

    fn late(&self, limit: Duration, what: &str) -> ModelError {
        let message = if Instant::now() >= self.deadline {
            format!("did not end its answer within the {:?} of the whole call", self.timeouts.whole_call)
        } else {
            format!("{what} for {limit:?}")
        };
        self.error(ModelErrorKind::Timeout, &message)
    }

    fn error(&self, kind: ModelErrorKind, what: &str) -> ModelError {
        ModelError::new(kind, self.sentence(&Key::hide(self.key, what)))
    }

    /// What the model did, with the model and where it was asked for.
    fn sentence(&self, what: &str) -> String {
        // The query may hold what is not for everyone's eyes.
        let mut url = self.url.clone();
        url.set_query(None);
        format!("{} at {} {what}", self.request.model, Key::hide(self.key, url.as_str()))
    }

    fn base_url_name(&self) -> &'static str {
        self.protocol.variables().base_url
    }
}

/// Reads what comes after the end of an answer, a few bytes at most, so that the connection can be
/// used again. Nobody waits for it, and it waits not long.
fn drain(mut response: Response) {
    tokio::spawn(timeout(DRAIN_TIME, async move {
        for _ in 0..MAX_DRAINED_CHUNKS {
            if !matches!(response.chunk().await, Ok(Some(_))) {
                return;
            }
        }
    }));
}
