//! The tools that every agent has: its plan, its facts, people, artifacts, other agents.

use std::fmt::Write;
use std::future::IntoFuture;
use std::sync::LazyLock;

use jsonschema::Validator;
use longhaul::state::{Fact, Resolved, StatePatch};
use longhaul::{Effect, NewTask, TaskError, TaskId};
use serde_json::{Value, json};

use super::act::Done;
use super::memory::Spent;
use super::order::Less;
use super::session::Session;
use crate::manifest::Agent;
use crate::model::ToolSpec;
use crate::tool::schema;

pub(super) const READ_ARTIFACT: &str = "read_artifact";
/// The most that one page of an artifact shows.
const MAX_PAGE_BYTES: u64 = 4_000;
const DEFAULT_LINES: u64 = 100;
const MAX_MATCHES: usize = 50;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BuiltIn {
    UpdatePlan,
    Remember,
    AskUser,
    ReadArtifact,
    ReadState,
    PublishEvent,
    Delegate,
}

/// What a model is told of one, and what it checks arguments with.
struct Known {
    which: BuiltIn,
    name: &'static str,
    description: &'static str,
    parameters: Value,
    schema: Option<Validator>,
}

static ALL: LazyLock<Vec<Known>> = LazyLock::new(|| {
    let text = |what: &str| json!({"type": "string", "minLength": 1, "description": what});
    let object = |required: &[&str], properties: Value| json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false});
    let known = |which, name, description, parameters: Value| {
        let schema = schema::compile(&parameters).ok();
        Known { which, name, description, parameters, schema }
    };
    vec![
        known(
            BuiltIn::UpdatePlan,
            "update_plan",
            "Sets the plan: what is to be done, in order, and which entry you are at.",
            object(
                &["plan"],
                json!({"plan": {"type": "array", "items": {"type": "string"}, "maxItems": 50},
                       "current_step": {"type": "string", "description": "The entry being worked on"}}),
            ),
        ),
        known(
            BuiltIn::Remember,
            "remember",
            "Notes a fact, so that it is still known when older turns are forgotten. One with a known key replaces it.",
            object(
                &["key", "value"],
                json!({"key": text("About what"), "value": {"description": "What"},
                       "source": {"type": "string", "description": "From where"}}),
            ),
        ),
        known(
            BuiltIn::AskUser,
            "ask_user",
            "Asks a person and waits for the answer. Only for what you cannot find out yourself.",
            object(&["question"], json!({"question": text("The question")})),
        ),
        known(
            BuiltIn::ReadArtifact,
            READ_ARTIFACT,
            "Reads lines of an artifact, or the lines that match a regular expression.",
            object(
                &["artifact_id"],
                json!({"artifact_id": text("Its id"),
                       "from_line": {"type": "integer", "minimum": 1, "description": "The first line; 1 by default"},
                       "lines": {"type": "integer", "minimum": 1, "maximum": 1000, "description": "How many; 100 by default"},
                       "from_byte": {"type": "integer", "minimum": 0, "description": "Instead of lines, the text from this byte on: for lines that are too long to be shown"},
                       "search": {"type": "string", "minLength": 1, "description": "Only lines that match this regular expression"}}),
            ),
        ),
        known(
            BuiltIn::ReadState,
            "read_state",
            "Reads the state of another agent's task: goal, plan, facts, questions, artifacts.",
            object(&["task_id"], json!({"task_id": text("The task's id")})),
        ),
        known(
            BuiltIn::PublishEvent,
            "publish_event",
            "Publishes an event, like disk.cleaned, to whoever listens.",
            object(
                &["type"],
                json!({"type": text("Its type, like disk.cleaned"), "payload": {"description": "Any JSON"}}),
            ),
        ),
        known(
            BuiltIn::Delegate,
            "delegate",
            "Lets another agent do a part of the work and gives its answer. It knows only what you tell it.",
            object(&["agent", "task"], json!({"agent": text("Which agent"), "task": text("What it is to do")})),
        ),
    ]
});

