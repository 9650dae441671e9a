//! `longhaul mcp`: an MCP server on stdin and stdout, for clients that start their servers as programs.
//!
//! It is a bridge to `/mcp` of a server: each line is a message, sent on as a request of its own, and what comes back, one
//! answer or a stream, becomes lines again. A server that is started again is waited for: who watches goes on watching, and
//! a session that the new server does not know is begun anew, with its subscriptions. With `--store` there is no server in between.
//! Nothing but messages goes to stdout.

use std::collections::{BTreeSet, HashMap};
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use longhaul::Client;
use longhaul_server::{App, ServerSettings, mcp};
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use crate::args::client::McpArgs;
use crate::config::{Config, Flags};
use crate::exit::Failure;
use crate::http::{Path, Server, Trouble};
use crate::{http, node, sse};

/// The longest line that is taken.
const MAX_LINE: u64 = 16 * 1024 * 1024;
/// A server says that it lives more often than this.
const SILENCE: Duration = Duration::from_secs(45);
/// The pause before a server that was lost is tried again.
const PAUSE: Duration = Duration::from_secs(1);
/// How long calls that are under way have when the client closes stdin.
const LAST: Duration = Duration::from_secs(5);
const EVER: Duration = Duration::from_secs(10 * 365 * 86_400);
/// The code of an error that is the bridge's own: the server was not reached, or refused before it read the message.
const NOT_SERVED: i64 = -32_000;

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const REVISION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const METHOD: HeaderName = HeaderName::from_static("mcp-method");
const NAME: HeaderName = HeaderName::from_static("mcp-name");

pub(crate) async fn run(args: McpArgs) -> Result<(), Failure> {
    match &args.store {
        Some(store) => on_store(store).await,
        None => bridge(Server::new(&args.server)?).await,
    }
}

/// Serves from the store itself.
async fn on_store(store: &str) -> Result<(), Failure> {
    let config = Config::load(Flags::default().set("--store", "store.url", Some(store)))?;
    must_be_there(&config.store.url).await?;
    let artifacts = node::artifacts(&config)?;
    let client = Client::open(&config.store.url).await?;
    let app = App::new(client, false, ServerSettings { artifacts, ..node::settings(&config) });
    let served = mcp::serve_lines(app, tokio::io::stdin(), tokio::io::stdout()).await;
    served.map_err(|error| Failure::internal(error.to_string()))
}

/// A store that is not there is not made here: behind a wrong path in an IDE's configuration it would look like one without tasks.
pub(super) async fn must_be_there(url: &str) -> Result<(), Failure> {
    if url == "memory:" {
        return Ok(());
    }
    let path = url.strip_prefix("sqlite:").map(|path| FilePath::new(path.strip_prefix("//").unwrap_or(path)));
    let there = match path {
        Some(path) if !path.exists() => false,
        _ => longhaul::store::inspect(url).await.map_err(longhaul::Error::from)?.schema > 0,
    };
    let place = path.map_or_else(|| "in this database".to_owned(), |path| format!("at {}", path.display()));
    there.then_some(()).ok_or_else(|| {
        Failure::usage(format!(
            "there is no store {place}: look at --store; 'longhaul up', 'serve' and 'worker' make one at their first start"
        ))
    })
}

