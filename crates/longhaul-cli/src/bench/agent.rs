//! What an agent's turn costs beside its model: against an endpoint in this process that answers at once, and what many
//! agents cost that wait for their model.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longhaul::state::Budget;
use longhaul::{Client, Effect, NewTask, Risk, State, StepContext, Worker};
use longhaul_agent::model::{Environment, ModelSettings, Provider};
use longhaul_agent::{Agent, AgentTool, Artifacts, Host, Manifest, register};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::scenarios::{cpu_seconds, open_gates, percentiles};
use super::{Measured, Progress, WhileWaiting, rss_mb};
use crate::args::BenchArgs;
use crate::exit::Failure;

/// Turns of the agent that is measured alone.
const TURNS: usize = 100;
/// How long the model of those takes that wait for it.
const MODEL_TIME: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(600);
const AGENT: &str = "bench_agent";

pub(super) async fn turns(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let waiting = args.tasks.unwrap_or(500);
    open_gates(client, &[AGENT]).await?;
    let endpoint = Endpoint::start().await.map_err(|error| Failure::internal(error.to_string()))?;
    let worker = register(Worker::new(client).slots(waiting.max(1)), [agent()], &host(client, &endpoint)?);
    let worker = worker.start().await?;

    progress.phase("one agent", TURNS);
    let goal = Goal { turns: TURNS, delay_ms: 0 };
    let started = Instant::now();
    let mut errors = run(client, &[goal]).await?;
    let alone = started.elapsed().as_secs_f64();
    let turns = percentiles(endpoint.intervals());

    progress.phase("agents that wait", waiting);
    let goal = Goal { turns: 1, delay_ms: MODEL_TIME.as_millis() as u64 };
    let all = vec![goal; waiting];
    let busy = cpu_seconds();
    let began = Instant::now();
    // In the middle of the first model call all of them wait.
    let looking = tokio::spawn(async move {
        tokio::time::sleep(MODEL_TIME.mul_f64(0.9)).await;
        rss_mb()
    });
    errors += run(client, &all).await?;
    let cpu_percent = (cpu_seconds() - busy) / began.elapsed().as_secs_f64() * 100.0;
    let rss_mb = looking.await.map_err(|error| Failure::internal(error.to_string()))?.max(rss_mb());
    worker.stop().await;
    Ok(Measured {
        tasks: 1 + waiting,
        seconds: alone,
        per_second: TURNS as f64 / alone,
        errors,
        waiting: Some(WhileWaiting { rss_mb, cpu_percent }),
        ..turns
    })
}

/// Submits these and waits for all; gives how many did not complete.
async fn run(client: &Client, goals: &[Goal]) -> Result<usize, Failure> {
    let tasks = goals.iter().map(|goal| NewTask::new(AGENT, &goal.text())).collect();
    let mut ids = Vec::new();
    for answer in client.submit_many(tasks).await? {
        ids.push(answer?.id);
    }
    let mut errors = 0;
    for id in ids {
        errors += usize::from(client.wait(id, PATIENCE).await?.state != State::Completed);
    }
    Ok(errors)
}

fn agent() -> Manifest {
    let mut agent = Agent::new(AGENT, ModelSettings::new(Provider::OpenAi, "bench"));
    let (max_steps, max_llm_tokens) = (u32::MAX, u64::MAX / 2);
    agent.budget = Budget { max_steps, max_llm_tokens, max_wall_time_ms: u64::MAX / 2, ..Budget::default() };
    Manifest::Agent(Box::new(agent))
}

fn host(client: &Client, endpoint: &Endpoint) -> Result<Host, Failure> {
    let internal = |error: &dyn std::fmt::Display| Failure::internal(error.to_string());
    let note = AgentTool::function(
        "note",
        "Takes a note",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |arguments: Value, _: StepContext| async move { Ok(json!({"noted": arguments["n"]})) },
    )
    .map_err(|error| internal(&error))?;
    // Recorded before and after, like everything that must not happen twice.
    let note = note.risk(Risk::ReadOnly).effect(Effect::Irreversible);
    let artifacts = Artifacts::open("memory:").map_err(|error| internal(&error))?;
    let url = endpoint.url.clone();
    let environment = Environment::new(move |name| (name == "OPENAI_BASE_URL").then(|| url.clone()));
    Ok(Host::new(client, artifacts).environment(environment).tool(note))
}

/// What a task asks of the endpoint, by way of its agent.
#[derive(Clone, Copy)]
struct Goal {
    turns: usize,
    delay_ms: u64,
}

impl Goal {
    fn text(self) -> String {
        format!("{} {}", self.turns, self.delay_ms)
    }

    fn read(text: &str) -> Option<Self> {
        let (turns, delay_ms) = text.split_once(' ')?;
        Some(Self { turns: turns.parse().ok()?, delay_ms: delay_ms.parse().ok()? })
    }
}

/// A model that does what the task says, and notes when it was asked.
struct Endpoint {
    url: String,
    asked: Arc<Mutex<Vec<Instant>>>,
}

impl Endpoint {
    async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                // An agent that is gone ends its connection, and this with it.
                tokio::spawn(converse(connection, Arc::clone(&noted)));
            }
        });
        Ok(Self { url, asked })
    }

    /// From one call to the next: what a turn took.
    fn intervals(&self) -> Vec<Duration> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let intervals = asked.windows(2).map(|pair| pair[1] - pair[0]).collect();
        asked.clear();
        intervals
    }
}

async fn converse(mut connection: TcpStream, asked: Arc<Mutex<Vec<Instant>>>) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let mut received = Vec::new();
    loop {
        let Some(body) = request(&mut connection, &mut received).await? else { return Ok(()) };
        asked.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        let (delay, answer) = answer(&body);
        tokio::time::sleep(delay).await;
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        connection.write_all(format!("{head}{answer}").as_bytes()).await?;
    }
}

/// The body of the next request; none when the other side is gone.
async fn request(connection: &mut TcpStream, received: &mut Vec<u8>) -> std::io::Result<Option<Vec<u8>>> {
    loop {
        if let Some(head) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&received[..head]).to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
            let end = head + 4 + length.unwrap_or(0);
            if received.len() >= end {
                let body = received[head + 4..end].to_vec();
                received.drain(..end);
                return Ok(Some(body));
            }
        }
        if connection.read_buf(received).await? == 0 {
            return Ok(None);
        }
    }
}

fn answer(body: &[u8]) -> (Duration, String) {
    let request: Value = serde_json::from_slice(body).unwrap_or_default();
    let messages = request["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let turn = messages.iter().filter(|message| message["role"] == "assistant").count();
    let goal =
        messages.iter().find(|message| message["role"] == "user").and_then(|message| message["content"].as_str());
    let goal = goal.and_then(Goal::read).unwrap_or(Goal { turns: 0, delay_ms: 0 });
    let (message, finish) = if turn < goal.turns {
        let call = json!({"id": format!("call_{turn}"), "type": "function",
                          "function": {"name": "note", "arguments": json!({"n": turn}).to_string()}});
        (json!({"role": "assistant", "content": null, "tool_calls": [call]}), "tool_calls")
    } else {
        (json!({"role": "assistant", "content": "done"}), "stop")
    };
    let answer = json!({"id": "x", "object": "chat.completion", "model": "bench",
                        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                        "usage": {"prompt_tokens": 10, "completion_tokens": 10}});
    (Duration::from_millis(goal.delay_ms), answer.to_string())
}
