//! What the tests of agents share: a store, a worker, an endpoint that says what a model says, and
//! agents whose tools the test can watch.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use longhaul::{AgentState, Client, Event, NewTask, RetryPolicy, Risk, State, Task, TaskId, Worker, WorkerHandle};
use longhaul_agent::manifest::agent::People;
use longhaul_agent::model::{ModelSettings, Provider, Retries};
use longhaul_agent::{Agent, AgentTool, Artifacts, Host, Manifest, register};
use serde_json::{Value, json};

use crate::provider::{Asked, PATIENCE, Part, Reply, Server, chunk, delta, events, settings, stream, stream_head};

/// Tokens that every answer costs unless it says otherwise.
pub const USAGE: (u64, u64) = (11, 3);

/// The end of a stream, with what it cost.
pub fn ending(reason: &str, (input, output): (u64, u64)) -> String {
    let mut last = delta(json!({}));
    last["choices"][0]["finish_reason"] = reason.into();
    let usage = json!({
        "id": "c1", "model": "m-1-2026", "choices": [],
        "usage": {"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output},
    });
    format!("{}data: [DONE]\n\n", events(&[last, usage]))
}

/// The model says something and ends.
pub fn says(text: &str) -> Reply {
    says_for(text, "stop", USAGE)
}

/// The same with a reason and a price.
pub fn says_for(text: &str, reason: &str, usage: (u64, u64)) -> Reply {
    let start = delta(json!({"role": "assistant", "content": ""}));
    stream(&format!("{}{}", events(&[start, delta(json!({"content": text}))]), ending(reason, usage)))
}

/// The model calls tools with arguments as it wrote them. Ids are made of the place in the turn.
pub fn calls_raw(calls: &[(&str, &str)], usage: (u64, u64)) -> Reply {
    stream(&format!("{}{}", calls_text(calls), ending("tool_calls", usage)))
}

/// The events of tool calls, without an end.
pub fn calls_text(calls: &[(&str, &str)]) -> String {
    let pieces: Vec<Value> = calls
        .iter()
        .enumerate()
        .map(|(index, (name, arguments))| {
            let function = json!({"name": name, "arguments": arguments});
            let id = format!("call_{index}");
            delta(json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}))
        })
        .collect();
    events(&pieces)
}

/// The model calls tools.
pub fn calls(calls: &[(&str, Value)]) -> Reply {
    let written: Vec<(&str, String)> = calls.iter().map(|(name, value)| (*name, value.to_string())).collect();
    let written: Vec<(&str, &str)> = written.iter().map(|(name, text)| (*name, text.as_str())).collect();
    calls_raw(&written, USAGE)
}

/// Begins to say something, and does not go on.
pub fn begins(text: &str, then: Part) -> Reply {
    let bytes = [stream_head(), chunk(events(&[delta(json!({"content": text}))]).as_bytes())].concat();
    vec![Part::Bytes(bytes), then]
}

/// What a model was asked, as a test reads it.
pub trait Reads {
    fn messages(&self) -> Vec<Value>;

    /// The texts of all messages of a role.
    fn texts(&self, role: &str) -> Vec<String> {
        let of_role = |message: &Value| message["role"] == role;
        let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
        self.messages().iter().filter(|message| of_role(message)).map(text).collect()
    }

    /// What tools gave, oldest first.
    fn results(&self) -> Vec<String> {
        self.texts("tool")
    }

    /// What the newest call gave.
    fn result(&self) -> String {
        self.results().pop().unwrap_or_default()
    }

    /// How the task stands, the last message.
    fn standing(&self) -> String {
        let text = self.texts("user").pop().unwrap_or_default();
        assert!(text.starts_with("Where the task stands:"), "{text}");
        text
    }

    /// What people said, without how the task stands.
    fn said(&self) -> Vec<String> {
        let mut texts = self.texts("user");
        texts.pop();
        texts
    }
}

impl Reads for Asked {
    fn messages(&self) -> Vec<Value> {
        self.body["messages"].as_array().cloned().unwrap_or_default()
    }
}

/// Checks what every provider insists on: each tool result answers a call of the answer right before
/// it, and each call has its result.
pub fn assert_pairs(asked: &Asked) {
    let mut open: Vec<String> = Vec::new();
    for message in asked.messages() {
        match message["role"].as_str() {
            Some("tool") => {
                let id = message["tool_call_id"].as_str().expect("an id");
                let at = open.iter().position(|open| open == id);
                open.remove(at.unwrap_or_else(|| panic!("{id} answers no call: {:#}", asked.body["messages"])));
            }
            role => {
                assert!(open.is_empty(), "{open:?} have no result: {:#}", asked.body["messages"]);
                if let (Some("assistant"), Some(calls)) = (role, message["tool_calls"].as_array()) {
                    open = calls.iter().map(|call| call["id"].as_str().expect("an id").to_owned()).collect();
                }
            }
        }
    }
    assert!(open.is_empty(), "{open:?} have no result");
}

/// Settings of a model with short pauses and patience.
pub fn model(name: &str) -> ModelSettings {
    let settings = settings(Provider::OpenAi);
    let retries = Retries { pause: Duration::from_millis(2), ..settings.retries };
    ModelSettings { model: name.to_owned(), retries, ..settings }
}

