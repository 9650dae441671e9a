//! An OpenAI-compatible endpoint for tests: what it answers is written in the test, and it remembers what it was asked.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use serde_json::{Value, json};

/// What a model says, given the conversation so far.
pub type Script = fn(&Conversation<'_>) -> Says;

/// What is said.
pub enum Says {
    Text(String),
    /// Calls of tools, each with its arguments.
    Calls(Vec<(&'static str, Value)>),
}

/// The messages of a request.
pub struct Conversation<'a>(&'a [Value]);

impl Conversation<'_> {
    /// How many answers there were before.
    pub fn turn(&self) -> usize {
        self.0.iter().filter(|message| message["role"] == "assistant").count()
    }

    /// What the task is about: the first thing the user said.
    pub fn goal(&self) -> &str {
        let first = self.0.iter().find(|message| message["role"] == "user");
        first.and_then(|message| message["content"].as_str()).unwrap_or_default()
    }

    /// What came of the newest tool call.
    pub fn result(&self) -> &str {
        let last = self.0.iter().rfind(|message| message["role"] == "tool");
        last.and_then(|message| message["content"].as_str()).unwrap_or_default()
    }
}

#[derive(Clone)]
struct Shared {
    script: Script,
    requests: Arc<Mutex<Vec<Value>>>,
}

pub struct Endpoint {
    /// For `OPENAI_BASE_URL`.
    pub url: String,
    requests: Arc<Mutex<Vec<Value>>>,
}

impl Endpoint {
    pub async fn start(script: Script) -> Self {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let shared = Shared { script, requests: Arc::clone(&requests) };
        let app = Router::new().route("/v1/chat/completions", post(answer)).with_state(shared);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, app).await.expect("it serves") });
        Self { url, requests }
    }

    pub fn requests(&self) -> Vec<Value> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often each turn of the conversation about this goal was asked for.
    pub fn calls_by_turn(&self, goal: &str) -> BTreeMap<usize, usize> {
        let mut calls = BTreeMap::new();
        for request in self.requests() {
            let messages = request["messages"].as_array().cloned().unwrap_or_default();
            let conversation = Conversation(&messages);
            if conversation.goal() == goal {
                *calls.entry(conversation.turn()).or_default() += 1;
            }
        }
        calls
    }
}

async fn answer(State(shared): State<Shared>, body: String) -> String {
    let request: Value = serde_json::from_str(&body).expect("a request is JSON");
    let messages = request["messages"].as_array().cloned().unwrap_or_default();
    let conversation = Conversation(&messages);
    let turn = conversation.turn();
    let (message, finish) = match (shared.script)(&conversation) {
        Says::Text(text) => (json!({"role": "assistant", "content": text}), "stop"),
        Says::Calls(calls) => {
            let calls: Vec<Value> = calls
                .iter()
                .enumerate()
                .map(|(number, (name, arguments))| {
                    json!({"id": format!("call_{turn}_{number}"), "type": "function",
                           "function": {"name": name, "arguments": arguments.to_string()}})
                })
                .collect();
            (json!({"role": "assistant", "content": null, "tool_calls": calls}), "tool_calls")
        }
    };
    shared.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
    json!({"id": "c", "object": "chat.completion", "model": "scripted",
           "choices": [{"index": 0, "message": message, "finish_reason": finish}],
           "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}})
    .to_string()
}
