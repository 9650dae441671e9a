//! Agent manifests: a model, its budget, when people are asked, and its tools.
//!
//! ```toml
//! [agent]
//! name = "devops"                       # the handler name, and the agent_id
//! model = "gpt-4o-mini"
//! system = "You are an autonomous DevOps agent."
//! provider = "openai"                   # default; or "anthropic"
//! fallback_model = "gpt-4o"             # asked when the first cannot be had
//! context_window = 128000               # tokens; default
//! temperature = 0.2                     # default: the provider's
//! stream = true                         # default
//! description = "Keeps disks clean"     # optional, for people and for agents that delegate to it
//! queue = "ops"                         # default: the queue that the task names
//! max_attempts = 3                      # default: the task's
//! undo = ["failed", "cancelled"]        # default: only on request
//! delegates = ["researcher"]            # agents it may hand work to; default: none
//!
//! [agent.budget]                        # these are the defaults
//! max_steps = 20
//! max_wall_time_ms = 300000
//! max_llm_tokens = 200000
//! max_artifact_bytes_in_context = 8000
//! max_cost_usd = 1.0                    # default: none; needs [agent.price]
//!
//! [agent.price]                         # dollars for a million tokens
//! input_per_mtok = 0.15
//! output_per_mtok = 0.6
//!
//! [agent.human_in_the_loop]             # these are the defaults
//! required_for_risk_levels = ["write_local", "external_action"]
//! approval_timeout = "24h"
//!
//! [agent.checkpoint]                    # these are the defaults
//! strategy = "every_step"               # every_step | every_iteration | on_state_change
//! max_age = "24h"
//! max_count = 10
//! on_refused = "go_on"                  # or "fail"
//! ```
//!
//! `agent/tools.rs` says what `[[tool]]` may have, `agent/servers.rs` what `[[mcp]]` may, and
//! `agent/names.rs` checks what they refer to.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use longhaul::Risk;
use longhaul::state::Budget;
use toml::de::{DeTable, DeValue};

use super::problem::Report;
use super::saga::{Entry, Name, RISKS, folder, handler_name};
use super::table::{Found, Key, Table};
use crate::model::{ModelSettings, Provider};
use crate::tool::AgentTool;

mod names;
mod servers;
mod tools;

pub use servers::{McpServer, McpTransport, Override};

