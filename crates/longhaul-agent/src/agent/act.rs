//! The tool calls of one turn: checked, approved, locked, run, recorded, and told to the model.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use longhaul::state::{ArtifactRef, StatePatch};
use longhaul::{Effect, Risk, StepContext, TaskError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::builtin::{self, BuiltIn};
use super::session::{Session, Site, listening};
use crate::artifact::{Stored, cut_to};
use crate::model::{Message, ToolCall};
use crate::saga::verdict;
use crate::tool::{AgentTool, Call, Output, Tell};

/// The most of a result that is told to the model as it is; more becomes an artifact.
const INLINE_BYTES: u64 = 4_096;
/// The most that a model may write as the arguments of a tool.
const MAX_ARGUMENT_BYTES: usize = 256 * 1024;
/// Errors of the program around the tool, which no model can do anything about.
const NOT_FOR_THE_MODEL: [&str; 3] = ["ambiguous_step", "step_kind_changed", "duplicate_tool"];
/// Where an error says how long the tries took.
const TOOK_MS: &str = "took_ms";
/// How much of a call or a result is shown in progress.
const SHOWN_BYTES: usize = 120;

/// A call that a model asked for, as it will be done.
enum Planned {
    /// Told to the model instead.
    Refused(String),
    Tool {
        tool: Arc<AgentTool>,
        arguments: Value,
    },
    BuiltIn {
        which: BuiltIn,
        arguments: Value,
    },
}

/// What came of a call.
pub(super) struct Done {
    pub(super) content: String,
    pub(super) failed: bool,
}

impl Done {
    pub(super) fn well(content: impl Into<String>) -> Self {
        Self { content: content.into(), failed: false }
    }

    pub(super) fn badly(content: impl Into<String>) -> Self {
        Self { content: content.into(), failed: true }
    }
}

/// What a tool gave, as it is recorded. What a person says was the result of a call in doubt is taken as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Value")]
struct Gave {
    tool_result: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact: Option<Stored>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<StatePatch>,
    took_ms: u64,
}

impl From<Value> for Gave {
    fn from(recorded: Value) -> Self {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Whole {
            tool_result: Value,
            artifact: Option<Stored>,
            patch: Option<StatePatch>,
            took_ms: u64,
        }
        match serde_json::from_value::<Whole>(recorded.clone()) {
            Ok(Whole { tool_result, artifact, patch, took_ms }) => Self { tool_result, artifact, patch, took_ms },
            Err(_) => Self { tool_result: recorded, ..Self::default() },
        }
    }
}

impl Session<'_> {
    /// Does what the model asked for: calls that only read at the same time, the others one after the other.
    pub(super) async fn act(&mut self, calls: &[ToolCall]) -> Result<(), TaskError> {
        let planned: Vec<Planned> = calls.iter().map(|call| self.plan(call)).collect();
        let mut turn = Sha256::new();
        let mut at = 0;
        while at < calls.len() {
            let reads = planned[at..].iter().take_while(|planned| self.is_plain_read(planned)).count();
            let done = match reads {
                0 | 1 => vec![self.do_one(&calls[at], &planned[at]).await?],
                several => self.read_at_once(&calls[at..at + several], &planned[at..at + several]).await?,
            };
            for (call, done) in calls[at..].iter().zip(&done) {
                for part in [&call.name, &call.arguments, &done.content] {
                    turn.update(part);
                    turn.update([0]);
                }
                self.told(call, done);
            }
            at += done.len();
        }
        let turn = turn.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if self.memory.is_stuck(turn) {
            let names: Vec<&str> = calls.iter().map(|call| call.name.as_str()).collect();
            let message = format!("the model repeats the same calls with the same results: {}", names.join(", "));
            return Err(TaskError::fatal("stuck", message).detail("tools", names));
        }
        Ok(())
    }

    fn plan(&self, call: &ToolCall) -> Planned {
        let site = self.site;
        if let Some(which) = BuiltIn::named(&call.name, &site.prepared.agent) {
            let fits = fits(&call.arguments, which.max_bytes());
            return match fits.and_then(|()| which.arguments(&call.arguments)) {
                Ok(arguments) => Planned::BuiltIn { which, arguments },
                Err(wrong) => Planned::Refused(wrong),
            };
        }
        // What undoes or verifies is not the model's to call.
        let Some(tool) = site.toolbox.tools().into_iter().find(|tool| tool.name == call.name) else {
            let own = site.toolbox.tools();
            let own = own.iter().map(|tool| tool.name.clone());
            let names: Vec<String> =
                own.chain(builtin::specs(&site.prepared.agent).map(|known| known.name)).collect();
            let name = cut_to(&call.name, SHOWN_BYTES);
            return Planned::Refused(format!("There is no tool '{name}'. Your tools are: {}.", names.join(", ")));
        };
        match fits(&call.arguments, MAX_ARGUMENT_BYTES).and_then(|()| tool.arguments(&call.arguments)) {
            Ok(arguments) => Planned::Tool { tool, arguments },
            Err(wrong) => Planned::Refused(wrong),
        }
    }

    /// Whether a call can run beside others: it changes nothing and asks nobody.
    fn is_plain_read(&self, planned: &Planned) -> bool {
        match planned {
            Planned::Tool { tool, .. } => {
                tool.effect == Effect::Read && tool.lock.is_none() && !self.must_ask(tool.risk)
            }
            Planned::Refused(_) | Planned::BuiltIn { .. } => false,
        }
    }

    /// Whether a person must allow calls of this risk; by the manifest, or by the task's own constraints.
    fn must_ask(&self, risk: Risk) -> bool {
        let state = self.site.run.state();
        self.site.prepared.agent.human_in_the_loop.required_for_risk_levels.contains(&risk)
            || state
                .constraints
                .human_in_the_loop
                .required_for_risk_levels
                .iter()
                .any(|level| level == risk.name())
    }

    async fn read_at_once(&mut self, calls: &[ToolCall], planned: &[Planned]) -> Result<Vec<Done>, TaskError> {
        let site = self.site;
        for call in calls {
            self.tell_call(call);
        }
        let tools = planned.iter().filter_map(|planned| match planned {
            Planned::Tool { tool, arguments } => Some((tool, arguments)),
            Planned::Refused(_) | Planned::BuiltIn { .. } => None,
        });
        let (turn, left) = (self.memory.iteration, self.time_left());
        let work = |(number, (tool, arguments))| site.call(tool, arguments, (turn, left), Some(number));
        let works = tools.clone().enumerate().map(work);
        let given = listening(site.run, &mut self.heard, join_all(works)).await?;
        let mut done = Vec::new();
        for ((call, (tool, _)), given) in calls.iter().zip(tools).zip(given) {
            done.push(self.take(call, tool, given).await?);
        }
        Ok(done)
    }

    async fn do_one(&mut self, call: &ToolCall, planned: &Planned) -> Result<Done, TaskError> {
        let (tool, arguments) = match planned {
            Planned::Refused(why) => return Ok(Done::badly(why)),
            Planned::BuiltIn { which, arguments } => {
                self.tell_call(call);
                return self.built_in(*which, arguments).await;
            }
            Planned::Tool { tool, arguments } => (tool, arguments),
        };
        if self.must_ask(tool.risk)
            && let Err(refused) = self.ask_for(tool, arguments).await
        {
            return match refused.code.as_str() {
                "denied" | "approval_expired" => {
                    Ok(Done::badly(format!("{} was not run: {}.", tool.name, refused.message)))
                }
                _ => Err(refused),
            };
        }
        let lock = match &tool.lock {
            Some(name) => Some(self.site.run.lock(name).await?),
            None => None,
        };
        self.tell_call(call);
        let work = self.site.call(tool, arguments, (self.memory.iteration, self.time_left()), None);
        let given = listening(self.site.run, &mut self.heard, work).await?;
        if let Some(lock) = lock {
            lock.release().await?;
        }
        self.take(call, tool, given).await
    }

    /// Asks a person to allow exactly this call of exactly this tool.
    async fn ask_for(&mut self, tool: &AgentTool, arguments: &Value) -> Result<(), TaskError> {
        let agent = &self.site.prepared.agent;
        self.tell_progress("waiting", Some(&tool.name), &format!("Waiting for approval of {}", tool.name));
        let what = format!("{} wants to call {}", agent.name, tool.name);
        let definition = tool.digest();
        // By its definition too: an approval that was asked for before the tool was changed is none for it now.
        let key = format!("{}:{}", tool.name, cut_to(definition.trim_start_matches("sha256-"), 12));
        let approval = self
            .site
            .run
            .approve(what, tool.risk)
            .key(key)
            .tool(&tool.name, &definition)
            .arguments(arguments)
            .expires(agent.human_in_the_loop.approval_timeout);
        self.listening(approval.into_future()).await?.map(drop)
    }

    /// Takes note of what a tool gave: in the state, in the memory, and in words for the model.
    async fn take(
        &mut self,
        call: &ToolCall,
        tool: &AgentTool,
        given: Result<Gave, TaskError>,
    ) -> Result<Done, TaskError> {
        let gave = match given {
            Ok(gave) => gave,
            Err(error) if tool.fatal || NOT_FOR_THE_MODEL.contains(&error.code.as_str()) => return Err(error),
            Err(error) => {
                self.memory.spent.wall_time_ms += wasted_ms(&error);
                return Ok(Done::badly(format!("{} failed: {}", call.name, error.message)));
            }
        };
        self.memory.spent.wall_time_ms += gave.took_ms;
        let mut patch = gave.patch.unwrap_or_default();
        let content = match &gave.artifact {
            None => text_of(&gave.tool_result),
            Some(stored) => {
                self.memory.keep_excerpt(&stored.artifact_id, &stored.excerpt);
                patch.add_artifacts.push(ArtifactRef {
                    artifact_id: stored.artifact_id.clone(),
                    kind: format!("tool_result.{}", call.name),
                    summary: stored.summary.clone(),
                    bytes: stored.bytes,
                    step: self.site.run.state().current_step,
                });
                format!(
                    "The output is kept as artifact {}: {}. Page or search in it with read_artifact.",
                    stored.artifact_id, stored.summary
                )
            }
        };
        self.patch(patch).await?;
        Ok(Done::well(content))
    }

    /// What is left of the budget of running time.
    fn time_left(&self) -> Duration {
        let most = self.site.run.state().budget.max_wall_time_ms;
        Duration::from_millis(most.saturating_sub(self.memory.spent.wall_time_ms))
    }

    fn tell_call(&self, call: &ToolCall) {
        let shown = cut_to(&call.arguments, SHOWN_BYTES);
        self.tell_progress("tool_call", Some(&call.name), &format!("Calling {} {shown}", call.name));
    }

    fn told(&mut self, call: &ToolCall, done: &Done) {
        let how = if done.failed { "failed" } else { "done" };
        let shown = cut_to(done.content.lines().next().unwrap_or_default(), SHOWN_BYTES);
        self.tell_progress("tool_result", Some(&call.name), &format!("{} {how}: {shown}", call.name));
        self.memory.add(Message::ToolResult {
            call_id: call.id.clone(),
            name: call.name.clone(),
            content: done.content.clone(),
            failed: done.failed,
        });
    }
}

