//! One connection to a server: a child process in a group of its own, or streamable HTTP.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use longhaul::TaskError;
use reqwest::header::{HeaderName, HeaderValue};
use rmcp::model::{ClientCapabilities, ClientConfig, Implementation, PaginatedRequestParams};
use rmcp::service::{ClientInitializeError, NotificationContext, Peer, RoleClient, RunningService, ServiceError};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig,
};
use rmcp::{ClientHandler, ServiceExt};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::process::{ChildStderr, ChildStdout};

use super::Connection;
use crate::manifest::agent::McpTransport;
use crate::mask::Mask;
use crate::template::Template;
use crate::tool::command::{Command, Tail, clean_environment};
use crate::tool::group::Group;
use crate::tool::http::{client, header_text, header_value};
use crate::tool::sandbox;

/// A server with more tools than this is not taken seriously: a model could not be told of them.
const MAX_TOOLS: usize = 1_000;

/// How much of a server's words is read at once.
const PIECE_BYTES: usize = 16 * 1024;

/// A running connection. Dropped, it ends, and the child process with it.
pub(super) struct Link {
    client: RunningService<RoleClient, Listener>,
    /// The child, when there is one.
    _group: Option<Group>,
}

impl Link {
    pub(super) async fn open(connection: &Arc<Connection>) -> Result<Self, TaskError> {
        let listener = Listener(Arc::downgrade(connection));
        let words = Words::new(&connection.mask());
        *connection.words.lock().unwrap_or_else(PoisonError::into_inner) = words.clone();
        match &connection.spec.transport {
            McpTransport::Stdio(command) => {
                let mut group = start(command).await.map_err(|error| connection.unreachable(error))?;
                let (stdin, stdout, stderr) = group.pipes();
                let (Some(stdin), Some(stdout)) = (stdin, stdout) else {
                    return Err(connection.unreachable("it has no stdin or stdout".to_owned()));
                };
                tokio::spawn(words.follow(stderr));
                // The protocol's own code logs what it reads.
                let stdout = without_secrets(stdout, connection.mask());
                let client = listener.serve((stdout, stdin)).await;
                let client = client.map_err(|error| connection.unreachable(refusal(error)))?;
                Ok(Self { client, _group: Some(group) })
            }
            McpTransport::Http { url, headers, env } => {
                let config = StreamableHttpClientTransportConfig::with_uri(url.as_str())
                    .custom_headers(filled(headers, env)?);
                let transport = StreamableHttpClientTransport::with_client(client(false)?.clone(), config);
                let client = listener.serve(transport).await;
                let client = client.map_err(|error| connection.unreachable(refusal(error)))?;
                Ok(Self { client, _group: None })
            }
        }
    }

    pub(super) fn peer(&self) -> Peer<RoleClient> {
        self.client.peer().clone()
    }

    pub(super) fn is_open(&self) -> bool {
        !self.client.is_closed() && !self.client.peer().is_transport_closed()
    }

    pub(super) fn is(&self, peer: &Peer<RoleClient>) -> bool {
        match (self.client.peer().peer_info(), peer.peer_info()) {
            (Some(own), Some(other)) => Arc::ptr_eq(&own, &other),
            _ => false,
        }
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

/// What a server says, without secrets. Ends with the server.
fn without_secrets(mut from: ChildStdout, mask: Mask) -> DuplexStream {
    let (mut to, masked) = tokio::io::duplex(PIECE_BYTES);
    tokio::spawn(async move {
        let mut masking = mask.stream();
        let mut buffer = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
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

/// Why a server did not say hello; without its address, which may hold secrets.
fn refusal(error: ClientInitializeError) -> String {
    match error {
        ClientInitializeError::TransportError { error, context } => {
            format!("{}, when {context}", super::causes(&error))
        }
        other => other.to_string(),
    }
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
pub(super) struct Listener(Weak<Connection>);

impl ClientHandler for Listener {
    async fn on_tool_list_changed(&self, context: NotificationContext<RoleClient>) {
        let Some(connection) = self.0.upgrade() else { return };
        if let Err(error) = connection.list(&context.peer).await {
            tracing::warn!(server = connection.spec.name, %error, "its tools changed, and cannot be listed");
        }
    }

    fn get_info(&self) -> ClientConfig {
        let version = env!("CARGO_PKG_VERSION");
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("longhaul", version))
    }
}

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
