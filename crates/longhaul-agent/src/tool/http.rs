//! An HTTP call: JSON out, JSON or text back.
//!
//! Every call has a connection of its own: on one that was kept, a request can meet the server's
//! goodbye, and then nobody knows whether it was seen. Redirects are followed for GET and HEAD
//! only. The TLS roots are the system's.

use std::sync::OnceLock;
use std::time::Duration;

use longhaul::TaskError;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use reqwest::{Client, Method, Response, StatusCode, Url};
use serde_json::{Map, Value, json};

use super::collect::{Collector, Keep};
use super::{Call, MAX_COMPLAINT_BYTES, Output};
use crate::mask::Mask;
use crate::net::{self, causes};
use crate::template::{Body, Placeholder, Template};

/// How long a connection may take. Nothing was sent before, so a failure is a known one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_REDIRECTS: usize = 5;
/// The header that names the trace a call belongs to.
const TRACEPARENT: &str = "traceparent";
/// What a value in a URL need not be encoded for.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A request to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http {
    method: Method,
    url: Template,
    /// Headers of its own; may have `{{env.NAME}}`, which is why they are never shown.
    headers: Vec<(HeaderName, Template)>,
    /// A body of its own, instead of the call's.
    body: Option<Body>,
    /// What `{{env.NAME}}` may refer to.
    env: Vec<String>,
}

/// Why a URL cannot be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadUrl(pub(crate) String);

impl Http {
    pub(crate) fn new(
        method: Method,
        url: Template,
        headers: Vec<(HeaderName, Template)>,
        body: Option<Body>,
        env: Vec<String>,
    ) -> Self {
        Self { method, url, headers, body, env }
    }

    /// The method.
    pub fn method(&self) -> &str {
        self.method.as_str()
    }

    /// The URL with the placeholders filled. Each value stays what it is, one piece of a path, a
    /// query or a host: it is percent-encoded, and one that would lead to another path is refused.
    pub fn url(&self, values: &Value) -> Result<Url, TaskError> {
        let text = self.url.render_by(|placeholder, before| {
            let value = placeholder.text(values)?;
            // DELETE /apps/{{input.app}} must not become DELETE /apps/.
            if value.is_empty() && !before.contains('?') {
                let message = format!("{placeholder} is empty; it cannot be part of a URL's path");
                return Err(TaskError::fatal("bad_url", message));
            }
            Ok(utf8_percent_encode(&value, ENCODED).to_string())
        })?;
        check_url(&text).map_err(|BadUrl(why)| {
            TaskError::fatal("bad_url", format!("{} {why} with the values of this call", without_query(&text)))
        })
    }

    /// Whether the URL could be called if every value were an ordinary word.
    pub(crate) fn probe_url(url: &Template) -> Result<(), BadUrl> {
        let text = url.render_by(|_, _| Ok("x".to_owned())).unwrap_or_default();
        check_url(&text).map(drop)
    }

    /// What it is, for a digest. Of secrets, only the names are in it.
    pub(super) fn definition(&self) -> Value {
        let header = |(name, value): &(HeaderName, Template)| (name.to_string(), json!(value.to_string()));
        let headers: Map<String, Value> = self.headers.iter().map(header).collect();
        json!({
            "method": self.method(),
            "url": self.url.to_string(),
            "headers": headers,
            "body": self.body.as_ref().map(Body::source),
            "env": self.env,
        })
    }

    pub(super) async fn run(&self, call: &Call, keep: Keep<'_>) -> Result<Output, TaskError> {
        let url = self.url(&call.values)?;
        let what = format!("{} {}", self.method, without_query(url.as_str()));
        let reads = matches!(self.method, Method::GET | Method::HEAD);
        let context = &call.context;
        let mut request = client(reads)?
            .request(self.method.clone(), url)
            .header("longhaul-task-id", context.task.to_string())
            .header("longhaul-step", header_value("longhaul-step", &context.step)?)
            .header("idempotency-key", header_value("idempotency-key", &context.idempotency_key)?)
            .header("longhaul-fence", context.fence);
        let own = |(name, _): &(HeaderName, Template)| name == TRACEPARENT;
        if let Some(traceparent) = context.traceparent.as_deref().filter(|_| !self.headers.iter().any(own)) {
            request = request.header(TRACEPARENT, header_value(TRACEPARENT, traceparent)?);
        }
        let body = match &self.body {
            Some(body) => Some(body.render(&call.values)?.to_string()),
            None if reads => None,
            None => Some(call.body.to_string()),
        };
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        for (name, value) in &self.headers {
            let value = value.render_by(|placeholder, _| header_text(placeholder, &call.values, &self.env))?;
            request = request.header(name, header_value(name.as_str(), &value)?);
        }
        let response = request.send().await.map_err(|error| not_answered(&what, &error))?;
        self.judge(&what, response, keep).await
    }