impl Site<'_> {
    /// Calls a tool, as one step. `number` tells calls apart that run at the same time.
    async fn call(
        self,
        tool: &Arc<AgentTool>,
        arguments: &Value,
        (turn, left): (u32, Duration),
        number: Option<usize>,
    ) -> Result<Gave, TaskError> {
        let site = self;
        // What all its tries here have taken of that.
        let used = Arc::new(AtomicU64::new(0));
        let arguments = Arc::new(arguments.clone());
        let inline = site.run.state().budget.max_artifact_bytes_in_context.min(INLINE_BYTES);
        let inline = usize::try_from(inline).unwrap_or(usize::MAX);
        let act = {
            let arguments = Arc::clone(&arguments);
            move |context: StepContext| {
                let (values, body) = (Arc::clone(&arguments), Arc::clone(&arguments));
                let call = Call { values, body, context, progress: Some(site.tells_progress(tool, turn)) };
                let used = Arc::clone(&used);
                async move {
                    let begun = Instant::now();
                    let left = left.saturating_sub(Duration::from_millis(used.load(Ordering::Relaxed)));
                    let gave = in_time(tool, left, site.run_tool(tool, &call, inline)).await;
                    let took_ms = begun.elapsed().as_millis() as u64;
                    let in_all = used.fetch_add(took_ms, Ordering::Relaxed) + took_ms;
                    match gave {
                        Ok(gave) => Ok(Gave { took_ms, ..gave }),
                        Err(error) => Err(error.detail(TOOK_MS, in_all)),
                    }
                }
            }
        };
        let told = json!({"tool": tool.name, "arguments": *arguments});
        let tells = move |gave: &Gave| {
            let mut told = told;
            told["took_ms"] = gave.took_ms.into();
            if let Some(stored) = &gave.artifact {
                told["artifact_id"] = stored.artifact_id.as_str().into();
            }
            vec![("tool.executed".to_owned(), told)]
        };
        let mut step = site
            .run
            .step_with(tool.name.clone(), act)
            .kind("tool")
            .effect(tool.effect)
            .attempts(tool.attempts)
            .deferred(site.defers())
            .tells(tells);
        if let Some(number) = number {
            step = step.key(number.to_string());
        }
        if let Some(verify) = tool.verify.as_deref().and_then(|name| site.toolbox.get(name)) {
            let arguments = Arc::clone(&arguments);
            step = step.verify(move |context| {
                let call =
                    Call { values: Arc::clone(&arguments), body: Arc::clone(&arguments), context, progress: None };
                let verify = Arc::clone(&verify);
                async move {
                    let said = verdict(verify.action.run(&call).await?)?;
                    Ok::<_, TaskError>(said.map(|tool_result| Gave { tool_result, ..Gave::default() }))
                }
            });
        }
        if let Some(undo) = tool.undo.as_deref().and_then(|name| site.toolbox.get(name)) {
            let (attempts, timeout) = (undo.attempts, undo.timeout);
            // It must not hold the run, which holds it.
            let undo = move |context: StepContext, gave: Gave| {
                let undo = Arc::clone(&undo);
                let known = Arc::new(json!({"arguments": *arguments, "result": gave.shown()}));
                async move {
                    let call = Call { values: Arc::clone(&known), body: known, context, progress: None };
                    undo.action.run(&call).await.map(drop)
                }
            };
            step = step.undo_with(undo).undo_attempts(attempts).undo_timeout(timeout);
        }
        step.await
    }
}

