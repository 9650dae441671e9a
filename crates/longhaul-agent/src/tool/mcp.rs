//! Tools of MCP servers.
//!
//! A [`Connection`] starts or reaches its server when it is needed, again when it is gone, and puts the
//! server's tools on a shelf, again when the server says that they changed. A call that is dropped
//! tells the server so. What a server says about its tools is for the model; the rules for calling
//! them come from the manifest.
//!
//! `link.rs` makes a connection, `flight.rs` is a call under way, `content.rs` reads what it gave.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, RwLock, Weak};

use longhaul::{StepContext, TaskError};
use rmcp::model::{CallToolRequestParams, ErrorCode, MetaObject, RequestMetaObject, ServerResult};
use rmcp::service::{Peer, RoleClient, ServiceError};
use rmcp::transport::DynamicTransportError;
use rmcp::transport::streamable_http_client::StreamableHttpError;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;

use super::collect::Keep;
use super::{AgentTool, Call, MAX_NAME_BYTES, Output, Tool};
use crate::manifest::agent::{McpServer, McpTransport};
use crate::mask::Mask;

mod content;
mod flight;
mod link;

use flight::Flight;
use link::Link;

/// Stands between the server's name and the tool's.
const SEPARATOR: &str = "__";

/// One tool of an MCP server.
#[derive(Clone)]
pub struct Remote {
    connection: Arc<Connection>,
    tool: String,
}

impl Remote {
    /// The server's name in the manifest.
    pub fn server(&self) -> &str {
        &self.connection.spec.name
    }

    /// The server's name for the tool.
    pub fn tool(&self) -> &str {
        &self.tool
    }

    pub(super) async fn run(&self, call: &Call, keep: Keep<'_>) -> Result<Output, TaskError> {
        let arguments = match &*call.body {
            Value::Object(fields) => fields.clone(),
            Value::Null => Map::new(),
            _ => {
                return Err(TaskError::fatal(
                    "invalid_arguments",
                    "the arguments of an MCP tool must be an object",
                ));
            }
        };
        let mut params = CallToolRequestParams::new(self.tool.clone()).with_arguments(arguments);
        params.meta = Some(meta(&call.context));
        let link = self.connection.link().await?;
        let answer = match Flight::begin(&link, params, call.progress.clone()).await {
            Ok(flight) => flight.answer().await,
            Err(error) => {
                let message = format!("{self}: the server is gone before it was called: {error}");
                return Err(TaskError::retryable("not_connected", message));
            }
        };
        let failed = match answer {
            Ok(ServerResult::CallToolResult(result)) => {
                return content::output(&self.tool, result, keep, &self.connection.mask()).await;
            }
            Ok(ServerResult::InputRequiredResult(_) | ServerResult::CreateTaskResult(_)) => {
                let message = format!("{self} wants to ask back or to answer later, which is not supported");
                return Err(TaskError::in_doubt("no_answer", message));
            }
            Ok(_) => ServiceError::UnexpectedResponse,
            Err(error) => error,
        };
        // The next call gets a new connection; others that are under way keep theirs.
        if matches!(failed, ServiceError::TransportSend(_)) {
            self.connection.forget(&link).await;
        }
        let mut error = self.judge(failed);
        error.message = self.connection.mask().text(&error.message);
        Err(error)
    }

    /// Did it happen?
    fn judge(&self, error: ServiceError) -> TaskError {
        match error {
            ServiceError::McpError(error) => {
                let message = format!("{self} answered with error {}: {}", error.code.0, error.message);
                match error.code {
                    ErrorCode::INVALID_PARAMS | ErrorCode::METHOD_NOT_FOUND => {
                        TaskError::fatal("mcp_error", message)
                    }
                    // As a status 5xx: the server does not know itself.
                    ErrorCode::INTERNAL_ERROR => TaskError::in_doubt("mcp_error", message),
                    _ => TaskError::retryable("mcp_error", message),
                }
                .detail("mcp_code", error.code.0)
            }
            ServiceError::TransportSend(error) if not_sent(&error) => {
                TaskError::retryable("not_connected", format!("{self}: cannot connect: {}", causes(&error)))
            }
            ServiceError::TransportSend(error) => TaskError::in_doubt(
                "no_answer",
                format!("{self}: connection lost after sending: {}", causes(&error)),
            ),
            ServiceError::TransportClosed => TaskError::in_doubt(
                "no_answer",
                format!(
                    "{self}: the server is gone, and nobody knows whether it was done{}",
                    self.connection.last_words()
                ),
            ),
            other => TaskError::in_doubt("no_answer", format!("{self}: {other}")),
        }
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tool {} of MCP server {}", self.tool, self.server())
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("server", &self.server()).field("tool", &self.tool).finish()
    }
}