/// What the model is told of the tools that this agent has besides its own.
pub(super) fn specs(agent: &Agent) -> impl Iterator<Item = ToolSpec> {
    ALL.iter().filter(|known| has(agent, known.which)).map(|known| {
        let mut description = known.description.to_owned();
        let mut parameters = known.parameters.clone();
        if known.which == BuiltIn::Delegate {
            let _ = write!(description, " Agents: {}.", agent.delegates.join(", "));
            parameters["properties"]["agent"]["enum"] = json!(agent.delegates);
        }
        ToolSpec { name: known.name.to_owned(), description, parameters }
    })
}

fn has(agent: &Agent, which: BuiltIn) -> bool {
    which != BuiltIn::Delegate || !agent.delegates.is_empty()
}

impl BuiltIn {
    pub(super) fn named(name: &str, agent: &Agent) -> Option<Self> {
        let known = ALL.iter().find(|known| known.name == name)?;
        has(agent, known.which).then_some(known.which)
    }

    /// The most that may be written for it. What goes into the state is shown again and again, so it is small.
    pub(super) fn max_bytes(self) -> usize {
        match self {
            Self::UpdatePlan | Self::Remember => 8 * 1024,
            Self::AskUser | Self::ReadArtifact | Self::ReadState => 16 * 1024,
            Self::PublishEvent | Self::Delegate => 64 * 1024,
        }
    }

    /// What the model wrote, as arguments that fit; or what is wrong with them, for the model.
    pub(super) fn arguments(self, written: &str) -> Result<Value, String> {
        let known =
            ALL.iter().find(|known| known.which == self).and_then(|known| Some((known, known.schema.as_ref()?)));
        let (known, validator) = known.ok_or("this tool cannot be used")?;
        schema::read(validator, &known.parameters, written)
    }
}

