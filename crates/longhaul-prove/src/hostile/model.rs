//! Hostile answers: of models, of HTTP endpoints that are tools, and of MCP servers, each over a real connection.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longhaul::{StepContext, TaskId};
use longhaul_agent::model::{
    Environment, Heard, Message, ModelSettings, Provider, Request, Retries, Timeouts, ToolSpec,
};
use longhaul_agent::{Agent, Artifacts, Call, Manifest, Model, Toolbox, load};
use longhaul_hostile::{Judged, Mutator};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::bed::shared_memory;
use super::trial::{Broke, Trial};

/// What must never be told to anyone.
const KEY: &str = "sk-hostile-5f2b9c71d0";
/// Ports that were used rest for a minute: after so many connections another address is used.
const PER_ADDRESS: u64 = 4_000;
/// The longest sentence about an answer that is none.
const MOST_TOLD: usize = 8 * 1024;

/// What the server answers next.
type Replies = Arc<Mutex<Reply>>;

/// What is answered: the bytes for each path, or for all.
#[derive(Clone, Debug, Default)]
struct Reply {
    bytes: Vec<u8>,
    /// Which is given instead when the request has this in it.
    instead: Vec<(&'static str, Vec<u8>)>,
}

/// A server that answers what it is told.
struct Endpoint {
    url: String,
    replies: Replies,
    task: JoinHandle<()>,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Endpoint {
    async fn start(number: u64) -> Result<Self, Broke> {
        let here = u8::try_from(2 + number % 250)?;
        let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, here), 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let replies = Replies::default();
        let shared = Arc::clone(&replies);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Ok(Self { url, replies, task })
    }

    fn says(&self, bytes: Vec<u8>, instead: Vec<(&'static str, Vec<u8>)>) {
        *self.replies.lock().unwrap_or_else(PoisonError::into_inner) = Reply { bytes, instead };
    }
}

/// Answers one request, whatever it is, and ends the connection.
async fn serve(mut stream: TcpStream, replies: Replies) {
    let Some(asked) = next_request(&mut stream, &mut Vec::new()).await else { return };
    let reply = replies.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let instead = reply.instead.into_iter().find(|(word, _)| asked.contains(word));
    let bytes = instead.map_or(reply.bytes, |(_, bytes)| bytes);
    // The other side may have had enough.
    let _ = stream.write_all(&with_id(bytes, &asked)).await;
    let _ = stream.shutdown().await;
}

/// What stands for the id of the request in an answer.
const ID: &[u8] = b"\"{id}\"";

/// The answer with the id of the request.
fn with_id(mut bytes: Vec<u8>, asked: &str) -> Vec<u8> {
    let id = asked.split("\"id\":").nth(1).and_then(|rest| rest.split([',', '}']).next()).unwrap_or("null");
    while let Some(at) = bytes.windows(ID.len()).position(|text| text == ID) {
        bytes.splice(at..at + ID.len(), id.bytes());
    }
    bytes
}

/// The next request on a connection, as text; `read` has what was read of it before, and of the one after it.
pub(super) async fn next_request(stream: &mut TcpStream, read: &mut Vec<u8>) -> Option<String> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&read[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            let whole = end + 4 + length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
            if read.len() >= whole {
                return Some(String::from_utf8_lossy(&read.drain(..whole).collect::<Vec<u8>>()).into_owned());
            }
        }
        match stream.read(&mut buffer).await {
            Ok(count @ 1..) => read.extend_from_slice(&buffer[..count]),
            _ => return None,
        }
    }
}

/// A body with a head before it: mostly a sound one.
fn answer(body: &[u8], kind: &str, mutator: &mut Mutator<'_>) -> Vec<u8> {
    let status = match mutator.dice.below(16) {
        0 => *mutator.dice.one_of(&[
            "400 Bad Request",
            "401 No",
            "404 No",
            "429 Slow",
            "500 No",
            "529 Busy",
            "302 Found",
            "204 None",
        ]),
        _ => "200 OK",
    };
    // The end of the connection is the end of the answer.
    let mut head =
        format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nretry-after: 0\r\nconnection: close\r\n\r\n")
            .into_bytes();
    if mutator.dice.once_in(25) {
        mutator.change(&mut head);
    }
    [&head, body].concat()
}

