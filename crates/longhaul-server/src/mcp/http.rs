//! MCP over HTTP, on `/mcp`.
//!
//! Who asks was found out before, and pages of other origins were refused (`auth.rs`). Here, bodies are read within the server's
//! bounds, and sessions are kept in theirs. Since revision 2026-07-28 every request stands for itself and any server of a cluster can
//! answer it. Clients of earlier revisions have a session, which lives in one process: another one does not know it, says so
//! with 404, and the client begins a new one. A session belongs to who began it: its id is signed with their name and tenant.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::BodyExt;
use rmcp::handler::server::ServerHandler;
use rmcp::transport::streamable_http_server::session::SessionManager;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};
use sha2::Sha256;

use super::{Mcp, listen};
use crate::auth::{Caller, Viewer};
use crate::body;
use crate::problem::Problem;
use crate::routes::json_answer;
use crate::state::App;

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
pub(super) const REVISION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const NEEDS_SESSION: &str = "send the header Mcp-Session-Id, which initialize gives; or a request of revision 2026-07-28, which needs none";
const NO_SESSION: &str = "there is no such session here; begin a new one with initialize";
/// The first revision without sessions.
const STATELESS: &str = "2026-07-28";
/// How many sessions there are at once in this process, and of one token.
const MAX_SESSIONS: usize = 1_000;
const MAX_OF_ONE: usize = 100;
/// How long a session is kept that has no request under way and no stream open.
const IDLE: Duration = Duration::from_secs(300);
/// How often idle sessions are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// The route. `handler` makes the MCP server of each session or request, from Longhaul's own.
pub(crate) fn route<H: ServerHandler>(
    app: &App,
    handler: impl Fn(Mcp) -> H + Send + Sync + 'static,
) -> MethodRouter<App> {
    let sessions = Arc::new(Sessions::default());
    let config = StreamableHttpServerConfig::default()
        .with_cancellation_token(app.stopping().child_token())
        .with_max_request_body_bytes(app.settings().max_body)
        .with_sse_keep_alive(Some(app.settings().heartbeat))
        // Both are checked before, as for every other route.
        .disable_allowed_hosts()
        .disable_allowed_origins();
    let of_session = app.clone();
    let handler = Arc::new(move || handler(Mcp::new(of_session.clone(), None)));
    let make = Arc::clone(&handler);
    let service = StreamableHttpService::new(move || Ok(make()), Arc::clone(&sessions.manager), config);
    let answer = async move |State(app): State<App>, Viewer(caller): Viewer, request: Request| {
        sessions.tidy().await;
        let (mut parts, body) = request.into_parts();
        let open = sessions.enter(&mut parts.headers, &parts.method, &caller)?;
        let body = match parts.method {
            Method::POST => {
                let body = body::read(body, &parts.headers, &app).await?;
                match listen::before(&caller, &*handler, &parts.headers, body).await {
                    Ok(body) => body,
                    Err(answer) => return Ok(answer),
                }
            }
            _ => Bytes::new(),
        };
        let leaves = parts.method == Method::DELETE;
        let kind = parts.headers.get(header::CONTENT_TYPE).cloned();
        let mut answer = service.handle(Request::from_parts(parts, Body::from(body.clone()))).await;
        if answer.status().is_server_error() && app.stopping().is_cancelled() {
            // What was under way was given up.
            return Err(Problem::new("draining", "the server is stopping; try again"));
        }
        if !answer.status().is_success() && !answer.headers().contains_key(header::CONTENT_TYPE) {
            return Ok(refusal(answer.status(), answer.into_body(), kind.as_ref(), &body).await);
        }
        if leaves && answer.status().is_success() {
            sessions.forget(open.as_ref());
        }
        let open = open.or_else(|| sessions.begun(answer.headers_mut(), &caller));
        // For as long as the answer is on its way, a stream perhaps, the session is in use.
        let answer = answer.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _ = &open;
                frame
            }))
        });
        Ok::<_, Problem>(answer.into_response())
    };
    axum::routing::get(answer.clone()).post(answer.clone()).delete(answer)
}