    async fn judge(&self, what: &str, mut response: Response, keep: Keep<'_>) -> Result<Output, TaskError> {
        let status = response.status();
        let mask = Mask::of_env(&self.env);
        if status.is_success() {
            let wrote = format!("{what} answered");
            let mut output = Collector::new(keep, &mask);
            while let Some(piece) = response.chunk().await.map_err(|error| {
                TaskError::in_doubt("answer_lost", format!("{what} answered {status}, then {}", causes(&error)))
            })? {
                output.take(&piece).await.map_err(|refused| refused.told(&wrote))?;
            }
            return output.finish(&wrote).await;
        }
        let location = response.headers().get("location").and_then(|value| value.to_str().ok().map(str::to_owned));
        // The status says enough; the body only helps to understand it.
        let (body, cut) = read(response, MAX_COMPLAINT_BYTES, &mask).await.unwrap_or_default();
        let said = String::from_utf8_lossy(&body);
        let mut message = format!("{what} answered {status}");
        if !said.trim().is_empty() {
            message = format!("{message}: {}{}", said.trim(), if cut { " …" } else { "" });
        }
        Err(if status.is_redirection() {
            let to = location.map_or("elsewhere".to_owned(), |to| mask.text(without_query(&to)));
            TaskError::fatal(
                "http_redirect",
                format!("{what} answered {status}, to {to}; write the final URL in the manifest"),
            )
        } else if status.is_server_error() {
            TaskError::in_doubt("http_status", message)
        } else {
            TaskError::retryable("http_status", message)
        }
        .detail("status", StatusCode::as_u16(&status)))
    }
}

/// No answer: was anything sent?
fn not_answered(what: &str, error: &reqwest::Error) -> TaskError {
    let why = causes(error);
    if error.is_builder() {
        return TaskError::fatal("bad_url", format!("{what} cannot be called: {why}"));
    }
    if error.is_connect() {
        return TaskError::retryable("not_connected", format!("{what}: cannot connect: {why}"));
    }
    if error.is_redirect() {
        return TaskError::fatal("http_redirect", format!("{what}: {why}"));
    }
    TaskError::in_doubt("no_answer", format!("{what}: connection lost after sending: {why}"))
}

/// Reads at most `limit` bytes, without secrets; says whether there was more.
async fn read(mut response: Response, limit: usize, mask: &Mask) -> Result<(Vec<u8>, bool), reqwest::Error> {
    let mut masking = mask.stream();
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&masking.take(&chunk));
        if body.len() > limit {
            body.truncate(limit);
            return Ok((body, true));
        }
    }
    body.extend(masking.rest());
    Ok((body, false))
}

/// What a placeholder in a header stands for: `{{env.NAME}}` is a variable, if it is one of `env`.
pub(super) fn header_text(placeholder: &Placeholder, values: &Value, env: &[String]) -> Result<String, TaskError> {
    let [root, name] = placeholder.path() else { return placeholder.text(values) };
    if root != "env" {
        return placeholder.text(values);
    }
    // Checked when the manifest was read; looked at again, because it guards secrets.
    let allowed = env.contains(name);
    std::env::var(name).ok().filter(|_| allowed).ok_or_else(|| {
        TaskError::fatal(
            "env_missing",
            format!("{placeholder} has no value: the worker's environment has no text {name}; start it with one"),
        )
    })
}

pub(super) fn header_value(name: &str, value: &str) -> Result<HeaderValue, TaskError> {
    let mut value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| {
        TaskError::fatal("bad_header", format!("the value of header {name} has a line break or control character"))
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn check_url(text: &str) -> Result<Url, BadUrl> {
    let url = Url::parse(text).map_err(|error| BadUrl(format!("is not a URL ({error})")))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(BadUrl(format!("has the scheme {}, but only http and https can be called", url.scheme())));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(BadUrl("has a user name or password in it".to_owned()));
    }
    let after_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
    let path =
        after_scheme.split(['?', '#']).next().and_then(|rest| rest.split_once('/')).map_or("", |(_, path)| path);
    let segments: Vec<String> =
        path.split('/').map(|segment| segment.to_lowercase().replace("%2e", ".")).collect();
    if segments.iter().any(|segment| segment == "." || segment == "..") {
        return Err(BadUrl("has . or .. in its path".to_owned()));
    }
    Ok(url)
}

fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or(url)
}

pub(super) fn client(follow: bool) -> Result<&'static Client, TaskError> {
    static CLIENTS: OnceLock<[Client; 2]> = OnceLock::new();
    if let Some(clients) = CLIENTS.get() {
        return Ok(&clients[usize::from(follow)]);
    }
    let build = || -> Result<_, TaskError> {
        Ok(net::client()?.pool_max_idle_per_host(0).connect_timeout(CONNECT_TIMEOUT))
    };
    let follows = reqwest::redirect::Policy::limited(MAX_REDIRECTS);
    let clients = [build()?.build()?, build()?.redirect(follows).build()?];
    Ok(&CLIENTS.get_or_init(|| clients)[usize::from(follow)])
}