/// Works for as long as the tool may take, and the budget has left.
async fn in_time(
    tool: &AgentTool,
    left: Duration,
    work: impl Future<Output = Result<Gave, TaskError>>,
) -> Result<Gave, TaskError> {
    if left.is_zero() {
        let message = format!("{} was not run: no running time is left (max_wall_time_ms)", tool.name);
        return Err(TaskError::fatal("budget_exhausted", message).detail("budget", "max_wall_time_ms"));
    }
    let limit = left.min(tool.timeout);
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let why = if limit < tool.timeout { ", which is all that max_wall_time_ms left" } else { "" };
        Err(TaskError::in_doubt("timeout", format!("no result after {limit:?}{why}")))
    })
}

/// What a tool with `returns = "patch"` says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WithPatch {
    #[serde(default)]
    result: Value,
    #[serde(default)]
    patch: StatePatch,
}

impl Site<'_> {
    /// Shows people how far a call is.
    fn tells_progress(&self, tool: &AgentTool, turn: u32) -> Tell {
        let (run, name, total) = (self.run.clone(), tool.name.clone(), self.run.state().budget.max_steps);
        Tell::new(move |how_far| {
            run.progress_with_tool("tool_call", turn, total, Some(&name), &format!("{name}: {how_far}"));
        })
    }

    /// Runs a tool. What it gives beyond `inline` bytes becomes an artifact.
    async fn run_tool(&self, tool: &AgentTool, call: &Call, inline: usize) -> Result<Gave, TaskError> {
        let (host, tenant) = (&self.prepared.host, self.run.tenant());
        if !tool.returns_patch {
            let output = match &host.artifacts {
                Some(artifacts) => tool.action.run_long(call, inline, artifacts, tenant).await?,
                None => Output::Value(tool.action.run(call).await?),
            };
            return Ok(match output {
                Output::Value(tool_result) => Gave { tool_result, ..Gave::default() },
                Output::Stored(stored) => Gave { artifact: Some(stored), ..Gave::default() },
            });
        }
        let said: WithPatch = serde_json::from_value(tool.action.run(call).await?).map_err(|error| {
            let message = format!(r#"{} must give {{"result": …, "patch": StatePatch}}: {error}"#, tool.name);
            TaskError::fatal("bad_patch", message)
        })?;
        let mut gave = Gave { tool_result: said.result, patch: Some(said.patch), ..Gave::default() };
        let text = text_of(&gave.tool_result);
        if text.len() > inline {
            gave.artifact =
                Some(host.storage()?.put(tenant, text.into()).await.map_err(|error| error.task_error())?);
            gave.tool_result = Value::Null;
        }
        Ok(gave)
    }
}