/// What rmcp refuses in plain words, as it is refused everywhere else here: what is no message of the protocol by an error of JSON-RPC,
/// a request whose head is wrong by a problem.
async fn refusal<B: HttpBody>(status: StatusCode, words: B, kind: Option<&HeaderValue>, sent: &[u8]) -> Response {
    let words = words.collect().await.map(|words| words.to_bytes()).unwrap_or_default();
    let words = String::from_utf8_lossy(&words);
    let words = words.split_once(": ").map_or(&*words, |(_, words)| words);
    let is_json = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    let problem = match status {
        StatusCode::UNSUPPORTED_MEDIA_TYPE if is_json => return no_message(sent),
        StatusCode::BAD_REQUEST if words == "Session ID is required" => match no_session(sent) {
            Some(answer) => return answer,
            None => Problem::new("invalid_parameter", NEEDS_SESSION),
        },
        StatusCode::UNSUPPORTED_MEDIA_TYPE => {
            Problem::new("unsupported_media_type", "a message must come with Content-Type: application/json")
        }
        StatusCode::NOT_ACCEPTABLE => {
            Problem::new("not_acceptable", "send Accept: application/json, text/event-stream")
        }
        StatusCode::METHOD_NOT_ALLOWED => Problem::new("method_not_allowed", "messages are sent by POST"),
        StatusCode::NOT_FOUND => Problem::new("not_found", NO_SESSION),
        StatusCode::PAYLOAD_TOO_LARGE => Problem::new("too_large", words),
        status if status.is_client_error() => Problem::new("invalid_parameter", words),
        _ => {
            tracing::error!(%status, words, "the MCP server failed");
            Problem::new("internal", "the server failed; its log says how")
        }
    };
    problem.into_response()
}

/// What is answered to something that is no message: it is no JSON, or JSON of another kind.
fn no_message(sent: &[u8]) -> Response {
    let mut error = match serde_json::from_slice::<Value>(sent) {
        Err(error) => json!({"id": null, "error": {"code": -32700, "message": format!("not JSON: {error}")}}),
        Ok(message) => {
            let id = Some(&message["id"]).filter(|id| id.is_string() || id.is_number());
            let why = "not a message of the protocol: one object with jsonrpc \"2.0\", a method and its params";
            json!({"id": id, "error": {"code": -32600, "message": why}})
        }
    };
    error["jsonrpc"] = "2.0".into();
    json_answer(StatusCode::BAD_REQUEST, &error)
}

