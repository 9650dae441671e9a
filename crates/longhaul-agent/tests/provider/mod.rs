//! A model provider that does what it is told: answers, stalls, trickles, cuts, resets. Real bytes on
//! a real socket, and everything that it was asked is remembered.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longhaul::TaskError;
use longhaul_agent::model::{
    Answer, Environment, Heard, Message, Model, ModelSettings, Provider, Request, Retries, Timeouts, ToolSpec,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub const KEY: &str = "sk-canary-5f2b9c71d0";

/// What the server does with a request, part by part. Without an end of the connection, it waits for
/// the next request on it.
#[derive(Clone, Debug)]
pub enum Part {
    Bytes(Vec<u8>),
    /// Waits for a permit, and uses it up.
    Wait(Arc<Semaphore>),
    /// Waits until the client goes away.
    Stall,
    /// Waits until the gate is open.
    Until(Gate),
    Close,
    Reset,
}

pub type Reply = Vec<Part>;

/// Something that a test waits for, or lets others wait for.
#[derive(Clone, Debug)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    pub fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    pub fn open(&self) {
        self.0.send_replace(true);
    }

    pub async fn passed(&self) {
        let mut gate = self.0.subscribe();
        let opened = gate.wait_for(|open| *open);
        tokio::time::timeout(PATIENCE, opened).await.expect("the gate opens in time").expect("the gate is there");
    }
}

/// A body with its length.
pub fn reply(status: &str, headers: &str, body: &str) -> Reply {
    let length = body.len();
    vec![Part::Bytes(format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}").into())]
}

pub fn json_reply(body: &Value) -> Reply {
    reply("200 OK", "content-type: application/json\r\n", &body.to_string())
}

/// The head of a stream.
pub fn stream_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec()
}

/// One piece of a stream.
pub fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// A stream that ends as it should.
pub fn stream(text: &str) -> Reply {
    vec![Part::Bytes([stream_head(), chunk(text.as_bytes()), b"0\r\n\r\n".to_vec()].concat())]
}

/// A stream that has this and then something else than its end.
pub fn stream_then(text: &str, end: Part) -> Reply {
    let mut bytes = stream_head();
    if !text.is_empty() {
        bytes.extend(chunk(text.as_bytes()));
    }
    vec![Part::Bytes(bytes), end]
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub head: String,
    pub body: Value,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    }
}

/// What to answer; gets the number of requests before this one too.
type Answering = dyn FnMut(usize, &Asked) -> Reply + Send;

struct Script {
    answer: Box<Answering>,
    asked: Vec<Asked>,
    connections: usize,
    /// Opened when a client goes away while it is stalled.
    gone: Gate,
}

/// A server that answers as its script says.
pub struct Server {
    pub url: String,
    script: Arc<Mutex<Script>>,
}

impl Server {
    /// Gives each request the next of the replies; after them, it gives the last again.
    pub async fn start(replies: impl IntoIterator<Item = Reply>) -> Self {
        let mut replies: VecDeque<Reply> = replies.into_iter().collect();
        Self::scripted(move |_, _| match replies.len() {
            0 => panic!("no replies"),
            1 => replies[0].clone(),
            _ => replies.pop_front().expect("more than one"),
        })
        .await
    }

    /// Answers each request as the function says, which also gets how many came before it.
    pub async fn scripted(answer: impl FnMut(usize, &Asked) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let answer = Box::new(answer);
        let script = Script { answer, asked: Vec::new(), connections: 0, gone: Gate::new() };
        let script = Arc::new(Mutex::new(script));
        let shared = Arc::clone(&script);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                shared.lock().expect("no panic").connections += 1;
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { url, script }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.script.lock().expect("no panic").asked.clone()
    }

    pub fn connections(&self) -> usize {
        self.script.lock().expect("no panic").connections
    }

    pub fn only(&self) -> Asked {
        let asked = self.asked();
        assert_eq!(asked.len(), 1, "asked once");
        asked[0].clone()
    }

    /// Waits until a client went away from a stalled answer.
    pub async fn client_gone(&self) {
        let gone = self.script.lock().expect("no panic").gone.clone();
        gone.passed().await;
    }

