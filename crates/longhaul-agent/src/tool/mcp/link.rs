//! One connection to a server: a child process in a group of its own, or streamable HTTP.
//!
//! A server is asked for revision 2026-07-28 first, and one that does not know it is greeted as 2025-11-25
//! wants it. Tools that changed are told in either way: unasked by older servers, by a subscription otherwise.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use longhaul::TaskError;
use reqwest::header::{HeaderName, HeaderValue};
use rmcp::ClientHandler;
use rmcp::model::{
    ClientCapabilities, ClientConfig, ClientRequest, Implementation, ListToolsRequest, PaginatedRequestParams,
    ProgressNotificationParam, ProgressToken, ProtocolVersion, SubscriptionFilter,
};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt, NotificationContext, Peer, RoleClient,
    RunningService, ServiceError,
};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig,
};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::process::{ChildStderr, ChildStdout};
use tokio::task::JoinSet;

use super::Connection;
use crate::artifact::cut_to;
use crate::manifest::agent::McpTransport;
use crate::mask::Mask;
use crate::template::Template;
use crate::tool::command::{Command, Tail, clean_environment};
use crate::tool::group::Group;
use crate::tool::http::{client, header_text, header_value};
use crate::tool::progress::{HowFar, Paced};
use crate::tool::{MAX_STORED_BYTES, sandbox};

/// A server with more tools than this is not taken seriously: a model could not be told of them.
const MAX_TOOLS: usize = 1_000;
/// How much of a server's words is read at once.
const PIECE_BYTES: usize = 16 * 1024;
/// How much of what a server says about a call's progress is passed on.
const MAX_PROGRESS_BYTES: usize = 200;
/// How soon a server that left a call unanswered must answer something else to be kept.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// The pauses between tries to subscribe to a server's changes again.
const SUBSCRIBE_AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));

/// A running connection. Dropped, it ends, and the child process with it.
pub(super) struct Link {
    client: RunningService<RoleClient, Listener>,
    /// A call was given up on; perhaps the server hangs.
    doubtful: AtomicBool,
    /// Hears of changes, where they must be asked for.
    _subscription: JoinSet<()>,
    /// The child, when there is one.
    group: Mutex<Option<Group>>,
}

impl Link {
    /// Reaches the server, in the newest way that it knows.
    pub(super) async fn open(connection: &Arc<Connection>) -> Result<Self, TaskError> {
        if !connection.is_old.load(Ordering::Relaxed) {
            let legacy_version = Some(ProtocolVersion::V_2025_11_25);
            let preferred_versions = vec![ProtocolVersion::V_2026_07_28];
            let either = ClientLifecycleMode::Auto { preferred_versions, legacy_version };
            match Self::open_by(connection, either).await {
                Ok(link) => return Ok(link),
                Err(Refusal::Final(error)) => return Err(error),
                // There are old servers that end when they are asked for something they do not know.
                Err(Refusal::Perhaps(_)) => {}
            }
        }
        let opened = Self::open_by(connection, ClientLifecycleMode::Initialize).await;
        connection.is_old.store(opened.is_ok(), Ordering::Relaxed);
        opened.map_err(|(Refusal::Final(error) | Refusal::Perhaps(error))| error)
    }

    async fn open_by(connection: &Arc<Connection>, lifecycle: ClientLifecycleMode) -> Result<Self, Refusal> {
        let listener = Listener { connection: Arc::downgrade(connection), watched: Watched::default() };
        let words = Words::new(&connection.mask());
        *connection.words.lock().unwrap_or_else(PoisonError::into_inner) = words.clone();
        let unreachable = |why: String| Refusal::Final(connection.unreachable(why));
        let (client, group) = match &connection.spec.transport {
            McpTransport::Stdio(command) => {
                let mut group = start(command).await.map_err(unreachable)?;
                let (stdin, stdout, stderr) = group.pipes();
                let (Some(stdin), Some(stdout)) = (stdin, stdout) else {
                    return Err(unreachable("it has no stdin or stdout".to_owned()));
                };
                tokio::spawn(words.follow(stderr));
                // The protocol's own code logs what it reads.
                let stdout = without_secrets(stdout, connection.mask(), connection.spec.name.clone());
                (listener.serve_with_lifecycle((stdout, stdin), lifecycle).await, Some(group))
            }
            McpTransport::Http { url, headers, env } => {
                let headers = filled(headers, env).map_err(Refusal::Final)?;
                let config = StreamableHttpClientTransportConfig::with_uri(url.as_str()).custom_headers(headers);
                let client = client(false).map_err(Refusal::Final)?.clone();
                let transport = StreamableHttpClientTransport::with_client(client, config);
                (listener.serve_with_lifecycle(transport, lifecycle).await, None)
            }
        };
        let client = client.map_err(|error| refused(connection, error))?;
        let mut subscription = JoinSet::new();
        if must_subscribe(client.peer()) {
            subscription.spawn(subscribe(Arc::downgrade(connection), client.peer().clone()));
        }
        let doubtful = AtomicBool::new(false);
        Ok(Self { client, doubtful, _subscription: subscription, group: Mutex::new(group) })
    }

