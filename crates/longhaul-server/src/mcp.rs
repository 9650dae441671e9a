//! The state of agents as a shared resource, by the Model Context Protocol: other agents, IDEs and chat clients submit and
//! watch tasks, read and change their state, and answer what they ask.
//!
//! [`Mcp`] is the server of the protocol, whatever carries it: HTTP on `/mcp` (`http.rs`), or lines on stdin and stdout
//! ([`serve_lines`]). It speaks the revisions 2025-11-25 and 2026-07-28, and older ones where rmcp does. Everything it does is
//! done for a caller, with the same token, tenant and role as a request of the HTTP API. The rooms: `tools.rs` (what can be
//! done), `resources.rs` (what can be read), `listen.rs` and `watch.rs` (who is told of changes), `wait.rs` (long waits as MCP tasks).

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll, unfold};
use rmcp::ServiceExt;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams, CompleteRequestMethod,
    CompleteRequestParams, CompleteResult, ContentBlock, CreateTaskResult, CustomRequest, CustomResult, ErrorCode,
    ErrorData, Extensions, GetMeta, GetTaskParams, GetTaskResult, Implementation, InitializeRequestParams,
    ListPromptsRequestMethod, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult,
    ListToolsResult, PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult,
    ResourceUpdatedNotification, ResourceUpdatedNotificationParam, ServerCapabilities, ServerConfig,
    ServerNotification, SubscribeRequestParams, SubscriptionFilter, SubscriptionsListenRequestParams, Tool,
    UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{RequestContext, RoleServer, SubscriptionContext};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::task::AbortOnDropHandle;

use crate::auth::Caller;
use crate::problem::Problem;
use crate::request;
use crate::state::App;

mod describe;
pub(crate) mod http;
mod listen;
mod resources;
mod tools;
mod wait;
mod watch;

use resources::Named;
use watch::Change;
pub(crate) use watch::Watchers;

/// How many resources one client may watch on one connection or session.
const MAX_SUBSCRIPTIONS: usize = 100;
/// In the `_meta` of a notification: the version that the state has now.
const VERSION: &str = "dev.longhaul/version";

const INSTRUCTIONS: &str = "Longhaul runs tasks that outlive the process that runs them: agents and workflows. submit_task starts one and \
returns at once; wait_task waits for it; get_task says how it stands and what it waits for. An agent's task has a state \
(goal, plan, facts, open questions), the resource state://agents/{agent_id}/tasks/{task_id}, which several agents can share: read it with its \
version, change it by patch_state with that version. A task that waits for an approval or an answer goes on when someone gives it.";

/// Longhaul as an MCP server: one for each session or request.
pub struct Mcp {
    app: App,
    /// Who asks, where the transport does not say.
    caller: Option<Caller>,
    /// What this session watches, for clients of revisions before 2026-07-28.
    subscriptions: Mutex<HashMap<String, AbortOnDropHandle<()>>>,
}

impl Mcp {
    fn new(app: App, caller: Option<Caller>) -> Self {
        Self { app, caller, subscriptions: Mutex::default() }
    }

    /// Whoever sent the request, as the HTTP layer found out.
    fn caller(&self, extensions: &Extensions) -> Result<Caller, ErrorData> {
        let found = self.caller.clone().or_else(|| part(extensions));
        found.ok_or_else(|| ErrorData::internal_error("nobody asked who asks", None))
    }

    async fn call(
        &self,
        tool: &Tool,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, Problem> {
        let caller = self.caller(&context.extensions).map_err(|error| Problem::new("internal", error.message))?;
        let given = request.arguments.unwrap_or_default();
        tools::known_words(tool, &given)?;
        if tool.name == "wait_task" {
            let polls = context.client_capabilities().is_some_and(|client| client.supports_tasks());
            if polls && let Some(task) = wait::begin(&caller, &given).await? {
                return Ok(CreateTaskResult::new(task).into());
            }
            let listener = wait::Listener { token: context.meta.get_progress_token(), peer: context.peer.clone() };
            let waited = wait::wait(&self.app, &caller, &given, listener, &context.ct).await?;
            return Ok(CallToolResult::structured(waited).into());
        }
        let traceparent = part::<request::RequestContext>(&context.extensions).map(|context| context.traceparent);
        match tools::call(&self.app, &caller, &tool.name, &given, traceparent).await {
            Some(answer) => Ok(CallToolResult::structured(answer?).into()),
            None => Err(Problem::not_found("tool", &tool.name)),
        }
    }

    /// The changes of a state, beginning with how it stands if `at_once`.
    async fn changes(
        &self,
        caller: &Caller,
        uri: &str,
        at_once: bool,
    ) -> Result<BoxStream<'static, ServerNotification>, Problem> {
        let task = resources::watchable(&caller.client, uri).await?;
        let mut watch = self.app.watchers().watch(&caller.client, task).await?;
        // Read after the watch began: what changes from here on is told. A task may have no state yet.
        let state = if at_once { caller.client.state(task).await? } else { None };
        let first = state.map(|(version, _)| {
            watch.knows(version);
            updated(uri, Change::Patched(version))
        });
        let uri = uri.to_owned();
        let rest = unfold(Some(watch), move |watch| {
            let uri = uri.clone();
            async move {
                let mut watch = watch?;
                let change = watch.next().await?;
                Some((updated(&uri, change), (change != Change::Removed).then_some(watch)))
            }
        });
        Ok(futures_util::stream::iter(first).chain(rest).boxed())
    }
}