fn settings(provider: Provider, stream: bool) -> ModelSettings {
    let most = Duration::from_secs(5);
    ModelSettings {
        stream,
        timeouts: Timeouts { first_token: most, silence: most, whole_call: most, connect: most },
        retries: Retries { attempts: 1, ..Retries::default() },
        ..ModelSettings::new(provider, "m-1")
    }
}

fn environment(url: &str) -> Environment {
    let url = url.to_owned();
    Environment::new(move |name| match name {
        "OPENAI_BASE_URL" => Some(format!("{url}/v1")),
        "ANTHROPIC_BASE_URL" => Some(url.clone()),
        "OPENAI_API_KEY" | "ANTHROPIC_API_KEY" => Some(KEY.to_owned()),
        _ => None,
    })
}

/// Answers of models, streamed and whole, in the words of both protocols.
pub(super) async fn answers(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let mut request = Request {
        model: "m-1".to_owned(),
        system: "You are an agent.".to_owned(),
        messages: vec![Message::User { text: "Fix it.".to_owned() }],
        tools: vec![ToolSpec {
            name: "look".to_owned(),
            description: "Looks".to_owned(),
            parameters: json!({"type": "object"}),
        }],
        temperature: None,
        max_tokens: None,
    };
    let mut number = 0;
    loop {
        number += 1;
        let endpoint = Endpoint::start(number).await?;
        let mut models = Vec::new();
        for provider in Provider::ALL {
            for stream in [true, false] {
                models.push(
                    Model::new(&settings(provider, stream), environment(&endpoint.url))
                        .map_err(|error| error.message)?,
                );
            }
        }
        for _ in 0..PER_ADDRESS {
            let Some(body) = trial.draw()? else { return Ok(()) };
            // What is in the file says whose words they are, more often than not.
            let kind = if body.starts_with(b"{") { "application/json" } else { "text/event-stream" };
            endpoint.says(answer(&body, kind, &mut trial.mutator), Vec::new());
            let model = trial.mutator.dice.one_of(&models);
            let mut heard = 0;
            let called = model.call(&request, &mut |Heard { text, .. }| heard += text.len()).await;
            if heard > 2 * body.len() + 1_024 {
                return Err(Broke(format!("{heard} bytes were heard of an answer of {}", body.len())));
            }
            let judged = match called {
                Ok(answer) => {
                    if answer.tool_calls.iter().any(|call| call.id.is_empty() || call.arguments.is_empty()) {
                        return Err(Broke(format!("a call is taken that cannot be answered: {answer:?}")));
                    }
                    // What a model said is sent back to it with the next turn.
                    request.messages.truncate(1);
                    if trial.mutator.dice.once_in(3) {
                        request.messages.push(answer.message());
                    }
                    Judged::Accepted
                }
                Err(error) if error.message.len() > MOST_TOLD || error.message.contains(KEY) => {
                    return Err(Broke(format!(
                        "an error has {} bytes, or a key in it: {}",
                        error.message.len(),
                        error.message
                    )));
                }
                Err(_) => Judged::Refused,
            };
            trial.judged(judged)?;
        }
    }
}

fn call(arguments: Value) -> Call {
    let values = Arc::new(arguments);
    let task = TaskId::new();
    let context = StepContext {
        task,
        step: "one".to_owned(),
        idempotency_key: format!("{task}/one"),
        attempt: 1,
        fence: 1,
        traceparent: None,
    };
    Call { body: Arc::clone(&values), values, context, progress: None }
}