/// A session that cannot begin, because what should begin it cannot be read.
fn no_session(sent: &[u8]) -> Option<Response> {
    let message = serde_json::from_slice::<Value>(sent).ok()?;
    if message["method"] != "initialize" {
        return None;
    }
    let why = super::misread("initialize", message["params"].clone()).unwrap_or_default();
    let why = format!("the params of initialize cannot be read: {why}");
    let error = json!({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": why}});
    Some(json_answer(StatusCode::BAD_REQUEST, &error))
}

/// The sessions of clients of revisions before 2026-07-28.
struct Sessions {
    manager: Arc<LocalSessionManager>,
    /// Signs their ids.
    key: [u8; 32],
    used: Arc<Mutex<HashMap<String, Used>>>,
    looked: Mutex<Instant>,
}

/// What is known of a session's use.
struct Used {
    owner: String,
    /// Requests under way and streams open.
    open: usize,
    last: Instant,
}

impl Default for Sessions {
    fn default() -> Self {
        let mut manager = LocalSessionManager::default();
        // What is idle is decided here: a client that only listens is not.
        manager.session_config.keep_alive = None;
        Self {
            manager: Arc::new(manager),
            key: rand::random(),
            used: Arc::default(),
            looked: Mutex::new(Instant::now()),
        }
    }
}

/// A use of a session, until it is dropped.
struct Open {
    session: String,
    used: Arc<Mutex<HashMap<String, Used>>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(used) = lock(&self.used).get_mut(&self.session) {
            used.open = used.open.saturating_sub(1);
            used.last = Instant::now();
        }
    }
}

/// Whose a session is.
fn owner(caller: &Caller) -> String {
    // No name has a NUL in it.
    format!("{}\0{}", caller.tenant, caller.name)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one call: a panic leaves a usable value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sessions {
    /// The session that a request names, if it is the caller's; its header becomes what the manager knows it by.
    fn enter(&self, headers: &mut HeaderMap, method: &Method, caller: &Caller) -> Result<Option<Open>, Problem> {
        let Some(named) = headers.get(SESSION) else {
            let stateless =
                headers.get(REVISION).is_some_and(|revision| revision.as_bytes() >= STATELESS.as_bytes());
            if method == Method::POST && !stateless {
                self.has_room(caller)?;
            }
            return Ok(None);
        };
        let unknown = || Problem::new("not_found", NO_SESSION);
        let named = named.to_str().map_err(|_| unknown())?;
        let session = named.split_once('.').map(|(session, _)| session.to_owned()).ok_or_else(unknown)?;
        if self.signed(&session, caller) != named {
            return Err(unknown());
        }
        headers.insert(SESSION, HeaderValue::from_str(&session).map_err(|_| unknown())?);
        let mut all = lock(&self.used);
        let used = all.get_mut(&session).ok_or_else(unknown)?;
        used.open += 1;
        used.last = Instant::now();
        drop(all);
        Ok(Some(Open { session, used: Arc::clone(&self.used) }))
    }

    /// Whether another session can begin, for this caller.
    fn has_room(&self, caller: &Caller) -> Result<(), Problem> {
        let all = lock(&self.used);
        let max = match all.values().filter(|used| used.owner == owner(caller)).count() {
            MAX_OF_ONE.. => MAX_OF_ONE,
            _ if all.len() >= MAX_SESSIONS => MAX_SESSIONS,
            _ => return Ok(()),
        };
        let detail = format!("there are {max} sessions already; end some (DELETE), or try again later");
        Err(Problem::new("overloaded", detail).retry_after(Duration::from_secs(30)))
    }

    /// The session that an answer begins; its header becomes what the client knows it by.
    fn begun(&self, headers: &mut HeaderMap, caller: &Caller) -> Option<Open> {
        let session = headers.get(SESSION)?.to_str().ok()?.to_owned();
        headers.insert(SESSION, HeaderValue::from_str(&self.signed(&session, caller)).ok()?);
        let used = Used { owner: owner(caller), open: 1, last: Instant::now() };
        lock(&self.used).insert(session.clone(), used);
        Some(Open { session, used: Arc::clone(&self.used) })
    }

    fn forget(&self, open: Option<&Open>) {
        if let Some(open) = open {
            lock(&self.used).remove(&open.session);
        }
    }

    fn signed(&self, session: &str, caller: &Caller) -> String {
        let mut mac = match Hmac::<Sha256>::new_from_slice(&self.key) {
            Ok(mac) => mac,
            // A key of any length is taken.
            Err(_) => unreachable!("the key has 32 bytes"),
        };
        mac.update(format!("{session}\0{}", owner(caller)).as_bytes());
        format!("{session}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
    }

    /// Closes sessions that nobody has used for a while.
    async fn tidy(&self) {
        {
            let mut looked = lock(&self.looked);
            if looked.elapsed() < LOOK_EVERY {
                return;
            }
            *looked = Instant::now();
        }
        let mut idle = Vec::new();
        lock(&self.used).retain(|session, used| {
            let keep = used.open > 0 || used.last.elapsed() < IDLE;
            if !keep {
                idle.push(session.clone());
            }
            keep
        });
        for session in idle {
            if let Err(error) = self.manager.close_session(&session.as_str().into()).await {
                tracing::debug!(%error, "an idle session could not be closed");
            }
        }
    }
}
