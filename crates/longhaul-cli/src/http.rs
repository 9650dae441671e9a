//! The server, as client commands see it: a base URL, a token, JSON in and out.
//!
//! What the server answers otherwise than with success becomes a [`Trouble`]: a sentence for people
//! and the documented exit code. Redirects are not followed, so the token goes nowhere else.

use std::error::Error as _;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER,
};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;

use crate::config::variable;
use crate::exit::Failure;
use crate::out;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The server itself gives up on a request before this.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// An answer larger than this is not read.
const MAX_ANSWER_BYTES: usize = 256 * 1024 * 1024;
/// Of an answer that is not a problem document, so much is shown.
const MAX_COMPLAINT_CHARS: usize = 300;
/// What need not be encoded in a piece of a path or query.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b':');

/// Why the server did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// It could not be reached, or went away in the middle.
    Unreachable(String),
    /// It said no.
    Refused { status: StatusCode, message: String, retry_after: Option<Duration> },
    /// It is not the request's or the server's day; nothing was sent.
    Usage(String),
}

impl Trouble {
    /// Whether it may be another time.
    pub(crate) fn passes(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Refused { status, .. } => {
                status.is_server_error()
                    || matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
            }
            Self::Usage(_) => false,
        }
    }

    pub(crate) fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Usage(message) => Self::usage(message),
            Trouble::Unreachable(message) => Self::internal(message),
            Trouble::Refused { status, message, .. } => match status.as_u16() {
                401 | 403 | 429 => Self::refused(message),
                408 | 500.. => Self::internal(message),
                _ => Self::usage(message),
            },
        }
    }
}

/// A server and the right to use it.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    client: Client,
    base: String,
    token: Option<HeaderValue>,
}

/// What the server answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Result<Value, Failure> {
        serde_json::from_str(&self.text).map_err(|error| {
            Failure::internal(format!("the server answered something that is not JSON ({error}); is it Longhaul?"))
        })
    }

    /// The JSON as the server wrote it, on stdout.
    pub(crate) fn print(&self) -> Result<(), Failure> {
        out::line(self.text.trim_end())
    }
}

impl Server {
    /// The server at `base`, with the token of the environment.
    pub(crate) fn new(base: &str) -> Result<Self, Failure> {
        let token = variable(&|name| std::env::var_os(name), "LONGHAUL_TOKEN", true)
            .map_err(|fault| Failure::usage(fault.to_string()))?;
        Self::with_token(base, token.map(|(_, token)| token).as_deref())
    }

    /// The server at `base`, with this token.
    pub(crate) fn with_token(base: &str, token: Option<&str>) -> Result<Self, Failure> {
        let wrong = |why: &str| {
            Failure::usage(format!(
                "'{base}' is not the URL of a server: {why}; write it like http://127.0.0.1:7171"
            ))
        };
        let url = Url::parse(base).map_err(|error| wrong(&error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong("it must begin with http:// or https://"));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(wrong("it has a ? or #"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Failure::usage(
                "the URL of the server has a user name or password in it; the token goes into LONGHAUL_TOKEN",
            ));
        }
        let token = token.map(|token| bearer(token.trim())).transpose()?;
        let mut builder = Client::builder()
            .tls_backend_preconfigured(tls(url.scheme() == "https")?)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("longhaul/", env!("CARGO_PKG_VERSION")));
        if is_loopback(&url) {
            // A proxy is somewhere else, where this address means another machine.
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|error| Failure::internal(format!("cannot start: {error}")))?;
        Ok(Self { client, base: url.as_str().trim_end_matches('/').to_owned(), token })
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether others on the way can read what is sent.
    pub(crate) fn sends_in_the_open(&self) -> bool {
        Url::parse(&self.base).is_ok_and(|url| url.scheme() == "http" && !is_loopback(&url))
    }

    /// A request that was not sent yet.
    pub(crate) fn request(&self, method: Method, path: &Path) -> Call<'_> {
        let url = path.text.as_ref().map(|path| format!("{}{path}", self.base)).map_err(Clone::clone);
        let request = url.map(|url| {
            let mut request = self.client.request(method, url).timeout(REQUEST_TIMEOUT);
            if let Some(token) = &self.token {
                request = request.header(AUTHORIZATION, token.clone());
            }
            request
        });
        Call { server: self, request }
    }

    pub(crate) async fn get(&self, path: &Path) -> Result<Answer, Trouble> {
        self.request(Method::GET, path).send().await
    }

    pub(crate) async fn post(&self, path: &Path, body: &Value) -> Result<Answer, Trouble> {
        self.request(Method::POST, path).json(body).send().await
    }