const AGENT_KEYS: &[Key] = &[
    Key { name: "name", example: r#"name = "devops""# },
    Key { name: "model", example: r#"model = "gpt-4o-mini""# },
    Key { name: "system", example: r#"system = "You are an autonomous DevOps agent.""# },
    Key { name: "provider", example: r#"provider = "openai""# },
    Key { name: "fallback_model", example: r#"fallback_model = "gpt-4o""# },
    Key { name: "context_window", example: "context_window = 128000" },
    Key { name: "temperature", example: "temperature = 0.2" },
    Key { name: "stream", example: "stream = false" },
    Key { name: "description", example: r#"description = "Keeps disks clean""# },
    Key { name: "queue", example: r#"queue = "ops""# },
    Key { name: "max_attempts", example: "max_attempts = 3" },
    Key { name: "undo", example: r#"undo = ["failed", "cancelled"]"# },
    Key { name: "delegates", example: r#"delegates = ["researcher"]"# },
    Key { name: "budget", example: "[agent.budget] on a line of its own" },
    Key { name: "price", example: "[agent.price] on a line of its own" },
    Key { name: "human_in_the_loop", example: "[agent.human_in_the_loop] on a line of its own" },
    Key { name: "checkpoint", example: "[agent.checkpoint] on a line of its own" },
];

const BUDGET_KEYS: &[Key] = &[
    Key { name: "max_steps", example: "max_steps = 20" },
    Key { name: "max_wall_time_ms", example: "max_wall_time_ms = 300000" },
    Key { name: "max_llm_tokens", example: "max_llm_tokens = 200000" },
    Key { name: "max_artifact_bytes_in_context", example: "max_artifact_bytes_in_context = 8000" },
    Key { name: "max_cost_usd", example: "max_cost_usd = 1.0" },
];

const PRICE_KEYS: &[Key] = &[
    Key { name: "input_per_mtok", example: "input_per_mtok = 0.15" },
    Key { name: "output_per_mtok", example: "output_per_mtok = 0.6" },
];

const PEOPLE_KEYS: &[Key] = &[
    Key {
        name: "required_for_risk_levels",
        example: r#"required_for_risk_levels = ["write_local", "external_action"]"#,
    },
    Key { name: "approval_timeout", example: r#"approval_timeout = "24h""# },
];

const CHECKPOINT_KEYS: &[Key] = &[
    Key { name: "strategy", example: r#"strategy = "every_step""# },
    Key { name: "max_age", example: r#"max_age = "24h""# },
    Key { name: "max_count", example: "max_count = 10" },
    Key { name: "on_refused", example: r#"on_refused = "fail""# },
];

const PROVIDERS: [(&str, Provider); 2] = [("openai", Provider::OpenAi), ("anthropic", Provider::Anthropic)];
const UNDO_WHEN: [(&str, UndoWhen); 2] = [("failed", UndoWhen::Failed), ("cancelled", UndoWhen::Cancelled)];
const STRATEGIES: [(&str, Strategy); 3] = [
    ("every_step", Strategy::EveryStep),
    ("every_iteration", Strategy::EveryIteration),
    ("on_state_change", Strategy::OnStateChange),
];
const ON_REFUSED: [(&str, bool); 2] = [("go_on", false), ("fail", true)];

/// What models of today have at least.
const DEFAULT_CONTEXT_WINDOW: u64 = 128_000;
const DAY: Duration = Duration::from_secs(86_400);
const DEFAULT_CHECKPOINTS: u32 = 10;
/// Larger than anything that can be meant, and small enough to count with.
const MAX_COUNT: u64 = 1 << 48;

/// An agent as it was declared.
#[derive(Clone, Debug)]
pub struct Agent {
    /// The handler's name.
    pub name: String,
    /// For people, and for agents that delegate to it.
    pub description: Option<String>,
    /// Which model, and how it is called.
    pub model: ModelSettings,
    /// How much chance is in the model's answers; without it, the provider's default.
    pub temperature: Option<f64>,
    /// How many tokens the model can see at once.
    pub context_window: u64,
    /// What the model is told before everything else.
    pub system: String,
    /// Where its tasks queue, unless they say so themselves.
    pub queue: Option<String>,
    /// How many runs of a task may end with an error, unless it says so itself.
    pub max_attempts: Option<u32>,
    /// When what it did is undone without a request.
    pub undo: UndoPolicy,
    /// What a task may use up.
    pub budget: Budget,
    /// What tokens cost.
    pub price: Option<Price>,
    /// When people are asked.
    pub human_in_the_loop: People,
    /// How its progress is kept.
    pub checkpoint: Checkpoints,
    /// The agents it may hand work to.
    pub delegates: Vec<String>,
    /// Its tools; those of its MCP servers are found when they are connected.
    pub tools: Vec<AgentTool>,
    /// Its MCP servers.
    pub mcp: Vec<McpServer>,
    /// Where its commands run.
    pub folder: PathBuf,
    /// Where it was read from.
    pub file: PathBuf,
}

impl Agent {
    /// An agent without tools, with the defaults for everything.
    pub fn new(name: impl Into<String>, model: ModelSettings) -> Self {
        Self {
            name: name.into(),
            description: None,
            model,
            temperature: None,
            context_window: DEFAULT_CONTEXT_WINDOW,
            system: String::new(),
            queue: None,
            max_attempts: None,
            undo: UndoPolicy::default(),
            budget: Budget::default(),
            price: None,
            human_in_the_loop: People::default(),
            checkpoint: Checkpoints::default(),
            delegates: Vec::new(),
            tools: Vec::new(),
            mcp: Vec::new(),
            folder: PathBuf::from("."),
            file: PathBuf::new(),
        }
    }
}

/// When what an agent did is undone without a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UndoPolicy {
    /// When its task fails.
    pub failed: bool,
    /// When its task is cancelled.
    pub cancelled: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum UndoWhen {
    Failed,
    Cancelled,
}

/// Dollars for a million tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    /// Of requests.
    pub input_per_mtok: f64,
    /// Of answers.
    pub output_per_mtok: f64,
}

/// When people are asked before a tool runs.
#[derive(Clone, Debug, PartialEq)]
pub struct People {
    /// Tools of these risks run only with an approval.
    pub required_for_risk_levels: Vec<Risk>,
    /// How long an answer may take.
    pub approval_timeout: Duration,
}

impl Default for People {
    fn default() -> Self {
        Self { required_for_risk_levels: vec![Risk::WriteLocal, Risk::ExternalAction], approval_timeout: DAY }
    }
}

/// How an agent's progress is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    /// When records may wait.
    pub strategy: Strategy,
    /// A checkpoint older than this is refused.
    pub max_age: Duration,
    /// How many are kept.
    pub max_count: u32,
    /// Whether a refused checkpoint ends the task, instead of falling back to the one before.
    pub fail_when_refused: bool,
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self {
            strategy: Strategy::EveryStep,
            max_age: DAY,
            max_count: DEFAULT_CHECKPOINTS,
            fail_when_refused: false,
        }
    }
}

/// When the records of `read` and `idempotent` steps are written; others never wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// As each step ends.
    EveryStep,
    /// At the end of an iteration.
    EveryIteration,
    /// With the next change of the state.
    OnStateChange,
}

/// Reads an agent; its name also when the rest is wrong.
pub(super) fn read<'t>(
    report: &Report<'t>,
    at: Range<usize>,
    head: &DeTable<'t>,
    tools: Option<Entry<'_, 't>>,
    mcp: Option<Entry<'_, 't>>,
) -> (Option<Name>, Option<Agent>) {
    let folder = folder(report.file());
    let head = Table::new(report, "[agent]", at, head, AGENT_KEYS);
    let name = handler_name(&head);
    let model = model(&head);
    let tools: Vec<_> =
        tables(report, "tool", tools).map(|(at, entries)| tools::read(report, at, entries, &folder)).collect();
    let servers: Vec<_> =
        tables(report, "mcp", mcp).map(|(at, entries)| servers::read(report, at, entries, &folder)).collect();
    names::check(report, &tools, &servers);
    let price = price(&head);
    let agent = Agent {
        name: name.as_ref().map(|(name, _)| name.clone()).unwrap_or_default(),
        description: text(&head, "description"),
        model: model.unwrap_or_else(|| ModelSettings::new(Provider::default(), "")),
        temperature: head.number("temperature", 0.0..=2.0),
        context_window: head.whole("context_window", 1_000..=100_000_000).unwrap_or(DEFAULT_CONTEXT_WINDOW),
        system: head.string("system").map(|found| found.value.to_owned()).unwrap_or_default(),
        queue: text(&head, "queue"),
        max_attempts: head.attempts("max_attempts"),
        undo: undo(&head),
        budget: budget(&head, price.is_some()),
        price,
        human_in_the_loop: people(&head),
        checkpoint: checkpoints(&head),
        delegates: delegates(&head),
        tools: tools.into_iter().filter_map(|declared| declared.tool).collect(),
        mcp: servers.into_iter().filter_map(|declared| declared.server).collect(),
        folder,
        file: report.file().to_owned(),
    };
    // What is not whole has a problem, and is not given to anyone.
    (name, report.is_clean().then_some(agent))
}

/// The tables of `[[tool]]` or `[[mcp]]`, each with its place.
fn tables<'r, 't>(
    report: &Report<'t>,
    key: &'static str,
    entry: Option<Entry<'r, 't>>,
) -> impl Iterator<Item = (Range<usize>, &'r DeTable<'t>)> {
    let mut found = Vec::new();
    match entry.map(|(at, value)| (at, value.get_ref())) {
        None => {}
        Some((_, DeValue::Array(items))) => {
            for item in items.iter() {
                match item.get_ref() {
                    DeValue::Table(entries) => found.push((item.span(), entries)),
                    _ => report.problem(
                        item.span(),
                        format!("'{key}' must be a list of tables"),
                        format!("write [[{key}]] before each"),
                    ),
                }
            }
        }
        Some((at, _)) => report.problem(
            at.span(),
            format!("'{key}' must be a list of tables"),
            format!("write [[{key}]] with two brackets"),
        ),
    }
    found.into_iter()
}

/// A text that must not be empty.
fn text(table: &Table<'_, '_>, key: &str) -> Option<String> {
    let found = table.string(key)?;
    if found.value.trim().is_empty() {
        table.bad(key, found.at, "is empty");
        return None;
    }
    Some(found.value.to_owned())
}

fn model(head: &Table<'_, '_>) -> Option<ModelSettings> {
    if !head.has("model") {
        head.missing("model", "");
    }
    let provider = head.word("provider", &PROVIDERS).unwrap_or_default();
    let fallback_model = text(head, "fallback_model");
    let stream = head.boolean("stream").unwrap_or(true);
    let settings = ModelSettings::new(provider, text(head, "model")?);
    Some(ModelSettings { fallback_model, stream, ..settings })
}

fn undo(head: &Table<'_, '_>) -> UndoPolicy {
    let when = head.words("undo", &UNDO_WHEN).unwrap_or_default();
    UndoPolicy { failed: when.contains(&UndoWhen::Failed), cancelled: when.contains(&UndoWhen::Cancelled) }
}

fn delegates(head: &Table<'_, '_>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for Found { value, at } in head.strings("delegates").unwrap_or_default() {
        if value.is_empty() {
            head.bad("delegates", at, "has an empty name; it lists the names of agents");
        } else if !names.iter().any(|name| name == value) {
            names.push(value.to_owned());
        }
    }
    names
}

/// A table in `[agent]`; where it begins, for what it lacks.
fn section<'r, 't>(
    head: &Table<'r, 't>,
    key: &'static str,
    name: &'static str,
    keys: &'static [Key],
) -> Option<Table<'r, 't>> {
    let found = head.table(key)?;
    Some(Table::new(head.report, name, head.place(key).unwrap_or(found.at), found.value, keys))
}

fn budget(head: &Table<'_, '_>, priced: bool) -> Budget {
    let default = Budget::default();
    let Some(table) = section(head, "budget", "[agent.budget]", BUDGET_KEYS) else { return default };
    let max_steps = table.whole("max_steps", 1..=u64::from(u32::MAX)).and_then(|steps| u32::try_from(steps).ok());
    let count = |key, otherwise| table.whole(key, 1..=MAX_COUNT).unwrap_or(otherwise);
    let max_cost_usd = table.number("max_cost_usd", 0.0..=1e9);
    if let Some(at) = table.place("max_cost_usd")
        && !priced
        && !head.has("price")
    {
        table.report.problem(
            at,
            "'max_cost_usd' cannot be kept: what tokens cost is not known",
            "add [agent.price] with input_per_mtok and output_per_mtok, in dollars for a million tokens",
        );
    }
    Budget {
        max_steps: max_steps.unwrap_or(default.max_steps),
        max_wall_time_ms: count("max_wall_time_ms", default.max_wall_time_ms),
        max_llm_tokens: count("max_llm_tokens", default.max_llm_tokens),
        max_artifact_bytes_in_context: count(
            "max_artifact_bytes_in_context",
            default.max_artifact_bytes_in_context,
        ),
        max_cost_usd,
    }
}

fn price(head: &Table<'_, '_>) -> Option<Price> {
    let table = section(head, "price", "[agent.price]", PRICE_KEYS)?;
    for key in ["input_per_mtok", "output_per_mtok"] {
        if !table.has(key) {
            table.missing(key, "");
        }
    }
    let dollars = |key| table.number(key, 0.0..=1e6);
    let (input_per_mtok, output_per_mtok) = (dollars("input_per_mtok"), dollars("output_per_mtok"));
    Some(Price { input_per_mtok: input_per_mtok?, output_per_mtok: output_per_mtok? })
}

fn people(head: &Table<'_, '_>) -> People {
    let default = People::default();
    let Some(table) = section(head, "human_in_the_loop", "[agent.human_in_the_loop]", PEOPLE_KEYS) else {
        return default;
    };
    People {
        required_for_risk_levels: table
            .words("required_for_risk_levels", &RISKS)
            .unwrap_or(default.required_for_risk_levels),
        approval_timeout: table.duration("approval_timeout").unwrap_or(default.approval_timeout),
    }
}

fn checkpoints(head: &Table<'_, '_>) -> Checkpoints {
    let default = Checkpoints::default();
    let Some(table) = section(head, "checkpoint", "[agent.checkpoint]", CHECKPOINT_KEYS) else { return default };
    let max_count = table.whole("max_count", 1..=10_000).and_then(|count| u32::try_from(count).ok());
    Checkpoints {
        strategy: table.word("strategy", &STRATEGIES).unwrap_or(default.strategy),
        max_age: table.duration("max_age").unwrap_or(default.max_age),
        max_count: max_count.unwrap_or(default.max_count),
        fail_when_refused: table.word("on_refused", &ON_REFUSED).unwrap_or(default.fail_when_refused),
    }
}
