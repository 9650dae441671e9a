//! An MCP client that shows what goes over the wire, for both revisions.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use longhaul::{NewToken, Role};
use longhaul_server::ServerSettings;
use reqwest::{Method, Response};
use serde_json::{Value, json};

use crate::common::{PATIENCE, Server, Store};

pub const MODERN: &str = "2026-07-28";
pub const LEGACY: &str = "2025-11-25";

/// How long a stream may go on; that something comes in time is looked at for each message.
const LONGEST: Duration = Duration::from_secs(600);

static NUMBER: AtomicU64 = AtomicU64::new(1);

/// One client of one revision.
pub struct Wire<'a> {
    server: &'a Server,
    pub revision: &'static str,
    pub session: Option<String>,
    capabilities: Value,
    /// Sent instead of the server's, when set.
    pub token: Option<String>,
}

impl<'a> Wire<'a> {
    /// A client that needs no session.
    pub fn modern(server: &'a Server) -> Self {
        Self { server, revision: MODERN, session: None, capabilities: json!({}), token: None }
    }

    pub fn able(mut self, capabilities: Value) -> Self {
        self.capabilities = capabilities;
        self
    }

    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// A client that has begun a session.
    pub async fn legacy(server: &'a Server, token: Option<&str>) -> Self {
        let mut wire = Self {
            server,
            revision: LEGACY,
            session: None,
            capabilities: json!({}),
            token: token.map(str::to_owned),
        };
        let params = json!({
            "protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
        });
        let response = wire.post("initialize", params).await;
        assert_eq!(response.status(), 200);
        wire.session = Some(response.headers()["mcp-session-id"].to_str().expect("text").to_owned());
        let begun = Messages::of(response).answer().await;
        assert_eq!(begun["result"]["protocolVersion"], LEGACY);
        let told = wire.message(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        assert_eq!(told.status(), 202);
        wire
    }

    async fn message(&self, message: &Value) -> Response {
        let mut request = self
            .server
            .request(Method::POST, "/mcp")
            .timeout(LONGEST)
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", self.revision);
        if self.revision == MODERN {
            let name = ["name", "uri", "taskId"].iter().find_map(|name| message["params"][name].as_str());
            request = request.header("mcp-method", message["method"].as_str().expect("a method"));
            if let Some(name) = name {
                request = request.header("mcp-name", name);
            }
        }
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        request.json(message).send().await.expect("an answer")
    }

    /// Sends a request and gives the HTTP answer.
    pub async fn post(&self, method: &str, mut params: Value) -> Response {
        if self.revision == MODERN {
            let meta = &mut params["_meta"];
            meta["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
            meta["io.modelcontextprotocol/clientInfo"] = json!({"name": "test", "version": "1"});
            meta["io.modelcontextprotocol/clientCapabilities"] = self.capabilities.clone();
        }
        let id = NUMBER.fetch_add(1, Ordering::Relaxed);
        self.message(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})).await
    }

    /// Sends a request and gives the answer to it: `result` or `error`.
    pub async fn ask(&self, method: &str, params: Value) -> Value {
        Messages::of(self.post(method, params).await).answer().await
    }

    /// What a request that is not refused gives.
    pub async fn result(&self, method: &str, params: Value) -> Value {
        let answer = self.ask(method, params).await;
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// What a tool gives that is not refused; its text says the same.
    pub async fn tool(&self, name: &str, arguments: Value) -> Value {
        let result = self.result("tools/call", json!({"name": name, "arguments": arguments})).await;
        assert_ne!(result["isError"], true, "{name}: {result}");
        let text = result["content"][0]["text"].as_str().expect("text");
        assert_eq!(serde_json::from_str::<Value>(text).expect("JSON"), result["structuredContent"]);
        result["structuredContent"].clone()
    }

    /// The problem that a tool is refused with.
    pub async fn refused(&self, name: &str, arguments: Value) -> Value {
        let result = self.result("tools/call", json!({"name": name, "arguments": arguments})).await;
        assert_eq!(result["isError"], true, "{name}: {result}");
        serde_json::from_str(result["content"][0]["text"].as_str().expect("text")).expect("a problem")
    }

    /// The content of a resource that is JSON.
    pub async fn read(&self, uri: &str) -> Value {
        let result = self.result("resources/read", json!({"uri": uri})).await;
        assert_eq!(result["contents"][0]["uri"], uri);
        serde_json::from_str(result["contents"][0]["text"].as_str().expect("text")).expect("JSON")
    }

    /// What tells of changes of these resources, from when this returns on.
    pub async fn watch(&self, uris: &[&str]) -> Messages {
        if self.revision == MODERN {
            let mut messages = self.listen(uris).await;
            assert_eq!(messages.acknowledged().await, uris);
            return messages;
        }
        let stream = self.stream().await;
        for uri in uris {
            self.result("resources/subscribe", json!({"uri": uri})).await;
        }
        stream
    }

    /// Everything that is answered to who wants to listen.
    pub async fn listen(&self, uris: &[&str]) -> Messages {
        let filter = json!({"notifications": {"resourceSubscriptions": uris}});
        let response = self.post("subscriptions/listen", filter).await;
        assert_eq!(response.status(), 200);
        Messages::of(response)
    }

    /// The stream on which a session's notifications come.
    pub async fn stream(&self) -> Messages {
        let mut request = self
            .server
            .request(Method::GET, "/mcp")
            .timeout(LONGEST)
            .header("accept", "text/event-stream")
            .header("mcp-protocol-version", self.revision)
            .header("mcp-session-id", self.session.as_deref().expect("a session"));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status(), 200);
        Messages::of(response)
    }
}