    pub(super) fn peer(&self) -> &Peer<RoleClient> {
        self.client.peer()
    }

    pub(super) fn watched(&self) -> &Watched {
        &self.client.service().watched
    }

    pub(super) fn is_open(&self) -> bool {
        !self.client.is_closed() && !self.client.peer().is_transport_closed()
    }

    /// A call was given up on.
    pub(super) fn doubt(&self) {
        self.doubtful.store(true, Ordering::Relaxed);
    }

    /// Whether the server still answers, if there is a reason to ask.
    pub(super) async fn answers(&self) -> bool {
        if !self.doubtful.load(Ordering::Relaxed) {
            return true;
        }
        // Not by the listing that others use, which may be answered from memory.
        let asked = self.peer().send_request(ClientRequest::ListToolsRequest(ListToolsRequest::default()));
        let answers = tokio::time::timeout(SIGN_OF_LIFE, asked).await;
        let answers = matches!(answers, Ok(Ok(_) | Err(ServiceError::McpError(_))));
        self.doubtful.store(!answers, Ordering::Relaxed);
        answers
    }

    /// Ends the child process, also while calls still hold this connection.
    pub(super) fn end(&self) {
        drop(self.group.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Why a server did not say hello.
enum Refusal {
    /// It cannot be reached.
    Final(TaskError),
    /// It may in another way.
    Perhaps(TaskError),
}

/// Why a server did not say hello; without its address, which may hold secrets.
fn refused(connection: &Connection, error: ClientInitializeError) -> Refusal {
    let (why, nobody) = match &error {
        ClientInitializeError::TransportError { error, context } => {
            (format!("{}, when {context}", super::causes(error)), super::not_sent(error))
        }
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => (fallback.to_string(), true),
        other => (other.to_string(), false),
    };
    let error = connection.unreachable(why);
    if nobody { Refusal::Final(error) } else { Refusal::Perhaps(error) }
}

/// Whether this server tells of changed tools only who asks for that.
fn must_subscribe(peer: &Peer<RoleClient>) -> bool {
    peer.peer_info().is_some_and(|info| {
        let tells = info.capabilities.tools.as_ref().and_then(|tools| tools.list_changed);
        !info.protocol_version.has_initialize() && tells == Some(true)
    })
}

/// Hears of changed tools until the connection ends. A subscription that breaks off is made again.
async fn subscribe(connection: Weak<Connection>, peer: Peer<RoleClient>) {
    let mut pause = SUBSCRIBE_AGAIN.0;
    let mut again = false;
    while !peer.is_transport_closed() {
        let filter = SubscriptionFilter::builder().tools_list_changed().build();
        let error = match peer.listen(filter).await {
            Ok(mut heard) => {
                pause = SUBSCRIBE_AGAIN.0;
                if again {
                    // They may have changed while nobody listened.
                    relist(&connection, &peer).await;
                }
                loop {
                    match heard.next().await {
                        Ok(Some(_)) => relist(&connection, &peer).await,
                        Ok(None) => break None,
                        Err(error) => break Some(error),
                    }
                }
            }
            Err(ServiceError::McpError(error)) => {
                tracing::warn!(error = %error.message, "an MCP server does not tell when its tools change");
                return;
            }
            Err(error) => Some(error),
        };
        tracing::debug!(?error, "a subscription to an MCP server ended");
        again = true;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(SUBSCRIBE_AGAIN.1);
    }
}

async fn relist(connection: &Weak<Connection>, peer: &Peer<RoleClient>) {
    if let Some(connection) = connection.upgrade() {
        connection.changed(peer).await;
    }
}

/// Starts a server as a command is started, but for as long as it is needed.
async fn start(command: &Command) -> Result<Group, String> {
    let argv = command.argv(&Value::Null).map_err(|error| error.message)?;
    let program = Command::program_path(&command.program, &command.folder);
    let bwrap = match command.sandbox {
        Some(_) => sandbox::bwrap().await,
        None => None,
    };
    let mut child = match (bwrap, &command.sandbox) {
        (Some(bwrap), Some(sandbox)) => sandbox.command(bwrap, &program, &command.folder),
        _ => tokio::process::Command::new(program),
    };
    child.args(&argv[1..]).current_dir(&command.folder);
    clean_environment(&mut child, &command.env);
    child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Group::start(child).map_err(|error| format!("{} cannot be started: {error}", command.program))
}

/// What a server says, without secrets. Ends with the server, or with a message that is too long.
fn without_secrets(mut from: ChildStdout, mask: Mask, server: String) -> DuplexStream {
    let (mut to, masked) = tokio::io::duplex(PIECE_BYTES);
    tokio::spawn(async move {
        let mut masking = mask.stream();
        let mut buffer = vec![0; PIECE_BYTES];
        let mut line = 0;
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            line = match buffer[..count].iter().rposition(|byte| *byte == b'\n') {
                Some(end) => count - end,
                None => line + count,
            };
            if line as u64 > MAX_STORED_BYTES {
                tracing::warn!(
                    server,
                    "a message of more than {MAX_STORED_BYTES} bytes; the connection is closed"
                );
                return;
            }
            if to.write_all(&masking.take(&buffer[..count])).await.is_err() {
                return;
            }
        }
        // Nobody may be there any more to read the end.
        let _ = to.write_all(&masking.rest()).await;
    });
    masked
}

/// The headers as they are sent, with the environment of this moment.
fn filled(
    headers: &[(HeaderName, Template)],
    env: &[String],
) -> Result<HashMap<HeaderName, HeaderValue>, TaskError> {
    let mut filled = HashMap::new();
    for (name, value) in headers {
        let value = value.render_by(|placeholder, _| header_text(placeholder, &Value::Null, env))?;
        filled.insert(name.clone(), header_value(name.as_str(), &value)?);
    }
    Ok(filled)
}

/// All tools of a server, page by page.
pub(super) async fn list(peer: &Peer<RoleClient>, server: &str) -> Result<Vec<rmcp::model::Tool>, ServiceError> {
    let mut tools = Vec::new();
    let mut cursor = None;
    loop {
        let page = peer.list_tools(Some(PaginatedRequestParams::default().with_cursor(cursor))).await?;
        tools.extend(page.tools);
        cursor = page.next_cursor;
        if tools.len() > MAX_TOOLS {
            tracing::warn!(server, "more than {MAX_TOOLS} tools; the others are left out");
            tools.truncate(MAX_TOOLS);
            return Ok(tools);
        }
        if cursor.is_none() {
            return Ok(tools);
        }
    }
}

/// What a server tells without being asked.
pub(super) struct Listener {
    connection: Weak<Connection>,
    watched: Watched,
}

impl ClientHandler for Listener {
    async fn on_tool_list_changed(&self, context: NotificationContext<RoleClient>) {
        relist(&self.connection, &context.peer).await;
    }

    async fn on_progress(&self, told: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        let Some(mask) = self.connection.upgrade().map(|connection| connection.mask()) else { return };
        let message = told.message.map(|message| cut_to(&mask.text(&message), MAX_PROGRESS_BYTES).to_owned());
        let how_far = HowFar { progress: told.progress, total: told.total, message };
        if let Some(call) = self.watched.lock().await.get_mut(&told.progress_token) {
            call.tell(Instant::now(), &how_far);
        }
    }

    fn get_info(&self) -> ClientConfig {
        let version = env!("CARGO_PKG_VERSION");
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("longhaul", version))
    }
}

/// The calls whose progress is passed on. Locked from before a call is sent until its token is known, so that
/// nothing it tells comes too early.
pub(super) type Watched = tokio::sync::Mutex<HashMap<ProgressToken, Paced>>;

/// The end of what a server writes to stderr.
#[derive(Clone, Debug, Default)]
pub(super) struct Words(Arc<Mutex<Tail>>);

impl Words {
    fn new(mask: &Mask) -> Self {
        Self(Arc::new(Mutex::new(Tail::new(mask))))
    }

    /// Ends with the server.
    async fn follow(self, pipe: Option<ChildStderr>) {
        let Some(mut pipe) = pipe else { return };
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).add(&buffer[..count]);
        }
    }

    pub(super) fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).text()
    }
}