impl Gave {
    /// The result, or where it is.
    fn shown(&self) -> Value {
        match &self.artifact {
            None => self.tool_result.clone(),
            Some(stored) => {
                json!({"artifact_id": stored.artifact_id, "summary": stored.summary, "bytes": stored.bytes})
            }
        }
    }
}

/// How long a call that failed took, in all its tries here.
fn wasted_ms(error: &TaskError) -> u64 {
    error.cause.as_deref().and_then(|cause| cause.details[TOOK_MS].as_u64()).unwrap_or_default()
}

/// Whether what a model wrote is small enough; else what it is told.
fn fits(written: &str, most: usize) -> Result<(), String> {
    if written.len() <= most {
        return Ok(());
    }
    Err(format!(
        "The arguments have {} bytes; at most {most} are accepted. Say it in less, or in several calls.",
        written.len()
    ))
}

/// A result in words for the model.
fn text_of(result: &Value) -> String {
    match result {
        Value::Null => "(no output)".to_owned(),
        Value::String(text) if text.is_empty() => "(no output)".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_decided_is_taken_as_the_result() {
        let whole = Gave { tool_result: json!("x"), took_ms: 3, ..Gave::default() };
        let text = serde_json::to_string(&whole).expect("it serialises");
        assert_eq!(serde_json::from_str::<Gave>(&text).expect("and parses"), whole);
        let decided: Gave = serde_json::from_str(r#"{"freed": "2 GB"}"#).expect("anything is a result");
        assert_eq!(decided.tool_result, json!({"freed": "2 GB"}));
        assert_eq!(serde_json::from_str::<Gave>("null").expect("also nothing").tool_result, Value::Null);
    }
}