/// Who calls, under the same names as in a command's environment.
fn meta(context: &StepContext) -> RequestMetaObject {
    let mut fields = Map::new();
    fields.insert("LONGHAUL_TASK_ID".to_owned(), json!(context.task.to_string()));
    fields.insert("LONGHAUL_STEP".to_owned(), json!(context.step));
    fields.insert("LONGHAUL_IDEMPOTENCY_KEY".to_owned(), json!(context.idempotency_key));
    fields.insert("LONGHAUL_FENCE".to_owned(), json!(context.fence));
    if let Some(traceparent) = &context.traceparent {
        fields.insert("traceparent".to_owned(), json!(traceparent));
    }
    RequestMetaObject(MetaObject(fields))
}

/// Whether nothing can have reached the server.
fn not_sent(error: &DynamicTransportError) -> bool {
    // The end of the line was not written, so a server that reads lines has none.
    if let Some(error) = error.error.downcast_ref::<std::io::Error>() {
        return error.kind() == std::io::ErrorKind::BrokenPipe;
    }
    match error.error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
        Some(StreamableHttpError::Client(error)) => error.is_connect() || error.is_builder(),
        Some(StreamableHttpError::HttpStatus(answer)) => answer.status < 500,
        Some(
            StreamableHttpError::SessionExpired
            | StreamableHttpError::AuthRequired(_)
            | StreamableHttpError::InsufficientScope(_)
            | StreamableHttpError::ReinitializationFailed(_),
        ) => true,
        _ => false,
    }
}

/// The causes of a transport's error, without the URL of a request.
fn causes(error: &DynamicTransportError) -> String {
    if let Some(StreamableHttpError::Client(error)) =
        error.error.downcast_ref::<StreamableHttpError<reqwest::Error>>()
    {
        return crate::net::causes(error);
    }
    error.error.to_string()
}

/// The tools of one server, as it last said.
pub(super) type Shelf = RwLock<Vec<Arc<AgentTool>>>;

/// One server: connected when needed, and again when it is gone.
pub(super) struct Connection {
    spec: McpServer,
    /// Held while it connects: others wait for the same connection.
    link: Mutex<Option<Arc<Link>>>,
    /// The server is known not to know the newer revision of the protocol.
    is_old: AtomicBool,
    /// Held while tools are listed, so that an older list never replaces a newer one.
    listing: Mutex<()>,
    /// Whose tools have this connection; held weakly, because they hold it.
    shelf: Weak<Shelf>,
    /// What the last server complained about, for the error of a call that lost it.
    words: std::sync::Mutex<link::Words>,
}

impl Connection {
    pub(super) fn new(spec: McpServer, shelf: &Arc<Shelf>) -> Arc<Self> {
        Arc::new(Self {
            spec,
            link: Mutex::new(None),
            is_old: AtomicBool::new(false),
            listing: Mutex::new(()),
            shelf: Arc::downgrade(shelf),
            words: std::sync::Mutex::default(),
        })
    }

    /// Connects, unless it is connected.
    pub(super) async fn open(self: &Arc<Self>) -> Result<(), TaskError> {
        self.link().await.map(drop)
    }

    /// The connection, made if there is none.
    async fn link(self: &Arc<Self>) -> Result<Arc<Link>, TaskError> {
        let mut slot = self.link.lock().await;
        if let Some(link) = slot.as_ref().filter(|link| link.is_open()) {
            // A server that hangs is replaced, but not while others still wait for it.
            if Arc::strong_count(link) > 1 || link.answers().await {
                return Ok(Arc::clone(link));
            }
            tracing::warn!(server = self.spec.name, "the MCP server does not answer and is given up");
        }
        // The old server ends before another begins.
        if let Some(old) = slot.take() {
            old.end();
        }
        let open = async {
            let link = Link::open(self).await?;
            self.list(link.peer())
                .await
                .map_err(|error| self.unreachable(format!("its tools cannot be listed: {error}")))?;
            Ok(link)
        };
        let limit = self.spec.connect_timeout;
        let link = tokio::time::timeout(limit, open)
            .await
            .unwrap_or_else(|_| Err(self.unreachable(format!("not ready within {limit:?}"))))?;
        Ok(Arc::clone(slot.insert(Arc::new(link))))
    }