/// An agent without tools that asks nobody.
pub fn agent(name: &str) -> Agent {
    let people = People { required_for_risk_levels: Vec::new(), ..People::default() };
    Agent { human_in_the_loop: people, ..Agent::new(name, model("m-1")) }
}

/// What happened, in order.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Mutex<Vec<String>>>);

impl Ledger {
    pub fn note(&self, what: impl Into<String>) {
        self.0.lock().expect("no panic").push(what.into());
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().expect("no panic").clone()
    }
}

/// Takes any object.
pub fn anything() -> Value {
    json!({"type": "object"})
}

/// A tool that notes its name and arguments and gives `{"ok": NAME}`.
pub fn noting(name: &'static str, risk: Risk, ledger: &Ledger) -> AgentTool {
    let ledger = ledger.clone();
    AgentTool::function(name, "Notes that it was called", anything(), move |arguments, _| {
        ledger.note(format!("{name} {arguments}"));
        async move { Ok(json!({"ok": name})) }
    })
    .expect("a tool")
    .risk(risk)
}

/// Agents at work.
pub struct Stage {
    pub client: Client,
    pub server: Server,
    pub artifacts: Artifacts,
    worker: Option<WorkerHandle>,
    pub agents: Vec<Agent>,
}

impl Stage {
    /// On a store in memory, with this script for the model.
    pub async fn new(
        agents: impl IntoIterator<Item = Agent>,
        script: impl FnMut(usize, &Asked) -> Reply + Send + 'static,
    ) -> Self {
        Self::on("memory:", "memory:", agents, script).await
    }

    /// On this store and this storage of artifacts.
    pub async fn on(
        store: &str,
        artifacts: &str,
        agents: impl IntoIterator<Item = Agent>,
        script: impl FnMut(usize, &Asked) -> Reply + Send + 'static,
    ) -> Self {
        let client = Client::open(store).await.expect("a store");
        let server = Server::scripted(script).await;
        let artifacts = Artifacts::open(artifacts).expect("a storage");
        let mut stage = Self { client, server, artifacts, worker: None, agents: agents.into_iter().collect() };
        stage.work().await;
        stage
    }

    /// Starts a worker, instead of the one before.
    pub async fn work(&mut self) {
        let host = Host::new(&self.client, self.artifacts.clone()).environment(self.server.environment());
        let manifests = self.agents.iter().map(|agent| Manifest::Agent(Box::new(agent.clone())));
        let retry = RetryPolicy {
            first: Duration::from_millis(5),
            cap: Duration::from_millis(5),
            ..RetryPolicy::default()
        };
        let worker = Worker::new(&self.client).retry(retry);
        self.worker = Some(register(worker, manifests, &host).start().await.expect("starts"));
    }

    /// Ends the worker as a crash would, and lets its lease pass.
    pub fn crash(&mut self) {
        self.worker.take().expect("a worker").abort();
        self.client.clock().advance(Duration::from_secs(60));
    }

    pub async fn submit(&self, handler: &str, goal: &str) -> TaskId {
        self.client.submit(NewTask::new(handler, &goal)).await.expect("accepted").id
    }

    /// Submits to the first agent.
    pub async fn begin(&self, goal: &str) -> TaskId {
        self.submit(&self.agents[0].name, goal).await
    }

    /// Waits until the task has ended.
    pub async fn end(&self, id: TaskId) -> Task {
        let task = self.client.wait(id, PATIENCE).await.expect("the store answers");
        assert!(task.state.is_final(), "not in time: {:?} {:?}", task.state, task.waiting_for);
        task
    }

    /// The whole way, to the first agent's answer.
    pub async fn answer(&self, goal: &str) -> (TaskId, String) {
        let id = self.begin(goal).await;
        let task = self.end(id).await;
        assert_eq!(task.state, State::Completed, "{:?}", task.error);
        let text: String = serde_json::from_str(task.result.expect("a result").get()).expect("a text");
        (id, text)
    }

    /// The whole way, to the first agent's error.
    pub async fn failure(&self, goal: &str) -> (TaskId, longhaul::TaskError) {
        let id = self.begin(goal).await;
        let task = self.end(id).await;
        assert_eq!(task.state, State::Failed, "{:?}", task.result);
        (id, task.error.expect("an error"))
    }

    pub async fn state(&self, id: TaskId) -> AgentState {
        self.client.state(id).await.expect("the store answers").expect("an agent has a state").1
    }

    /// All events of an ended task.
    pub async fn events(&self, id: TaskId) -> Vec<Event> {
        let mut all = Vec::new();
        let mut events = self.client.events(id, 0).await.expect("the task is there");
        let read = async {
            while let Some(event) = events.next().await.expect("the store answers") {
                all.push(event);
            }
        };
        tokio::time::timeout(PATIENCE, read).await.expect("the task ends");
        all
    }

    /// Waits for the event of this kind that has so many before it.
    pub async fn event(&self, id: TaskId, kind: &str, before: usize) -> Event {
        let mut events = self.client.events(id, 0).await.expect("the task is there");
        let find = async {
            let mut seen = 0;
            while let Some(event) = events.next().await.expect("the store answers") {
                if event.kind == kind {
                    if seen == before {
                        return event;
                    }
                    seen += 1;
                }
            }
            panic!("the task ended without {kind}");
        };
        tokio::time::timeout(PATIENCE, find).await.expect("the event comes")
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.server.asked()
    }
}