    /// An environment that names this server, with a key.
    pub fn environment(&self) -> Environment {
        let url = self.url.clone();
        Environment::new(move |name| match name {
            "OPENAI_BASE_URL" => Some(format!("{url}/v1")),
            "ANTHROPIC_BASE_URL" => Some(url.clone()),
            "OPENAI_API_KEY" | "ANTHROPIC_API_KEY" => Some(KEY.to_owned()),
            _ => None,
        })
    }

    pub fn model(&self, settings: &ModelSettings) -> Model {
        Model::new(settings, self.environment()).expect("a model")
    }

    /// Calls the model once, with what was heard.
    pub async fn call(&self, settings: &ModelSettings) -> (Result<Answer, TaskError>, Vec<(u32, String)>) {
        call(&self.model(settings), &request()).await
    }
}

pub async fn call(model: &Model, request: &Request) -> (Result<Answer, TaskError>, Vec<(u32, String)>) {
    let mut all = Vec::new();
    let mut heard = |Heard { attempt, text }: Heard<'_>| all.push((attempt, text.to_owned()));
    let answer = tokio::time::timeout(PATIENCE, model.call(request, &mut heard)).await.expect("in time");
    (answer, all)
}

async fn serve(mut stream: TcpStream, script: Arc<Mutex<Script>>) {
    let mut bytes = Vec::new();
    while let Some(asked) = read_request(&mut stream, &mut bytes).await {
        let parts = {
            let mut script = script.lock().expect("no panic");
            let number = script.asked.len();
            let parts = (script.answer)(number, &asked);
            script.asked.push(asked);
            parts
        };
        for part in parts {
            match part {
                Part::Bytes(bytes) => {
                    if stream.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Part::Wait(turns) => turns.acquire().await.expect("never closed").forget(),
                Part::Stall => {
                    let mut buffer = [0; 64];
                    while let Ok(1..) = stream.read(&mut buffer).await {}
                    script.lock().expect("no panic").gone.open();
                    return;
                }
                Part::Until(gate) => gate.passed().await,
                Part::Close => return,
                Part::Reset => {
                    stream.set_zero_linger().expect("a socket");
                    return;
                }
            }
        }
    }
}

async fn read_request(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<Asked> {
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            let mut asked = Asked { head, body: Value::Null };
            let length: usize =
                asked.header("content-length").map_or(0, |length| length.parse().expect("a number"));
            if bytes.len() >= end + 4 + length {
                asked.body = serde_json::from_slice(&bytes[end + 4..end + 4 + length]).expect("JSON");
                bytes.drain(..end + 4 + length);
                return Some(asked);
            }
        }
        let mut buffer = [0; 16 * 1024];
        match stream.read(&mut buffer).await {
            Ok(count @ 1..) => bytes.extend_from_slice(&buffer[..count]),
            _ => return None,
        }
    }
}

/// Settings whose pauses are short.
pub fn settings(provider: Provider) -> ModelSettings {
    ModelSettings {
        timeouts: Timeouts { first_token: PATIENCE, silence: PATIENCE, ..Timeouts::default() },
        retries: Retries { pause: Duration::from_millis(2), ..Retries::default() },
        ..ModelSettings::new(provider, "m-1")
    }
}

/// Settings with one try.
pub fn once(provider: Provider) -> ModelSettings {
    let settings = settings(provider);
    ModelSettings { retries: Retries { attempts: 1, ..settings.retries }, ..settings }
}

pub fn request() -> Request {
    Request {
        model: "m-1".to_owned(),
        system: "You are an agent.".to_owned(),
        messages: vec![Message::User { text: "Fix it.".to_owned() }],
        tools: vec![ToolSpec {
            name: "check_disk".to_owned(),
            description: "Check current disk usage".to_owned(),
            parameters: json!({"type": "object", "properties": {"path": {"type": "string"}}}),
        }],
        temperature: Some(0.5),
        max_tokens: None,
    }
}

/// Events as they are written into a stream.
pub fn events(events: &[Value]) -> String {
    let line = |event: &Value| match event["type"].as_str() {
        Some(name) => format!("event: {name}\ndata: {event}\n\n"),
        None => format!("data: {event}\n\n"),
    };
    events.iter().map(line).collect()
}

