//! The agent: a handler that thinks with a model, acts with tools, asks people, keeps to its budget, and can
//! be undone.
//!
//! One task goes through these rooms: `agent/order.rs` reads what is wanted; `agent/session.rs` is the loop;
//! `agent/think.rs` is one model call, `agent/act.rs` the tool calls of one turn, `agent/builtin.rs` the
//! tools that every agent has; `agent/memory.rs` is what the loop remembers and has spent, which is also what
//! a checkpoint keeps.
//!
//! Everything is built on the public [`Run`]: a model call is a step, a tool call is a step, so a crash pays
//! for neither twice. Whatever the loop decides comes from recorded results, so a replay decides the same.
//!
//! An agent of a program's own, with one of its functions as a tool:
//!
//! ```no_run
//! use longhaul::{Client, Risk, StepContext, Worker};
//! use longhaul_agent::model::{ModelSettings, Provider};
//! use longhaul_agent::{Agent, AgentTool, Artifacts, Host, Manifest, register};
//! use serde_json::{Value, json};
//!
//! # async fn start() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::open("sqlite:longhaul.db").await?;
//! let add = AgentTool::function(
//!     "add",
//!     "Adds two numbers",
//!     json!({"type": "object", "required": ["a", "b"],
//!            "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}),
//!     async |arguments: Value, _: StepContext| {
//!         Ok(json!(arguments["a"].as_f64().unwrap_or(0.0) + arguments["b"].as_f64().unwrap_or(0.0)))
//!     },
//! )?
//! .risk(Risk::ReadOnly);
//! let agent = Agent::new("calculator", ModelSettings::new(Provider::OpenAi, "gpt-4o-mini"));
//! let host = Host::new(&client, Artifacts::open("artifacts")?).tool(add);
//! let worker = register(Worker::new(&client), [Manifest::Agent(Box::new(agent))], &host).start().await?;
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;

use longhaul::{Client, Run, TaskError, UndoOn};
use serde_json::Value;
use tokio::sync::OnceCell;

use crate::artifact::Artifacts;
use crate::manifest::Agent;
use crate::model::{Environment, Model};
use crate::tool::{AgentTool, Toolbox};

mod act;
mod builtin;
mod memory;
mod order;
mod session;
mod think;

use order::Order;
use session::Session;

type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = Result<T, TaskError>> + Send>>;

/// What all agents of a process share. Cheap to clone.
#[derive(Clone)]
pub struct Host {
    client: Client,
    artifacts: Option<Artifacts>,
    environment: Environment,
    functions: Vec<AgentTool>,
}

impl Host {
    /// Agents whose tasks are in this client's store and whose large results go to `artifacts`; without a
    /// storage, a tool that gives too much fails.
    pub fn new(client: &Client, artifacts: impl Into<Option<Artifacts>>) -> Self {
        let artifacts = artifacts.into();
        Self { client: client.clone(), artifacts, environment: Environment::process(), functions: Vec::new() }
    }

    /// Where keys and addresses of models come from, instead of the environment of the process.
    pub fn environment(mut self, environment: Environment) -> Self {
        self.environment = environment;
        self
    }

    fn storage(&self) -> Result<&Artifacts, TaskError> {
        self.artifacts.as_ref().ok_or_else(|| {
            let message = "there is no storage of artifacts; [artifacts] url in longhaul.toml names one";
            TaskError::fatal("artifacts_unavailable", message)
        })
    }

    /// A tool that every agent of this host has, besides those of its manifest.
    pub fn tool(mut self, tool: AgentTool) -> Self {
        self.functions.push(tool);
        self
    }
}

/// An agent with what it needs to run; shared by all its tasks.
struct Prepared {
    agent: Agent,
    host: Host,
    tools: OnceCell<Toolbox>,
    model: OnceCell<Model>,
}

impl Prepared {
    /// Its tools; MCP servers are connected when the first task comes, and stay.
    async fn toolbox(&self) -> Result<&Toolbox, TaskError> {
        let functions = self.host.functions.clone();
        self.tools.get_or_try_init(|| Toolbox::open(&self.agent, functions)).await
    }

    async fn model(&self) -> Result<&Model, TaskError> {
        let open =
            || async { Model::new(&self.agent.model, self.host.environment.clone()).map_err(TaskError::from) };
        self.model.get_or_try_init(open).await
    }
}

/// The handler of an agent. Its input is what to do: a string, or `{"goal", "budget"}`; its result is the
/// final answer.
pub fn handler(agent: Agent, host: Host) -> impl Fn(Run, Value) -> BoxFuture<Value> + Send + Sync + 'static {
    let prepared = Arc::new(Prepared { agent, host, tools: OnceCell::new(), model: OnceCell::new() });
    move |run, input| {
        let prepared = Arc::clone(&prepared);
        Box::pin(async move { perform(run, &prepared, &input).await })
    }
}

async fn perform(run: Run, prepared: &Prepared, input: &Value) -> Result<Value, TaskError> {
    let agent = &prepared.agent;
    run.undo_on(UndoOn { failed: agent.undo.failed, cancelled: agent.undo.cancelled });
    let order = Order::read(input, &agent.budget, agent.price.is_some())?;
    let mut session = Session::open(&run, prepared, &order).await?;
    match session.work().await {
        Ok(answer) => {
            session.tell_progress("completed", None, "Done");
            Ok(Value::String(answer))
        }
        Err(error) => {
            let error = session.final_error(error);
            session.tell_progress("error", None, &error.message);
            run.publish("agent.error", &serde_json::json!({"error": error})).await?;
            Err(error)
        }
    }
}