/// The messages of an answer, one of JSON or a stream.
pub struct Messages {
    bytes: std::pin::Pin<Box<dyn futures_util::Stream<Item = reqwest::Result<axum::body::Bytes>> + Send>>,
    read: Vec<u8>,
    json: bool,
}

impl Messages {
    pub fn of(response: Response) -> Self {
        let kind = response.headers()["content-type"].to_str().expect("text");
        let json = kind.starts_with("application/json");
        assert!(json || kind.starts_with("text/event-stream"), "{kind}");
        Self { bytes: Box::pin(response.bytes_stream()), read: Vec::new(), json }
    }

    /// The next message; `None` at the end. Signs of life are not messages.
    pub async fn next(&mut self) -> Option<Value> {
        tokio::time::timeout(PATIENCE, self.message()).await.expect("a message comes in time")
    }

    async fn message(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.read.windows(2).position(|two| two == b"\n\n") {
                let frame: Vec<u8> = self.read.drain(..end + 2).collect();
                let text = String::from_utf8(frame).expect("UTF-8");
                let data = text.lines().find_map(|line| line.strip_prefix("data:")).map(str::trim);
                if let Some(data) = data.filter(|data| !data.is_empty()) {
                    return Some(serde_json::from_str(data).expect("JSON"));
                }
                continue;
            }
            match self.bytes.next().await {
                Some(Ok(bytes)) => self.read.extend_from_slice(&bytes),
                Some(Err(_)) | None if self.json && !self.read.is_empty() => {
                    return Some(serde_json::from_slice(&std::mem::take(&mut self.read)).expect("JSON"));
                }
                Some(Err(_)) | None => return None,
            }
        }
    }

    /// What the first message, an acknowledgement, says that will be told of.
    pub async fn acknowledged(&mut self) -> Vec<String> {
        let first = self.next().await.expect("an acknowledgement");
        assert_eq!(first["method"], "notifications/subscriptions/acknowledged", "{first}");
        let uris = first["params"]["notifications"]["resourceSubscriptions"].as_array();
        uris.into_iter().flatten().map(|uri| uri.as_str().expect("a URI").to_owned()).collect()
    }

    /// The answer to the request.
    pub async fn answer(mut self) -> Value {
        loop {
            let message = self.next().await.expect("an answer");
            if message["method"].is_null() {
                return message;
            }
        }
    }

    /// The next change told: its resource, and the version if the state was patched.
    pub async fn change(&mut self) -> (String, Option<u64>) {
        loop {
            let message = self.next().await.expect("the stream goes on");
            if message["method"] == "notifications/resources/updated" {
                let params = &message["params"];
                return (
                    params["uri"].as_str().expect("a URI").to_owned(),
                    params["_meta"]["dev.longhaul/version"].as_u64(),
                );
            }
        }
    }

    /// Waits until this version is told; gives all that were told until then.
    pub async fn until(&mut self, version: u64) -> Vec<u64> {
        let mut told = Vec::new();
        while told.last().is_none_or(|last| *last < version) {
            told.extend(self.change().await.1);
        }
        told
    }
}

pub async fn open(store: &Store) -> Server {
    Server::start(store.open().await, ServerSettings::default()).await
}

pub async fn token(server: &Server, tenant: &str, role: Role) -> String {
    let new = NewToken { name: format!("{tenant}-{role}"), tenant: tenant.to_owned(), role, expires_after: None };
    server.client.create_token(new).await.expect("a token").1
}

pub fn id(task: &Value) -> &str {
    task["id"].as_str().expect("an id")
}

/// A task with a state, waiting to be told to end; its id and the URI of its state.
pub async fn shared(wire: &Wire<'_>) -> (String, String) {
    let task = wire.tool("submit_task", json!({"handler": "state", "input": "be shared"})).await;
    let task = id(&task).to_owned();
    let asked = std::time::Instant::now();
    loop {
        let now = wire.tool("get_task", json!({"task_id": task})).await;
        if now["waiting_for"]["id"] == "end" {
            break;
        }
        assert!(asked.elapsed() < PATIENCE, "{now}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let uri = format!("state://agents/state/tasks/{task}");
    (task, uri)
}

pub fn fact(key: &str) -> Value {
    json!({"add_facts": [{"key": key, "value": 1, "source": "test"}]})
}