/// Something that the HTTP layer left with the request.
fn part<T: Clone + Send + Sync + 'static>(extensions: &Extensions) -> Option<T> {
    extensions.get::<axum::http::request::Parts>()?.extensions.get::<T>().cloned()
}

fn updated(uri: &str, change: Change) -> ServerNotification {
    let updated = ResourceUpdatedNotification::new(ResourceUpdatedNotificationParam::new(uri));
    let mut notification = ServerNotification::ResourceUpdatedNotification(updated);
    if let Change::Patched(version) = change {
        notification.get_meta_mut().insert(VERSION.to_owned(), version.into());
    }
    notification
}

/// A refusal as an error of the protocol, for what is not a tool.
fn error(problem: &Problem) -> ErrorData {
    let body = problem.to_json();
    let detail = body["detail"].as_str().unwrap_or_default().to_owned();
    let code = match problem.status().as_u16() {
        404 => ErrorCode::RESOURCE_NOT_FOUND,
        400..500 => ErrorCode::INVALID_PARAMS,
        _ => ErrorCode::INTERNAL_ERROR,
    };
    ErrorData::new(code, detail, Some(body))
}

/// Why the params of a method that there is cannot be read; `None` when there is no such method.
fn misread(method: &str, params: Value) -> Option<String> {
    fn why<T: DeserializeOwned>(params: Value) -> Option<String> {
        serde_json::from_value::<T>(params).err().map(|error| error.to_string())
    }
    let why = match method {
        "initialize" => why::<InitializeRequestParams>(params),
        "tools/call" => why::<CallToolRequestParams>(params),
        "tools/list" | "resources/list" | "resources/templates/list" => why::<PaginatedRequestParams>(params),
        "resources/read" => why::<ReadResourceRequestParams>(params),
        "resources/subscribe" | "resources/unsubscribe" => why::<SubscribeRequestParams>(params),
        "subscriptions/listen" => why::<SubscriptionsListenRequestParams>(params),
        "tasks/get" | "tasks/cancel" => why::<GetTaskParams>(params),
        "tasks/update" => why::<UpdateTaskParams>(params),
        _ => return None,
    };
    Some(why.unwrap_or_else(|| "they are not what the method takes".to_owned()))
}

fn too_many() -> ErrorData {
    ErrorData::invalid_params(format!("at most {MAX_SUBSCRIPTIONS} resources can be watched at once"), None)
}

