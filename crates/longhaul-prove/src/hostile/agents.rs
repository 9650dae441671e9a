//! Whole runs of agents whose model says hostile things: its answers are cut, broken and strange, its calls of tools have arguments of any
//! kind, and the tools themselves give patches of any kind. A task ends, or waits for people; nothing panics.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longhaul::{Client, NewTask, RetryPolicy, Risk, State, Worker};
use longhaul_agent::manifest::agent::People;
use longhaul_agent::model::{Environment, ModelSettings, Provider, Retries, Timeouts};
use longhaul_agent::{Agent, AgentTool, Artifacts, Host, Manifest, register};
use longhaul_hostile::Judged;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::model::next_request;
use super::trial::{Broke, Trial};

/// A run is over within this.
const PATIENCE: Duration = Duration::from_secs(15);
/// The store is made anew after so many tasks.
const BATCH: u64 = 250;
/// What the model says when it has said enough: it is done.
const DONE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"done\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// What the model still has to say.
type Script = Arc<Mutex<Vec<Vec<u8>>>>;

pub(super) async fn runs(trial: &mut Trial<'_>) -> Result<(), Broke> {
    loop {
        let stage = Stage::start().await?;
        for _ in 0..BATCH {
            let Some(said) = trial.draw()? else { return Ok(()) };
            // The last is said first.
            let mut script = vec![said];
            if trial.mutator.dice.once_in(2) {
                let before = trial.mutator.draw();
                script.push(before);
            }
            *stage.script.lock().unwrap_or_else(PoisonError::into_inner) = script;
            let judged = stage.run().await?;
            trial.judged(judged)?;
        }
        stage.stop().await;
    }
}

struct Stage {
    client: Client,
    script: Script,
    worker: longhaul::WorkerHandle,
    serving: tokio::task::JoinHandle<()>,
}

impl Stage {
    async fn start() -> Result<Self, Broke> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let script = Script::default();
        let shared = Arc::clone(&script);
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(speak(stream, Arc::clone(&shared)));
            }
        });
        let environment = Environment::new(move |name| (name == "OPENAI_BASE_URL").then(|| url.clone()));
        let client = Client::open("memory:").await?;
        let most = Duration::from_secs(3);
        let model = ModelSettings {
            timeouts: Timeouts { first_token: most, silence: most, whole_call: most, connect: most },
            retries: Retries {
                attempts: 2,
                pause: Duration::from_millis(1),
                max_pause: Duration::from_millis(1),
                ..Retries::default()
            },
            ..ModelSettings::new(Provider::OpenAi, "m-1")
        };
        let people = People { required_for_risk_levels: Vec::new(), ..People::default() };
        let anything = || json!({"type": "object"});
        let gives = |name: &'static str| {
            AgentTool::function(name, "Gives what it is given", anything(), async |arguments: Value, _| {
                Ok(arguments)
            })
            .map(|tool| tool.risk(Risk::ReadOnly))
        };
        let tools = vec![gives("look")?, gives("change")?.returns_patch(), gives("check")?];
        let agent = Agent { human_in_the_loop: people, tools, ..Agent::new("a", model) };
        let host = Host::new(&client, Artifacts::open("memory:")?).environment(environment);
        let quick = Duration::from_millis(1);
        let retry = RetryPolicy { first: quick, cap: quick, ..RetryPolicy::default() };
        let worker = register(Worker::new(&client).retry(retry), [Manifest::Agent(Box::new(agent))], &host);
        Ok(Self { client, script, worker: worker.start().await?, serving })
    }

    async fn run(&self) -> Result<Judged, Broke> {
        let id = self.client.submit(NewTask::new("a", &"Fix it.")).await?.id;
        let begun = Instant::now();
        let task = loop {
            let task = self.client.task(id).await?;
            // One that waits for people has been understood.
            let asks = task.waiting_for.as_ref().is_some_and(|waiting| waiting.kind != "timer");
            if task.state.is_final() || (task.state == State::Waiting && asks) {
                break task;
            }
            if begun.elapsed() > PATIENCE {
                return Err(Broke(format!("a run does not end: {:?} {:?}", task.state, task.waiting_for)));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        if let Some(error) = &task.error
            && error.code == "panic"
        {
            return Err(Broke(format!("the run broke: {error:?}")));
        }
        if !task.state.is_final() {
            self.client.cancel(id, None).await?;
        }
        // What it left can be shown.
        self.client.export(id).await?;
        Ok(if task.state == State::Completed { Judged::Accepted } else { Judged::Refused })
    }

    async fn stop(self) {
        self.worker.stop().await;
        self.serving.abort();
    }
}

/// The model: says what the script has left, and then that it is done.
async fn speak(mut stream: TcpStream, script: Script) {
    let mut read = Vec::new();
    while next_request(&mut stream, &mut read).await.is_some() {
        let said = script.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let body = said.unwrap_or_else(|| DONE.into());
        let length = body.len();
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n");
        if stream.write_all(&[head.as_bytes(), &body].concat()).await.is_err() {
            return;
        }
    }
}