    /// Hides what the server knows of the environment.
    fn mask(&self) -> Mask {
        match &self.spec.transport {
            McpTransport::Stdio(command) => Mask::of_env(&command.env),
            McpTransport::Http { env, .. } => Mask::of_env(env),
        }
    }

    /// Gives this connection up, unless another one took its place.
    async fn forget(&self, given_up: &Arc<Link>) {
        let mut slot = self.link.lock().await;
        if slot.as_ref().is_some_and(|link| Arc::ptr_eq(link, given_up)) {
            *slot = None;
        }
    }

    /// The server says that its tools changed.
    async fn changed(self: &Arc<Self>, peer: &Peer<RoleClient>) {
        let listed = tokio::time::timeout(self.spec.connect_timeout, self.list(peer)).await;
        let error = match listed {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        tracing::warn!(server = self.spec.name, error, "its tools changed, and cannot be listed");
    }

    fn unreachable(&self, why: String) -> TaskError {
        let why = self.mask().text(&why);
        let message = format!("MCP server {} cannot be used: {why}{}", self.spec.name, self.last_words());
        TaskError::retryable("not_connected", message)
    }

    fn last_words(&self) -> String {
        let words = self.words.lock().unwrap_or_else(std::sync::PoisonError::into_inner).text();
        if words.is_empty() { words } else { format!("; it said: {words}") }
    }

    /// Asks for the server's tools and puts them on the shelf.
    async fn list(self: &Arc<Self>, peer: &Peer<RoleClient>) -> Result<(), ServiceError> {
        let _turn = self.listing.lock().await;
        let mut tools: Vec<Arc<AgentTool>> = Vec::new();
        let mut names = HashSet::new();
        for listed in link::list(peer, &self.spec.name).await? {
            match self.tool(&listed) {
                Ok(tool) if names.insert(tool.name.clone()) => tools.push(Arc::new(tool)),
                Ok(tool) => tracing::warn!(
                    server = self.spec.name,
                    tool = tool.name,
                    "two tools have this name; the first is taken"
                ),
                Err(why) => {
                    tracing::warn!(server = self.spec.name, tool = %listed.name, %why, "this tool cannot be used")
                }
            }
        }
        if let Some(shelf) = self.shelf.upgrade() {
            *shelf.write().unwrap_or_else(std::sync::PoisonError::into_inner) = tools;
        }
        Ok(())
    }

    /// A tool as the server describes it, with the manifest's rules.
    fn tool(self: &Arc<Self>, listed: &rmcp::model::Tool) -> Result<AgentTool, super::BadTool> {
        let spec = &self.spec;
        let action = Tool::Mcp(Remote { connection: Arc::clone(self), tool: listed.name.to_string() });
        let description = listed.description.as_deref().or(listed.title.as_deref()).unwrap_or(&listed.name);
        let mask = self.mask();
        let (description, parameters) = (mask.text(description), mask.value(listed.schema_as_json_value()));
        let tool = AgentTool::new(tool_name(&spec.name, &listed.name), description, parameters, action)?;
        let tool = AgentTool {
            risk: spec.risk,
            effect: spec.effect,
            timeout: spec.timeout,
            attempts: spec.attempts,
            ..tool
        };
        Ok(match spec.tools.get(listed.name.as_ref()) {
            None => tool,
            Some(own) => AgentTool {
                risk: own.risk,
                effect: own.effect,
                timeout: own.timeout,
                attempts: own.attempts,
                undo: own.undo.clone(),
                verify: own.verify.clone(),
                lock: own.lock.clone(),
                fatal: own.fatal,
                ..tool
            },
        })
    }
}

/// `SERVER__TOOL`, in the characters and the length that models accept.
fn tool_name(server: &str, tool: &str) -> String {
    let fit = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    let name: String = format!("{server}{SEPARATOR}{tool}").chars().map(fit).collect();
    if name.len() <= MAX_NAME_BYTES {
        return name;
    }
    // Two long names with the same beginning stay two.
    let digest = Sha256::digest(tool);
    let mark = digest.iter().take(4).fold("_".to_owned(), |text, byte| format!("{text}{byte:02x}"));
    format!("{}{mark}", &name[..MAX_NAME_BYTES - mark.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_remote_tool_fits_what_models_accept() {
        assert_eq!(tool_name("files", "read_file"), "files__read_file");
        assert_eq!(tool_name("files", "fs/read.größe"), "files__fs_read_gr__e");
        let long = |last: &str| tool_name("server", &format!("{}{last}", "x".repeat(80)));
        assert_eq!(long("a").len(), MAX_NAME_BYTES);
        assert_ne!(long("a"), long("b"));
    }
}