async fn bridge(server: Server) -> Result<(), Failure> {
    let (lines, mut written) = mpsc::channel::<String>(64);
    let writer = tokio::spawn(async move {
        let mut stdout = tokio::io::stdout();
        while let Some(mut line) = written.recv().await {
            line.push('\n');
            if stdout.write_all(line.as_bytes()).await.is_err() || stdout.flush().await.is_err() {
                return;
            }
        }
    });
    let bridge =
        Arc::new(Bridge { server, lines, session: Mutex::default(), renewing: tokio::sync::Mutex::default() });
    let mut calls = Calls::default();
    let mut input = BufReader::new(tokio::io::stdin());
    loop {
        let mut line = Vec::new();
        let read = (&mut input).take(MAX_LINE).read_until(b'\n', &mut line).await;
        let read = read.map_err(|error| Failure::internal(format!("cannot read stdin: {error}")))?;
        if read == 0 || writer.is_finished() {
            break;
        }
        if read as u64 == MAX_LINE {
            return Err(Failure::usage(format!("a message has more than {MAX_LINE} bytes")));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice::<Value>(&line) {
            Ok(message) => calls.take(&bridge, message).await,
            Err(error) => bridge.refuse(&Value::Null, -32_700, &format!("not JSON: {error}")).await,
        }
    }
    calls.finish().await;
    bridge.leave().await;
    drop(bridge);
    // What was answered is written before this ends.
    let _ = tokio::time::timeout(LAST, writer).await;
    Ok(())
}

/// The calls under way.
#[derive(Default)]
struct Calls {
    running: JoinSet<()>,
    /// By the id of the request, those that a client can stop by saying so.
    by_id: HashMap<String, AbortHandle>,
    /// Streams that end with the client only.
    streams: JoinSet<()>,
}

impl Calls {
    async fn take(&mut self, bridge: &Arc<Bridge>, message: Value) {
        while self.running.try_join_next().is_some() {}
        self.by_id.retain(|_, call| !call.is_finished());
        let (method, id) = (message["method"].as_str().unwrap_or_default().to_owned(), message["id"].clone());
        let is_request = !method.is_empty() && !id.is_null();
        if is_request && method == "initialize" {
            bridge.begin(message).await;
        } else if is_request {
            let stateless = revision_of(&message).is_some();
            let (bridge, listens) = (Arc::clone(bridge), method == "subscriptions/listen");
            let call = if listens {
                self.streams.spawn(async move { bridge.listen(&message).await })
            } else {
                self.running.spawn(async move { bridge.call(&message).await })
            };
            if stateless {
                self.by_id.insert(id.to_string(), call);
            }
        } else if method == "notifications/cancelled"
            && let Some(call) = self.by_id.remove(&message["params"]["requestId"].to_string())
        {
            // The server hears of it by the end of the connection.
            call.abort();
        } else if bridge.session().id.is_some() {
            bridge.tell(&message).await;
            if method == "notifications/initialized" {
                let bridge = Arc::clone(bridge);
                self.streams.spawn(async move { bridge.hear().await });
            }
        }
    }

    /// Lets calls end that soon will.
    async fn finish(mut self) {
        let ended = async { while self.running.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(LAST, ended).await;
    }
}

/// The session with a server, for clients of revisions before 2026-07-28.
#[derive(Clone, Default)]
struct Session {
    id: Option<HeaderValue>,
    revision: Option<String>,
    /// The request that began it.
    initialize: Value,
    /// What it watches.
    subscribed: BTreeSet<String>,
}

struct Bridge {
    server: Server,
    lines: mpsc::Sender<String>,
    session: Mutex<Session>,
    /// Held while a session is begun anew.
    renewing: tokio::sync::Mutex<()>,
}

/// The revision that a request names itself, as it does since 2026-07-28.
fn revision_of(message: &Value) -> Option<&str> {
    message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"].as_str()
}

/// Passes on everything.
fn all(message: Value) -> Vec<Value> {
    vec![message]
}

/// A client is told once that it listens. What was acknowledged then and is not any more was removed while the server was away:
/// the client is told of a change, and will find out.
fn once(first: &mut Option<Vec<Value>>, acknowledged: Value) -> Vec<Value> {
    let params = &acknowledged["params"];
    let uris = params["notifications"]["resourceSubscriptions"].as_array().cloned().unwrap_or_default();
    let Some(known) = first else {
        *first = Some(uris);
        return vec![acknowledged];
    };
    let gone = known.extract_if(.., |uri| !uris.contains(uri)).map(|uri| {
        json!({
            "jsonrpc": "2.0", "method": "notifications/resources/updated",
            "params": {"uri": uri, "_meta": params["_meta"]},
        })
    });
    gone.collect()
}

impl Bridge {
    fn session(&self) -> MutexGuard<'_, Session> {
        // Every change is one call: a panic leaves a usable value.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn write(&self, line: String) {
        // Nobody reads any more: this ends soon.
        let _ = self.lines.send(line).await;
    }

    async fn refuse(&self, id: &Value, code: i64, why: &str) {
        let error = json!({"code": code, "message": why});
        self.write(json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string()).await;
    }

    /// Sends a message; the answer may be one of an error.
    async fn post(&self, message: &Value, session: &Session) -> Result<Response, Trouble> {
        let mut call = self
            .server
            .request(Method::POST, &Path::new(&["mcp"]))
            .accept("application/json, text/event-stream")
            .timeout(EVER)
            .json(message);
        if let Some(revision) = revision_of(message) {
            let name = ["name", "uri", "taskId"].iter().find_map(|name| message["params"][name].as_str());
            call = call.header(REVISION, revision).header(METHOD, message["method"].as_str().unwrap_or_default());
            if let Some(name) = name {
                call = call.header(NAME, name);
            }
        } else {
            if let Some(revision) = &session.revision {
                call = call.header(REVISION, revision);
            }
            if let Some(id) = session.id.as_ref().and_then(|id| id.to_str().ok()) {
                call = call.header(SESSION, id);
            }
        }
        call.open_any().await
    }

    /// Sends a request and passes on what comes back.
    async fn call(&self, message: &Value) {
        let id = &message["id"];
        match self.post_in_session(message).await {
            Ok(response) => {
                let subscribed = message["params"]["uri"].as_str().map(str::to_owned);
                let answered = self.pass_on(response, all).await;
                match (answered, message["method"].as_str(), subscribed) {
                    (Err(why), ..) => self.refuse(id, NOT_SERVED, &why).await,
                    (Ok(true), Some("resources/subscribe"), Some(uri)) => {
                        self.session().subscribed.insert(uri);
                    }
                    (Ok(_), Some("resources/unsubscribe"), Some(uri)) => {
                        self.session().subscribed.remove(&uri);
                    }
                    _ => {}
                }
            }
            Err(trouble) => self.refuse(id, NOT_SERVED, &Failure::from(trouble).to_string()).await,
        }
    }

    /// Sends a message of a session, in a new one if the server does not know it any more.
    async fn post_in_session(&self, message: &Value) -> Result<Response, Trouble> {
        let session = self.session().clone();
        let response = self.post(message, &session).await?;
        if response.status() == StatusCode::NOT_FOUND && revision_of(message).is_none() && session.id.is_some() {
            self.renew(&session).await?;
            let session = self.session().clone();
            return self.post(message, &session).await;
        }
        Ok(response)
    }

    /// Passes on what `wanted` makes of the messages of an answer; whether the request was done, or why there is no answer to it.
    async fn pass_on(
        &self,
        mut response: Response,
        mut wanted: impl FnMut(Value) -> Vec<Value>,
    ) -> Result<bool, String> {
        let status = response.status();
        let kind = response.headers().get(reqwest::header::CONTENT_TYPE);
        let streamed = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if !streamed {
            let body = response.bytes().await.map_err(|error| format!("the connection was lost: {error}"))?;
            return match serde_json::from_slice::<Value>(&body) {
                Ok(message) if message["jsonrpc"].is_string() => {
                    let done = message["error"].is_null();
                    for message in wanted(message) {
                        self.write(message.to_string()).await;
                    }
                    Ok(done)
                }
                _ => Err(http::complaint(status, &body)),
            };
        }
        let mut parser = sse::Parser::default();
        let lost = "the connection was lost before the answer came; what was asked may have been done";
        loop {
            let chunk = match tokio::time::timeout(SILENCE, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                _ => return Err(lost.to_owned()),
            };
            let frames = parser.push(&chunk).map_err(|_| "the answer is too large".to_owned())?;
            for frame in frames.into_iter().filter(|frame| !frame.data.is_empty()) {
                let Ok(message) = serde_json::from_str::<Value>(&frame.data) else { continue };
                let (ends, done) = (message["method"].is_null(), message["error"].is_null());
                for message in wanted(message) {
                    self.write(message.to_string()).await;
                }
                if ends {
                    return Ok(done);
                }
            }
        }
    }

    /// Watches for as long as the client does, through restarts of the server: it is told once that it listens, and after
    /// each gap how things stand.
    async fn listen(&self, message: &Value) {
        let mut acknowledged = None;
        loop {
            let session = Session::default();
            let answered = match self.post(message, &session).await {
                // It is being started.
                Ok(response) if acknowledged.is_some() && response.status().is_server_error() => Ok(true),
                Ok(response) if !response.status().is_success() => {
                    let refused = self.pass_on(response, all).await;
                    if let Err(why) = refused {
                        self.refuse(&message["id"], NOT_SERVED, &why).await;
                    }
                    return;
                }
                Ok(response) => {
                    self.pass_on(response, |told| {
                        if told["method"] == "notifications/subscriptions/acknowledged" {
                            return once(&mut acknowledged, told);
                        }
                        // A server that stops ends the stream; this goes on with the next one.
                        let ends = told["method"].is_null() && told["error"].is_null();
                        if ends { Vec::new() } else { vec![told] }
                    })
                    .await
                }
                Err(trouble) if acknowledged.is_none() => {
                    return self.refuse(&message["id"], NOT_SERVED, &Failure::from(trouble).to_string()).await;
                }
                Err(trouble) => Err(Failure::from(trouble).to_string()),
            };
            if answered == Ok(false) {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Begins a session.
    async fn begin(&self, message: Value) {
        let id = message["id"].clone();
        match self.post(&message, &Session::default()).await {
            Ok(response) => {
                let session = response.headers().get(SESSION).cloned();
                let mut revision = None;
                let begun = self.pass_on(response, |answer| {
                    revision = answer["result"]["protocolVersion"].as_str().map(str::to_owned);
                    vec![answer]
                });
                match begun.await {
                    Ok(_) => {
                        *self.session() =
                            Session { id: session, revision, initialize: message, subscribed: BTreeSet::new() };
                    }
                    Err(why) => self.refuse(&id, NOT_SERVED, &why).await,
                }
            }
            Err(trouble) => self.refuse(&id, NOT_SERVED, &Failure::from(trouble).to_string()).await,
        }
    }

    /// Begins the session anew, unless someone else did already: the client does not notice but by being told that everything
    /// it watches may have changed.
    async fn renew(&self, lost: &Session) -> Result<(), Trouble> {
        let _one_at_a_time = self.renewing.lock().await;
        if self.session().id != lost.id {
            return Ok(());
        }
        let refused = |status| Trouble::Unreachable(format!("the session could not be begun anew: {status}"));
        let begun = self.post(&lost.initialize, &Session::default()).await?;
        let id = begun.headers().get(SESSION).cloned();
        if !begun.status().is_success() || id.is_none() {
            return Err(refused(begun.status()));
        }
        // The answer says what the first one said.
        let _ = self.pass_on(begun, |_| Vec::new()).await;
        let session = Session { id, ..self.session().clone() };
        self.post(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}), &session).await?;
        for (number, uri) in session.subscribed.iter().enumerate() {
            let id = format!("longhaul-{number}");
            let again =
                json!({"jsonrpc": "2.0", "id": id, "method": "resources/subscribe", "params": {"uri": uri}});
            let response = self.post(&again, &session).await?;
            let _ = self.pass_on(response, |_| Vec::new()).await;
            let told =
                json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": uri}});
            self.write(told.to_string()).await;
        }
        self.session().id = session.id;
        Ok(())
    }

    /// Passes on something that has no answer.
    async fn tell(&self, message: &Value) {
        if let Err(trouble) = self.post_in_session(message).await {
            tracing::warn!(why = %Failure::from(trouble), "a message did not reach the server");
        }
    }

    /// Passes on what the server says of itself in a session, through restarts of the server.
    async fn hear(&self) {
        loop {
            let session = self.session().clone();
            let Some(id) = session.id.as_ref().and_then(|id| id.to_str().ok()) else { return };
            let call =
                self.server.request(Method::GET, &Path::new(&["mcp"])).accept("text/event-stream").timeout(EVER);
            let revision = session.revision.as_deref().unwrap_or_default();
            match call.header(SESSION, id).header(REVISION, revision).open_any().await {
                Ok(response) if response.status().is_success() => drop(self.pass_on(response, all).await),
                Ok(response) if response.status() == StatusCode::NOT_FOUND => {
                    if let Err(trouble) = self.renew(&session).await {
                        tracing::debug!(why = %Failure::from(trouble), "the server is not there yet");
                    }
                }
                _ => {}
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Ends the session.
    async fn leave(&self) {
        let session = self.session().clone();
        if let Some(id) = session.id.as_ref().and_then(|id| id.to_str().ok()) {
            let call = self.server.request(Method::DELETE, &Path::new(&["mcp"])).header(SESSION, id);
            // A session that nobody uses ends by itself.
            let _ = tokio::time::timeout(LAST, call.open_any()).await;
        }
    }
}