/// A streamed answer with these words, usage 11 and 3.
pub fn text_stream(provider: Provider, pieces: &[&str]) -> String {
    match provider {
        Provider::OpenAi => {
            let mut all = vec![delta(json!({"role": "assistant", "content": ""}))];
            all.extend(pieces.iter().map(|piece| delta(json!({"content": piece}))));
            format!("{}{}", events(&all), openai_end("stop"))
        }
        Provider::Anthropic => {
            let mut all = vec![
                anthropic_start(),
                json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
                json!({"type": "ping"}),
            ];
            all.extend(pieces.iter().map(|piece| {
                json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}})
            }));
            all.push(json!({"type": "content_block_stop", "index": 0}));
            format!("{}{}", events(&all), anthropic_end("end_turn"))
        }
    }
}

/// A streamed answer with two tool calls and nothing else.
pub fn calls_stream(provider: Provider) -> String {
    match provider {
        Provider::OpenAi => {
            let call = |index: u32, fields: Value| {
                let mut fields = fields;
                fields["index"] = index.into();
                delta(json!({"tool_calls": [fields]}))
            };
            let begin = |id: &str| json!({"id": id, "type": "function", "function": {"name": "check_disk", "arguments": ""}});
            let more = |text: &str| json!({"function": {"arguments": text}});
            let all = [
                delta(json!({"role": "assistant", "content": null})),
                call(0, begin("call_a")),
                call(0, more("{\"path\": ")),
                call(1, begin("call_b")),
                call(1, more("{\"path\":")),
                call(0, more("\"/ä\"}")),
                call(1, more("\"/var\"}")),
            ];
            format!("{}{}", events(&all), openai_end("tool_calls"))
        }
        Provider::Anthropic => {
            let mut all = vec![anthropic_start()];
            for (index, id, pieces) in
                [(0, "call_a", ["{\"path\": ", "\"/ä\"}"]), (1, "call_b", ["{\"path\":", "\"/var\"}"])]
            {
                let block = json!({"type": "tool_use", "id": id, "name": "check_disk", "input": {}});
                all.push(json!({"type": "content_block_start", "index": index, "content_block": block}));
                for piece in pieces {
                    let delta = json!({"type": "input_json_delta", "partial_json": piece});
                    all.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
                }
                all.push(json!({"type": "content_block_stop", "index": index}));
            }
            format!("{}{}", events(&all), anthropic_end("tool_use"))
        }
    }
}

/// An answer with these words in one piece, usage 11 and 3.
pub fn whole_answer(provider: Provider, text: &str) -> Value {
    match provider {
        Provider::OpenAi => json!({
            "id": "c1", "object": "chat.completion", "model": "m-1-2026",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, "refusal": null}}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
        }),
        Provider::Anthropic => json!({
            "id": "c1", "type": "message", "role": "assistant", "model": "m-1-2026",
            "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {"input_tokens": 6, "cache_read_input_tokens": 5, "output_tokens": 3},
        }),
    }
}

/// One piece of an OpenAI stream.
pub fn delta(delta: Value) -> Value {
    json!({
        "id": "c1", "object": "chat.completion.chunk", "model": "m-1-2026",
        "choices": [{"index": 0, "delta": delta, "finish_reason": null}], "usage": null,
    })
}

pub fn openai_end(reason: &str) -> String {
    let mut last = delta(json!({}));
    last["choices"][0]["finish_reason"] = reason.into();
    let usage = json!({
        "id": "c1", "model": "m-1-2026", "choices": [],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    });
    format!("{}data: [DONE]\n\n", events(&[last, usage]))
}

fn anthropic_start() -> Value {
    let usage = json!({"input_tokens": 6, "cache_creation_input_tokens": 1, "cache_read_input_tokens": 4, "output_tokens": 1});
    json!({
        "type": "message_start",
        "message": {"id": "c1", "type": "message", "role": "assistant", "model": "m-1-2026", "content": [], "stop_reason": null, "usage": usage},
    })
}

fn anthropic_end(reason: &str) -> String {
    events(&[
        json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": {"output_tokens": 3}}),
        json!({"type": "message_stop"}),
    ])
}