/// The agent that a manifest declares.
fn agent(text: &str) -> Result<Agent, Broke> {
    let folder = tempfile::tempdir_in(shared_memory())?;
    std::fs::write(folder.path().join("agent.toml"), text)?;
    let loaded = load(folder.path());
    match loaded.manifests.into_iter().next() {
        Some(Manifest::Agent(agent)) => Ok(*agent),
        _ => Err(Broke(format!("the suite's own manifest is wrong: {:?}", loaded.problems))),
    }
}

/// Answers of endpoints that are tools.
pub(super) async fn endpoints(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let artifacts = Artifacts::open("memory:")?;
    let mut number = 0;
    loop {
        number += 1;
        let endpoint = Endpoint::start(number).await?;
        let manifest = format!(
            "[agent]\nname = \"a\"\nmodel = \"m\"\n[[tool]]\nname = \"one\"\ndescription = \"Does it\"\n\
             http = {{ method = \"POST\", url = \"{}/x\" }}\n",
            endpoint.url
        );
        let tool = agent(&manifest)?.tools.remove(0);
        for _ in 0..PER_ADDRESS {
            let Some(body) = trial.draw()? else { return Ok(()) };
            endpoint.says(answer(&body, "application/json", &mut trial.mutator), Vec::new());
            let call = call(json!({"a": 1}));
            let run =
                tokio::time::timeout(Duration::from_secs(10), tool.action.run_long(&call, 4_096, &artifacts, "t"));
            let run = run.await.map_err(|_| "a call of a tool does not end")?;
            trial.judged(if run.is_ok() { Judged::Accepted } else { Judged::Refused })?;
        }
    }
}

/// Answers of MCP servers: to the first words, to the list of tools, to a call.
pub(super) async fn servers(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let mut number = 0;
    loop {
        number += 1;
        let endpoint = Endpoint::start(number).await?;
        let manifest = format!(
            "[agent]\nname = \"a\"\nmodel = \"m\"\n[[mcp]]\nname = \"s\"\nurl = \"{}/mcp\"\nconnect_timeout = \"300ms\"\n",
            endpoint.url
        );
        let agent = agent(&manifest)?;
        for _ in 0..PER_ADDRESS / 8 {
            let Some(said) = trial.draw()? else { return Ok(()) };
            let sound =
                |result: Value| json!({"jsonrpc": "2.0", "id": "{id}", "result": result}).to_string().into_bytes();
            let begin = sound(
                json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}),
            );
            let list = sound(json!({"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}));
            let mutator = &mut trial.mutator;
            let called = sound(json!({"content": [{"type": "text", "text": "ok"}]}));
            // One of the answers is the hostile one.
            let mut bodies = [begin, list, called];
            bodies[mutator.dice.below(3)] = said;
            let [begin, list, called] = &bodies;
            let mut answers = |body: &[u8]| answer(body, "application/json", mutator);
            let unknown =
                json!({"jsonrpc": "2.0", "id": "{id}", "error": {"code": -32601, "message": "no such method"}})
                    .to_string();
            let bare = |status: &str| {
                format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").into_bytes()
            };
            let instead = vec![
                ("GET /", bare("405 Method Not Allowed")),
                ("DELETE /", bare("405 Method Not Allowed")),
                (
                    "server/discover",
                    [
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n",
                        unknown.as_bytes(),
                    ]
                    .concat(),
                ),
                ("notifications/", bare("202 Accepted")),
                ("\"initialize\"", answers(begin)),
                ("\"tools/list\"", answers(list)),
            ];
            endpoint.says(answers(called), instead);
            let used = tokio::time::timeout(Duration::from_secs(12), async {
                let toolbox = Toolbox::open(&agent, Vec::new()).await.ok()?;
                let tool = toolbox.tools().into_iter().next()?;
                let _ = (tool.spec(), tool.digest(), tool.arguments("{}"));
                let run =
                    tokio::time::timeout(Duration::from_millis(300), tool.action.run(&call(json!({})))).await;
                run.ok()?.ok()
            });
            let used = used.await.map_err(|_| "a connection to an MCP server does not come to an end")?;
            trial.judged(if used.is_some() { Judged::Accepted } else { Judged::Refused })?;
        }
    }
}