impl Session<'_> {
    /// Does one of them; the arguments fit its schema.
    pub(super) async fn built_in(&mut self, which: BuiltIn, arguments: &Value) -> Result<Done, TaskError> {
        match which {
            BuiltIn::UpdatePlan => self.update_plan(arguments).await,
            BuiltIn::Remember => self.remember(arguments).await,
            BuiltIn::AskUser => self.ask_user(text(arguments, "question")).await,
            BuiltIn::ReadArtifact => self.read_artifact(arguments).await,
            BuiltIn::ReadState => self.read_state(text(arguments, "task_id")).await,
            BuiltIn::PublishEvent => self.publish_event(arguments).await,
            BuiltIn::Delegate => self.delegate(text(arguments, "agent"), text(arguments, "task")).await,
        }
    }

    async fn update_plan(&self, arguments: &Value) -> Result<Done, TaskError> {
        let plan: Vec<String> = serde_json::from_value(arguments["plan"].clone())?;
        let current_step = match arguments["current_step"].as_str() {
            Some(step) => Some(step.to_owned()),
            // Where it stands stays true as long as the plan still has that entry.
            None if plan.contains(&self.site.run.state().current_step) => None,
            None => plan.first().cloned(),
        };
        self.patch(StatePatch { replace_plan: Some(plan), current_step, ..StatePatch::default() }).await?;
        Ok(Done::well("The plan is set."))
    }

    async fn remember(&self, arguments: &Value) -> Result<Done, TaskError> {
        let source = arguments["source"].as_str().unwrap_or("agent").to_owned();
        let fact = Fact { key: text(arguments, "key").to_owned(), value: arguments["value"].clone(), source };
        self.patch(StatePatch { add_facts: vec![fact], ..StatePatch::default() }).await?;
        Ok(Done::well("Noted."))
    }

    async fn ask_user(&mut self, question: &str) -> Result<Done, TaskError> {
        let asked = vec![question.to_owned()];
        self.patch(StatePatch { add_questions: asked, ..StatePatch::default() }).await?;
        self.tell_progress("waiting", Some("ask_user"), &format!("Waiting for an answer: {question}"));
        let asked = self.site.run.ask(question);
        let answer = self.listening(asked.into_future()).await??;
        let resolved = Resolved { question: question.to_owned(), answer: answer.clone() };
        self.patch(StatePatch { resolve_questions: vec![resolved], ..StatePatch::default() }).await?;
        Ok(Done::well(answer))
    }

    async fn read_artifact(&mut self, arguments: &Value) -> Result<Done, TaskError> {
        let site = self.site;
        let id = text(arguments, "artifact_id");
        let room = (site.run.state().budget.max_artifact_bytes_in_context / 2).min(MAX_PAGE_BYTES);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let (artifacts, tenant) = (site.prepared.host.storage()?, site.run.tenant());
        let read = || async {
            // Asked inside the step: others may change the state, and a replay must not see that.
            let known = site.run.state().artifacts;
            if !known.iter().any(|artifact| artifact.artifact_id == id) {
                let ids: Vec<&str> = known.iter().map(|artifact| artifact.artifact_id.as_str()).collect();
                let message = format!("This task has no such artifact. It has: {}.", ids.join(", "));
                return Err(TaskError::fatal("unknown_artifact", message));
            }
            if let Some(pattern) = arguments["search"].as_str() {
                let found = artifacts.search(tenant, id, pattern, MAX_MATCHES, room).await;
                let found = found.map_err(|error| error.task_error())?;
                let mut shown = String::new();
                for found in &found.matches {
                    // Where to read on in a line that is too long to be shown.
                    let place = match found.text.starts_with('…') || found.text.ends_with('…') {
                        true => format!("{} (byte {})", found.line, found.offset),
                        false => found.line.to_string(),
                    };
                    let _ = writeln!(shown, "{place}: {}", found.text);
                }
                match (found.matches.is_empty(), found.more) {
                    (true, _) => shown.push_str("No line matches."),
                    (false, true) => shown.push_str("(there are more)"),
                    (false, false) => {}
                }
                return Ok(shown);
            }
            if let Some(from) = arguments["from_byte"].as_u64() {
                let text = artifacts.text(tenant, id, from, room).await.map_err(|error| error.task_error())?;
                return Ok(match text.next_byte {
                    Some(next) => format!("{}\n(go on with from_byte = {next})", text.text),
                    None if text.text.is_empty() => "There is nothing from there on.".to_owned(),
                    None => text.text,
                });
            }
            let from = arguments["from_line"].as_u64().unwrap_or(1);
            let count = arguments["lines"].as_u64().unwrap_or(DEFAULT_LINES);
            let page = artifacts.lines(tenant, id, from, count, room).await.map_err(|error| error.task_error())?;
            Ok::<_, TaskError>(match page.next_line {
                Some(next) => format!("{}\n(go on with from_line = {next})", page.text),
                None if page.lines == 0 => "There are no lines from there on.".to_owned(),
                None => page.text,
            })
        };
        let step = site.run.step(READ_ARTIFACT, read).kind("tool").effect(Effect::Read).deferred(site.defers());
        let read = self.listening(step.into_future()).await?;
        Ok(read.map_or_else(|error| Done::badly(error.message), Done::well))
    }

    async fn read_state(&mut self, task: &str) -> Result<Done, TaskError> {
        let Ok(id) = task.parse::<TaskId>() else {
            return Ok(Done::badly(format!("'{}' is not the id of a task.", task.escape_debug())));
        };
        let site = self.site;
        let client = site.prepared.host.client.for_tenant(site.run.tenant());
        let read = || async {
            let state = client.state(id).await?;
            Ok::<_, TaskError>(state.map(|(version, state)| json!({"version": version, "state": state})))
        };
        let step = site.run.step("read_state", read).kind("tool").effect(Effect::Read).deferred(site.defers());
        let read = self.listening(step.into_future()).await?;
        Ok(match read {
            Ok(Some(state)) => Done::well(state.to_string()),
            Ok(None) => Done::badly("There is no such task, or it has no state."),
            Err(error) => Done::badly(error.message),
        })
    }

    async fn publish_event(&self, arguments: &Value) -> Result<Done, TaskError> {
        match self.site.run.publish(text(arguments, "type"), &arguments["payload"]).await {
            Ok(()) => Ok(Done::well("Published.")),
            Err(error) if error.code == "bad_event_type" => Ok(Done::badly(error.message)),
            Err(error) => Err(error),
        }
    }

    /// Lets another agent do something, with what is left of this one's budget, and counts what it used.
    async fn delegate(&mut self, agent: &str, task: &str) -> Result<Done, TaskError> {
        let site = self.site;
        if !site.prepared.agent.delegates.iter().any(|delegate| delegate == agent) {
            let allowed = site.prepared.agent.delegates.join(", ");
            return Ok(Done::badly(format!(
                "You may not delegate to '{}'; you may to: {allowed}.",
                agent.escape_debug()
            )));
        }
        let left = self.left();
        let child = site.run.spawn_with_undo(NewTask::new(agent, &json!({"goal": task, "budget": left}))).await;
        let child = match child {
            Ok(child) => child,
            Err(error) if root(&error).code == "bad_child" => return Ok(Done::badly(&root(&error).message)),
            Err(error) => return Err(error),
        };
        self.tell_progress("waiting", Some("delegate"), &format!("Waiting for {agent}"));
        let answer = site.run.join::<Value>(child).await;
        let client = site.prepared.host.client.for_tenant(site.run.tenant());
        let count = || async { Ok::<_, TaskError>(client.task(child.id).await?.usage.unwrap_or_default()) };
        let used = site.run.step("count what the child used", count).effect(Effect::Read).deferred(site.defers());
        // What people said meanwhile is heard now, before the next request is made.
        let used = self.listening(used.into_future()).await??;
        self.memory.spent.add(&serde_json::from_value::<Spent>(used).unwrap_or_default());
        site.run.usage(&self.memory.spent);
        Ok(match answer {
            Ok(Value::String(answer)) => Done::well(answer),
            Ok(other) => Done::well(other.to_string()),
            Err(error) => Done::badly(error.to_string()),
        })
    }

    /// What is left of the budget, for a child.
    fn left(&self) -> Less {
        let budget = self.site.run.state().budget;
        let spent = &self.memory.spent;
        Less {
            max_steps: Some(budget.max_steps.saturating_sub(spent.steps)),
            max_wall_time_ms: Some(budget.max_wall_time_ms.saturating_sub(spent.wall_time_ms)),
            max_llm_tokens: Some(budget.max_llm_tokens.saturating_sub(spent.tokens())),
            max_artifact_bytes_in_context: None,
            max_cost_usd: budget.max_cost_usd.map(|most| (most - spent.cost_usd.unwrap_or(0.0)).max(0.0)),
        }
    }
}

/// What led to an error in the end.
fn root(error: &TaskError) -> &TaskError {
    error.cause.as_deref().map_or(error, root)
}

/// A text that the schema requires.
fn text<'v>(arguments: &'v Value, name: &str) -> &'v str {
    arguments[name].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_tool_has_a_schema_that_compiles_and_a_reserved_name() {
        for known in ALL.iter() {
            assert!(known.schema.is_some(), "{}", known.name);
            assert!(crate::tool::BUILT_IN.contains(&known.name), "{}", known.name);
        }
        assert_eq!(ALL.len(), crate::tool::BUILT_IN.len());
    }

    #[test]
    fn arguments_that_do_not_fit_are_told_in_words() {
        assert!(BuiltIn::Remember.arguments(r#"{"key": "disk", "value": 97}"#).is_ok());
        let wrong = BuiltIn::Remember.arguments(r#"{"key": "disk"}"#).expect_err("no value");
        assert!(wrong.contains("value"), "{wrong}");
    }
}
