//! The model of the demo: an OpenAI-compatible endpoint in this process that answers by a script. It costs nothing,
//! needs no key and no network, and says what it is in what it answers.
//!
//! What it answers depends on the conversation it is shown alone, so an agent that another worker takes up gets what
//! the first would have got. It streams like a real one, and counts what it was asked.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use axum::routing::post;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::exit::Failure;

/// What the agent of the demo asks a person about.
pub(super) const REPAIR: &str = "Repair";

/// One call that was made, and would have been paid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelCall {
    /// What the agent's task is about; each has another.
    pub(super) goal: String,
    /// How many answers of the model the agent had when it asked.
    pub(super) turn: usize,
    pub(super) at: Instant,
}

#[derive(Clone)]
struct Shared {
    calls: Arc<Mutex<Vec<ModelCall>>>,
    /// Between two pieces of an answer.
    pause: Duration,
    work_ms: u64,
}

/// See the module. Ends when dropped.
pub(super) struct ScriptedModel {
    /// For `OPENAI_BASE_URL`.
    pub(super) url: String,
    calls: Arc<Mutex<Vec<ModelCall>>>,
    serving: JoinHandle<()>,
}

impl ScriptedModel {
    pub(super) async fn start(pause: Duration, work_ms: u64) -> Result<Self, Failure> {
        let failed =
            |error: std::io::Error| Failure::internal(format!("cannot start the scripted model: {error}"));
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
        let url = format!("http://{}/v1", listener.local_addr().map_err(failed)?);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let shared = Shared { calls: Arc::clone(&calls), pause, work_ms };
        let app = Router::new().route("/v1/chat/completions", post(answer)).with_state(shared);
        let serving = tokio::spawn(async move {
            // It serves until it is dropped.
            let _ = axum::serve(listener, app).await;
        });
        Ok(Self { url, calls, serving })
    }

    /// What it was asked so far, in order.
    pub(super) fn calls(&self) -> Vec<ModelCall> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ScriptedModel {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(State(shared): State<Shared>, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body).unwrap_or_default();
    let conversation = Conversation::of(&request);
    let call = ModelCall { goal: conversation.goal.to_owned(), turn: conversation.turn, at: Instant::now() };
    shared.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    let pieces = pieces(&script(&conversation, shared.work_ms), conversation.turn);
    let pause = shared.pause;
    let stream = stream::unfold(pieces, move |mut pieces| async move {
        let piece = pieces.pop_front()?;
        tokio::time::sleep(pause).await;
        Some((Ok::<_, Infallible>(piece), pieces))
    });
    let mut response = Response::new(Body::from_stream(stream));
    response.headers_mut().insert(CONTENT_TYPE, axum::http::HeaderValue::from_static("text/event-stream"));
    response
}

/// The part of a request that the script goes by.
struct Conversation<'a> {
    /// The first thing the user said.
    goal: &'a str,
    turn: usize,
    /// What came of the newest tool call.
    result: &'a str,
}

impl<'a> Conversation<'a> {
    fn of(request: &'a Value) -> Self {
        let messages = request["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
        let text = |message: &'a Value| message["content"].as_str().unwrap_or_default();
        let of_role = |role: &'static str| messages.iter().filter(move |message| message["role"] == role);
        Self {
            goal: of_role("user").next().map(text).unwrap_or_default(),
            turn: of_role("assistant").count(),
            result: of_role("tool").next_back().map(text).unwrap_or_default(),
        }
    }

    /// The app that the goal names.
    fn app(&self) -> &'a str {
        let named = self.goal.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        named.into_iter().find(|word| word.starts_with("app-")).unwrap_or("app-000")
    }
}

/// What is said: a text, and calls of tools.
struct Says {
    text: String,
    calls: Vec<(&'static str, Value)>,
}

/// Plans, looks, does what it is to do, and says what came of it.
fn script(so_far: &Conversation<'_>, work_ms: u64) -> Says {
    let app = so_far.app();
    let arguments = json!({"app": app, "work_ms": work_ms});
    let repairs = so_far.goal.starts_with(REPAIR);
    match (so_far.turn, repairs) {
        (0, _) => Says {
            text: format!("(scripted model) First I look at what is deployed of {app}."),
            calls: vec![
                (
                    "update_plan",
                    json!({"plan": [format!("Look at {app}"), "Say what was found"], "current_step": format!("Look at {app}")}),
                ),
                ("look", arguments),
            ],
        },
        (1, true) => Says {
            text: format!(
                "(scripted model) {app} answers slowly. A restart would help, and needs a person's word."
            ),
            calls: vec![("restart", arguments)],
        },
        (1, false) => Says {
            text: "(scripted model) I keep that in mind and look once more.".to_owned(),
            calls: vec![
                ("remember", json!({"key": app, "value": so_far.result, "source": "look"})),
                ("look", arguments),
            ],
        },
        _ => Says { text: format!("(scripted model) What came of it: {}", so_far.result), calls: Vec::new() },
    }
}

/// The answer as a stream of events: a word at a time, then the calls, then how it ended and what it cost.
fn pieces(says: &Says, turn: usize) -> VecDeque<Bytes> {
    let event = |delta: Value, finish: Option<&str>| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        let chunk = json!({"id": format!("demo-{turn}"), "object": "chat.completion.chunk", "model": "scripted-demo-model",
                           "choices": [choice]});
        Bytes::from(format!("data: {chunk}\n\n"))
    };
    let mut pieces = VecDeque::from([event(json!({"role": "assistant", "content": ""}), None)]);
    pieces.extend(says.text.split_inclusive(' ').map(|word| event(json!({"content": word}), None)));
    for (index, (name, arguments)) in says.calls.iter().enumerate() {
        let function = json!({"name": name, "arguments": arguments.to_string()});
        let call = json!({"index": index, "id": format!("call_{turn}_{index}"), "type": "function", "function": function});
        pieces.push_back(event(json!({"tool_calls": [call]}), None));
    }
    pieces.push_back(event(json!({}), Some(if says.calls.is_empty() { "stop" } else { "tool_calls" })));
    let tokens = says.text.split(' ').count();
    let usage = json!({"prompt_tokens": 200, "completion_tokens": tokens, "total_tokens": 200 + tokens});
    pieces.push_back(Bytes::from(format!(
        "data: {}\n\ndata: [DONE]\n\n",
        json!({"id": format!("demo-{turn}"), "object": "chat.completion.chunk", "choices": [], "usage": usage})
    )));
    pieces
}