    fn not_reached(&self, error: &reqwest::Error) -> Trouble {
        let mut why = Vec::new();
        let mut source = error.source();
        while let Some(cause) = source {
            why.push(cause.to_string());
            source = cause.source();
        }
        why.dedup();
        let why = why.pop().unwrap_or_else(|| "no answer".to_owned());
        let base = &self.base;
        if error.is_builder() {
            return Trouble::Usage(format!("the request cannot be sent to {base}: {why}"));
        }
        if error.is_timeout() {
            return Trouble::Unreachable(format!("the server at {base} does not answer in time"));
        }
        if error.is_connect() {
            return Trouble::Unreachable(format!(
                "cannot reach the server at {base} ({why}); start it with 'longhaul up', or name another with --server"
            ));
        }
        Trouble::Unreachable(format!("the connection to {base} was lost ({why}); the request may have been done"))
    }
}

/// A request being made.
pub(crate) struct Call<'s> {
    server: &'s Server,
    request: Result<RequestBuilder, String>,
}

impl Call<'_> {
    pub(crate) fn json(self, body: &Value) -> Self {
        self.body(body.to_string())
    }

    /// JSON that is text already.
    pub(crate) fn body(self, text: String) -> Self {
        self.map(|request| request.header(CONTENT_TYPE, "application/json").body(text))
    }

    /// A header; a value that cannot be one is told when the request is sent.
    pub(crate) fn header(self, name: HeaderName, value: &str) -> Self {
        match HeaderValue::from_str(value) {
            Ok(value) => self.map(|request| request.header(name, value)),
            Err(_) => {
                let why =
                    format!("'{}' cannot be sent as {name}: only plain characters can", out::short(value, 60));
                Self { request: self.request.and(Err(why)), ..self }
            }
        }
    }

    /// Until when the whole answer must be there.
    pub(crate) fn timeout(self, timeout: Duration) -> Self {
        self.map(|request| request.timeout(timeout))
    }

    fn map(self, change: impl FnOnce(RequestBuilder) -> RequestBuilder) -> Self {
        Self { request: self.request.map(change), ..self }
    }

    /// Sends it and reads the whole answer.
    pub(crate) async fn send(self) -> Result<Answer, Trouble> {
        let server = self.server;
        let response = self.accept("application/json").open().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = read(response, MAX_ANSWER_BYTES).await.map_err(|error| server.not_reached(&error))?;
        let Some(body) = body else {
            let message = format!("the answer has more than {MAX_ANSWER_BYTES} bytes; ask for less with --limit");
            return Err(Trouble::Usage(message));
        };
        let text = String::from_utf8(body).map_err(|_| {
            Trouble::Unreachable("the server's answer is not UTF-8 text; is it Longhaul?".to_owned())
        })?;
        Ok(Answer { status, headers, text })
    }

    pub(crate) fn accept(self, kind: &'static str) -> Self {
        self.map(|request| request.header(ACCEPT, HeaderValue::from_static(kind)))
    }

    /// Sends it and gives the answer with its body still to be read.
    pub(crate) async fn open(self) -> Result<Response, Trouble> {
        let response = self.open_any().await?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(refusal(response).await)
    }

    /// The same, whatever the answer says.
    pub(crate) async fn open_any(self) -> Result<Response, Trouble> {
        let request = self.request.map_err(Trouble::Usage)?;
        request.send().await.map_err(|error| self.server.not_reached(&error))
    }
}

async fn refusal(response: Response) -> Trouble {
    let status = response.status();
    let header =
        |name: HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (to, retry_after) = (header(LOCATION), header(RETRY_AFTER));
    let retry_after = retry_after.and_then(|value| value.trim().parse().ok()).map(Duration::from_secs);
    let body = read(response, 1 << 20).await.ok().flatten().unwrap_or_default();
    let mut message = match (status.is_redirection(), to) {
        (true, Some(to)) => {
            format!("the server answered {status}, to {}; give --server its final URL", out::short(&to, 200))
        }
        _ => complaint(status, &body),
    };
    if status == StatusCode::UNAUTHORIZED {
        message.push_str("\n    set LONGHAUL_TOKEN to a token, or LONGHAUL_TOKEN_FILE to a file that has one; 'longhaul token create' makes one");
    }
    if let Some(wait) = retry_after.filter(|_| !message.contains("try again")) {
        message.push_str(&format!("; try again in {} s", wait.as_secs()));
    }
    Trouble::Refused { status, message, retry_after }
}

/// What a problem document says, for people.
pub(crate) fn complaint(status: StatusCode, body: &[u8]) -> String {
    let problem: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |name: &str| problem[name].as_str().filter(|text| !text.is_empty());
    let code = text("code").map(|code| format!(" [{}]", out::clean(code))).unwrap_or_default();
    if let Some(detail) = text("detail").or_else(|| text("title")) {
        // A detail may have several lines, each harmless.
        let lines: Vec<String> = detail.lines().map(out::clean).collect();
        return format!("{}{code}", lines.join("\n    "));
    }
    let said = out::short(String::from_utf8_lossy(body).trim(), MAX_COMPLAINT_CHARS);
    if said.is_empty() {
        format!("the server answered {status}")
    } else {
        format!("the server answered {status}: {said}")
    }
}