#[allow(deprecated, reason = "subscribe and unsubscribe are how clients of revision 2025-11-25 watch")]
impl ServerHandler for Mcp {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_tasks()
            .build();
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("longhaul", env!("CARGO_PKG_VERSION")).with_title("Longhaul"))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools::TOOLS.clone()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools::TOOLS.iter().find(|tool| tool.name == name).cloned()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = tools::TOOLS.iter().find(|tool| tool.name == request.name) else {
            let name: String = request.name.chars().take(64).flat_map(char::escape_debug).collect();
            return Err(ErrorData::invalid_params(
                format!("there is no tool '{name}'; tools/list lists them"),
                None,
            ));
        };
        match self.call(tool, request, context).await {
            Ok(answer) => Ok(answer),
            Err(problem) => {
                Ok(CallToolResult::error(vec![ContentBlock::text(problem.to_json().to_string())]).into())
            }
        }
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let caller = self.caller(&context.extensions)?;
        let from = request.and_then(|request| request.cursor);
        resources::list(&caller.client, from.as_deref()).await.map_err(|problem| error(&problem))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(resources::templates()))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let caller = self.caller(&context.extensions)?;
        let read = resources::read(&self.app, &caller, &request.uri).await;
        let read = read.map_err(|problem| error(&problem.with("uri", request.uri)))?;
        Ok(ReadResourceResult::new(vec![read]).into())
    }

    // There are none of these; a client that asks all the same is told so.
    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn complete(
        &self,
        _: CompleteRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }

    /// What no other method of this takes: there is no such method, or its params cannot be read.
    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let params = request.params.unwrap_or_default();
        Err(match misread(&request.method, params) {
            Some(why) => {
                ErrorData::invalid_params(format!("the params of {} cannot be read: {why}", request.method), None)
            }
            None => {
                let name: String = request.method.chars().take(64).flat_map(char::escape_debug).collect();
                ErrorData::new(ErrorCode::METHOD_NOT_FOUND, format!("there is no method '{name}' here"), None)
            }
        })
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        let uris = requested.resource_subscriptions.iter().flatten();
        let watchable = uris.filter(|uri| matches!(Named::parse(uri), Ok(Named::State { .. })));
        let mut accepted = SubscriptionFilter::builder();
        for uri in watchable.take(MAX_SUBSCRIPTIONS) {
            accepted = accepted.resource_subscription(uri);
        }
        Some(accepted.build())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let caller = self.caller(&context.request_context().extensions)?;
        let mut changes = SelectAll::new();
        for uri in context.accepted().resource_subscriptions.iter().flatten() {
            // The client was told before this that it listens, and may have read since: it is told how things stand.
            match self.changes(&caller, uri, true).await {
                Ok(of_one) => changes.push(of_one),
                // What is accepted was there (`listen.rs`): it was removed since.
                Err(problem) if problem.code() == "not_found" => {
                    let removed = updated(uri, Change::Removed);
                    changes.push(futures_util::stream::iter([removed]).boxed());
                }
                Err(problem) => return Err(error(&problem)),
            }
        }
        loop {
            let notification = tokio::select! {
                Some(notification) = changes.next() => notification,
                () = context.cancelled() => return Ok(()),
                () = self.app.stopping().cancelled() => return Ok(()),
            };
            if context.sink().send(notification).await.is_err() {
                return Ok(());
            }
        }
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let caller = self.caller(&context.extensions)?;
        let changes = self.changes(&caller, &request.uri, false).await;
        let mut changes = changes.map_err(|problem| error(&problem.with("uri", request.uri.as_str())))?;
        let peer = context.peer;
        let forwarder = tokio::spawn(async move {
            while let Some(notification) = changes.next().await {
                if peer.send_notification(notification).await.is_err() {
                    break;
                }
            }
        });
        let forwarder = AbortOnDropHandle::new(forwarder);
        let mut subscriptions = self.subscriptions.lock().unwrap_or_else(PoisonError::into_inner);
        if subscriptions.len() >= MAX_SUBSCRIPTIONS && !subscriptions.contains_key(&request.uri) {
            return Err(too_many());
        }
        subscriptions.insert(request.uri, forwarder);
        Ok(())
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.subscriptions.lock().unwrap_or_else(PoisonError::into_inner).remove(&request.uri);
        Ok(())
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let caller = self.caller(&context.extensions)?;
        let may_ask = context.client_capabilities().is_some_and(|client| client.elicitation.is_some());
        let task = wait::look(&caller, &request.task_id, may_ask).await.map_err(|problem| error(&problem))?;
        Ok(GetTaskResult::new(task))
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let caller = self.caller(&context.extensions)?;
        wait::update(&caller, &request.task_id, request.input_responses).await.map_err(|problem| error(&problem))
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let caller = self.caller(&context.extensions)?;
        wait::forget(&caller, &request.task_id).await.map_err(|problem| error(&problem))
    }
}

/// Serves one client over lines of JSON, until `input` ends or the app is stopped: what an MCP client that starts a program
/// expects on its stdin and stdout. There are no tokens: who can start this can open the store.
pub async fn serve_lines<R, W>(
    app: App,
    input: R,
    output: W,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
where
    R: tokio::io::AsyncRead + Send + Unpin + 'static,
    W: tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let caller = Caller::local(app.client().map_err(|problem| problem.to_json().to_string())?);
    // One of its own: it is cancelled with this client, and the app goes on.
    let stopping = app.stopping().child_token();
    let lines = listen::Lines { mcp: Mcp::new(app, Some(caller.clone())), caller };
    let served = match lines.serve_with_ct((input, output), stopping).await {
        Ok(served) => served,
        // A client that leaves before it has said anything.
        Err(
            rmcp::service::ServerInitializeError::ConnectionClosed(_)
            | rmcp::service::ServerInitializeError::Cancelled,
        ) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    served.waiting().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use longhaul::Client;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;
    use crate::ServerSettings;

    #[tokio::test]
    async fn a_client_over_lines_that_leaves_does_not_stop_the_app() {
        let client = Client::open("memory:").await.expect("a store");
        let app = App::new(client, false, ServerSettings::default());
        let (near, far) = tokio::io::duplex(64 * 1024);
        let (input, output) = tokio::io::split(far);
        let served = tokio::spawn(serve_lines(app.clone(), input, output));
        let (read, mut write) = tokio::io::split(near);
        let begin = serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params":
            {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
        write.write_all(format!("{begin}\n").as_bytes()).await.expect("written");
        let mut answer = String::new();
        let mut read = BufReader::new(read);
        read.read_line(&mut answer).await.expect("an answer");
        assert!(answer.contains("longhaul"), "{answer}");
        drop((read, write));
        let _ = served.await.expect("it ends well");
        assert!(!app.stopping().is_cancelled());
    }
}