async fn read(mut response: Response, limit: usize) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > limit {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

fn bearer(token: &str) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| {
        Failure::usage("LONGHAUL_TOKEN is not a token: it has a line break or a control character")
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// The system's roots take a while to read, and are read only when they are `needed`.
fn tls(needed: bool) -> Result<ClientConfig, Failure> {
    let mut roots = RootCertStore::empty();
    if needed {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::internal(format!("TLS cannot be used: {error}")))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// The path and query of a request. Each piece stays one piece, whatever is in it.
#[derive(Clone, Debug)]
pub(crate) struct Path {
    text: Result<String, String>,
    has_query: bool,
}

impl Path {
    /// `/v1/tasks/ID` of `["v1", "tasks", id]`.
    pub(crate) fn new(pieces: &[&str]) -> Self {
        let mut text = Ok(String::new());
        for piece in pieces {
            text = match text {
                // The URL's rules would make another path of these.
                Ok(_) if piece.is_empty() => Err("an id or name is empty".to_owned()),
                Ok(_) if matches!(*piece, "." | "..") => Err(format!("'{piece}' is not an id or name")),
                Ok(path) => Ok(format!("{path}/{}", encode(piece))),
                Err(why) => Err(why),
            };
        }
        Self { text, has_query: false }
    }

    /// `/v1/tasks/ID/…`
    pub(crate) fn task(id: &str, pieces: &[&str]) -> Self {
        Self::new(&[&["v1", "tasks", id], pieces].concat())
    }

    /// Adds a parameter, if it has a value.
    pub(crate) fn with(self, name: &str, value: Option<impl AsRef<str>>) -> Self {
        let Some(value) = value else { return self };
        let mark = if self.has_query { '&' } else { '?' };
        let text = self.text.map(|text| format!("{text}{mark}{name}={}", encode(value.as_ref())));
        Self { text, has_query: true }
    }
}

fn encode(piece: &str) -> String {
    utf8_percent_encode(piece, ENCODED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_a_path_stays_one_piece() {
        let path =
            Path::task("a/b?c#d", &["steps", "é #2", "decision"]).with("q", Some("x&y=z")).with("n", None::<&str>);
        assert_eq!(path.text.expect("right"), "/v1/tasks/a%2Fb%3Fc%23d/steps/%C3%A9%20%232/decision?q=x%26y%3Dz");
        assert!(Path::task("..", &[]).text.is_err());
        assert!(Path::task("", &["cancel"]).text.is_err());
    }

    #[test]
    fn every_status_has_its_exit_code() {
        let code = |status: u16| {
            let status = StatusCode::from_u16(status).expect("a status");
            Failure::from(Trouble::Refused { status, message: String::new(), retry_after: None }).code()
        };
        for status in [400, 404, 405, 409, 410, 412, 413, 415, 422, 431, 301] {
            assert_eq!(code(status), 2, "{status}");
        }
        for status in [500, 502, 503, 504, 408] {
            assert_eq!(code(status), 3, "{status}");
        }
        for status in [401, 403, 429] {
            assert_eq!(code(status), 4, "{status}");
        }
        assert_eq!(Failure::from(Trouble::Unreachable(String::new())).code(), 3);
    }

    #[test]
    fn a_problem_document_is_told_as_a_sentence_with_its_code() {
        let body = br#"{"type":"x","title":"Not found","status":404,"detail":"there is no task 7\u001b","code":"not_found"}"#;
        assert_eq!(complaint(StatusCode::NOT_FOUND, body), "there is no task 7\u{fffd} [not_found]");
        assert_eq!(complaint(StatusCode::BAD_GATEWAY, b"<h1>no"), "the server answered 502 Bad Gateway: <h1>no");
        assert_eq!(complaint(StatusCode::BAD_GATEWAY, b""), "the server answered 502 Bad Gateway");
    }

    #[test]
    fn what_is_not_the_url_of_a_server_is_refused_before_anything_is_sent() {
        for bad in ["", "localhost:7171", "ftp://x", "http://", "http://u:p@x", "http://x?y"] {
            assert_eq!(Server::with_token(bad, None).expect_err(bad).code(), 2, "{bad}");
        }
        let server = Server::with_token("http://127.0.0.1:7171/base/", Some("lh_x\n")).expect("right");
        assert_eq!(server.base(), "http://127.0.0.1:7171/base");
        assert!(!format!("{server:?}").contains("lh_x"), "the token is not shown");
        assert!(Server::with_token("http://x", Some("a\nb")).is_err());
    }
}
