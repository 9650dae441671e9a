//! `[[tool]]` of an agent.
//!
//! ```toml
//! [[tool]]
//! name = "clean_logs"                   # letters, digits, _ and -; at most 64
//! description = "Delete old logs to free space"
//! command = ["./clean_logs.sh", "{{days}}"]   # or http = { method = "POST", url = "…" }
//! parameters = { type = "object", properties = { days = { type = "integer" } } }   # none: no arguments
//! risk = "write_local"                  # read_only | write_local | external_action, the default
//! effect = "compensable"                # default: read for read_only, compensable with an undo, else irreversible
//! undo = "restore_logs"                 # another tool; gets {"arguments", "result"}
//! verify = "logs_cleaned"               # another tool; gets the same arguments and says
//!                                       # {"done": true, "result": …} or {"done": false}
//! lock = "disk"                         # held while it runs
//! env = ["AWS_PROFILE"]                 # what it sees besides PATH, HOME, LANG
//! timeout = "30s"                       # default, for one try
//! attempts = 3                          # default; tries in all
//! returns = "patch"                     # it gives {"result", "patch"}
//! fatal = true                          # its failure is the task's; default: the model is told
//! sandbox = { write = ["/var/log"], network = false }   # or false; see `tool/sandbox.rs`
//! ```
//!
//! A tool that is named as another's `undo` or `verify` is not offered to the model. Placeholders refer
//! to the parameters, in an undo to `{{arguments.NAME}}` and `{{result}}`. A parameter that a placeholder
//! needs is a required one.

use std::ops::Range;
use std::path::{Path, PathBuf};

use longhaul::{Effect, Risk};
use serde_json::{Value, json};
use toml::de::{DeTable, DeValue};

use super::super::problem::Report;
use super::super::saga::{EFFECTS, Name, RISKS};
use super::super::table::{Found, Key, Table};
use super::super::tool;
use super::text;
use crate::template::Placeholder;
use crate::tool::{
    AgentTool, Command, DEFAULT_ATTEMPTS, DEFAULT_TIMEOUT, Sandbox, Tool, check_name, default_effect, schema,
};

const TOOL_KEYS: &[Key] = &[
    Key { name: "name", example: r#"name = "check_disk""# },
    Key { name: "description", example: r#"description = "Check current disk usage""# },
    Key { name: "command", example: r#"command = ["df", "-h", "{{path}}"]"# },
    Key { name: "http", example: r#"http = { method = "POST", url = "http://127.0.0.1:9000/page" }"# },
    Key {
        name: "parameters",
        example: r#"parameters = { type = "object", properties = { path = { type = "string" } }, required = ["path"] }"#,
    },
    Key { name: "risk", example: r#"risk = "read_only""# },
    Key { name: "effect", example: r#"effect = "irreversible""# },
    Key { name: "timeout", example: r#"timeout = "30s""# },
    Key { name: "attempts", example: "attempts = 3" },
    Key { name: "undo", example: r#"undo = "restore_logs""# },
    Key { name: "verify", example: r#"verify = "logs_cleaned""# },
    Key { name: "lock", example: r#"lock = "disk""# },
    Key { name: "env", example: r#"env = ["AWS_PROFILE"]"# },
    Key { name: "returns", example: r#"returns = "patch""# },
    Key { name: "fatal", example: "fatal = true" },
    Key { name: "sandbox", example: r#"sandbox = { write = ["/var/log"], network = false }"# },
];

const SANDBOX_KEYS: &[Key] = &[
    Key { name: "write", example: r#"write = ["/var/log"]"# },
    Key { name: "network", example: "network = false" },
];

const RETURNS: [(&str, bool); 2] = [("result", false), ("patch", true)];

/// A tool as far as it could be read, and what it refers to.
pub(super) struct Declared {
    pub(super) name: Option<Name>,
    pub(super) undo: Option<Name>,
    pub(super) verify: Option<Name>,
    pub(super) placeholders: Vec<Found<Placeholder>>,
    pub(super) parameters: Value,
    pub(super) tool: Option<AgentTool>,
}

/// The rules by which a tool is called, of a `[[tool]]` or a tool of a server.
pub(super) struct Rules {
    pub(super) risk: Option<Risk>,
    pub(super) effect: Option<Effect>,
    pub(super) undo: Option<Name>,
    pub(super) verify: Option<Name>,
}

pub(super) fn read<'t>(report: &Report<'t>, at: Range<usize>, entries: &DeTable<'t>, folder: &Path) -> Declared {
    let table = Table::new(report, "[[tool]]", at, entries, TOOL_KEYS);
    for key in ["name", "description"] {
        if !table.has(key) {
            table.missing(key, "");
        }
    }
    let name = tool_name(&table);
    let description = text(&table, "description");
    let env = tool::env(&table);
    let mut placeholders = Vec::new();
    let action = tool::read(&table, "command", "http", folder, &env, |found| placeholders.push(found));
    if !table.has("command") && !table.has("http") {
        table.missing("command", " and no 'http'");
    }
    let action = confine(&table, action, folder);
    let declared = parameters(&table);
    let parameters = require(declared.clone().unwrap_or_else(schema::none), &placeholders);
    let rules = rules(&table);
    let risk = rules.risk.unwrap_or(Risk::ExternalAction);
    let effect = effect(&table, &rules, risk);
    let tool = match (&name, description, action, &declared) {
        (Some((name, _)), Some(description), Some(action), Some(_)) => {
            AgentTool::new(name.clone(), description, parameters.clone(), action).ok()
        }
        _ => None,
    };
    let (timeout, attempts) = (table.duration("timeout"), table.attempts("attempts"));
    let returns_patch = table.word("returns", &RETURNS).unwrap_or_default();
    let fatal = table.boolean("fatal").unwrap_or_default();
    let lock = text(&table, "lock");
    let tool = tool.map(|tool| AgentTool {
        risk,
        effect,
        timeout: timeout.unwrap_or(DEFAULT_TIMEOUT),
        attempts: attempts.unwrap_or(DEFAULT_ATTEMPTS),
        undo: rules.undo.as_ref().map(|(name, _)| name.clone()),
        verify: rules.verify.as_ref().map(|(name, _)| name.clone()),
        lock,
        returns_patch,
        fatal,
        ..tool
    });
    Declared { name, undo: rules.undo, verify: rules.verify, placeholders, parameters, tool }
}

fn tool_name(table: &Table<'_, '_>) -> Option<Name> {
    let found = table.string("name")?;
    if let Err(why) = check_name(found.value) {
        table.bad("name", found.at, format_args!("'{}' {why}", found.value.escape_debug()));
        return None;
    }
    Some((found.value.to_owned(), found.at))
}

/// The schema as it was declared; `None` when it is wrong.
fn parameters(table: &Table<'_, '_>) -> Option<Value> {
    if !table.has("parameters") {
        return Some(schema::none());
    }
    let Found { value, at } = table.json("parameters")?;
    if let Err(why) = schema::compile(&value) {
        table.bad("parameters", at, why);
        return None;
    }
    Some(value)
}

/// A call without what a placeholder stands for could not be made.
fn require(mut schema: Value, placeholders: &[Found<Placeholder>]) -> Value {
    for name in placeholders.iter().filter_map(|found| found.value.path().first()) {
        let Some(property) = schema["properties"].get(name) else { continue };
        if property.get("default").is_some() {
            continue;
        }
        let required = &mut schema["required"];
        match required {
            Value::Array(names) if names.iter().any(|known| known == name) => {}
            Value::Array(names) => names.push(json!(name)),
            other => *other = json!([name]),
        }
    }
    schema
}

pub(super) fn rules(table: &Table<'_, '_>) -> Rules {
    let name = |key: &str| table.string(key).map(|found| (found.value.to_owned(), found.at));
    Rules {
        risk: table.word("risk", &RISKS),
        effect: table.word("effect", &EFFECTS),
        undo: name("undo"),
        verify: name("verify"),
    }
}

/// The effect, which must go with `undo` and `verify`.
pub(super) fn effect(table: &Table<'_, '_>, rules: &Rules, risk: Risk) -> Effect {
    let undone = table.place("undo");
    let default = match default_effect(risk) {
        Effect::Irreversible if undone.is_some() => Effect::Compensable,
        usual => usual,
    };
    let effect = rules.effect.unwrap_or(default);
    let problem = |at, message: &str, remedy: &str| table.report.problem(at, message, remedy);
    match (effect, undone) {
        (Effect::Compensable, None) => problem(
            table.place("effect").unwrap_or(table.at.clone()),
            "a compensable tool needs 'undo', the tool that undoes it",
            "add undo = \"NAME\" and a [[tool]] of that name, or write effect = \"irreversible\"",
        ),
        (Effect::Irreversible, Some(at)) => problem(
            at,
            "an irreversible tool cannot have an undo",
            "write effect = \"compensable\", or remove the undo",
        ),
        (Effect::Read, Some(at)) => problem(
            at,
            "a tool that only reads has nothing to undo",
            "write effect = \"compensable\", or remove the undo",
        ),
        _ => {}
    }
    if !effect.needs_intent()
        && let Some(at) = table.place("verify")
    {
        problem(
            at,
            "'verify' is never asked here: a read or idempotent tool is simply tried again",
            "write effect = \"compensable\" or \"irreversible\", or remove it",
        );
    }
    effect
}

/// Puts a command into its sandbox, unless the manifest says that it has none.
fn confine(table: &Table<'_, '_>, action: Option<Tool>, folder: &Path) -> Option<Tool> {
    let confined = sandbox(table, folder);
    match action {
        Some(Tool::Command(command)) => {
            let sandbox = confined.unwrap_or_else(|| Some(Sandbox::default()));
            Some(Tool::Command(Command { sandbox, ..command }))
        }
        other => {
            if let Some(at) = table.place("sandbox")
                && table.has("http")
                && !table.has("command")
            {
                table.report.problem(
                    at,
                    "'sandbox' is for commands only",
                    "remove it; an http tool runs nothing here",
                );
            }
            other
        }
    }
}

/// What the manifest says about a sandbox: nothing, none, or what may be done in it.
pub(super) fn sandbox(table: &Table<'_, '_>, folder: &Path) -> Option<Option<Sandbox>> {
    let found = table.any("sandbox")?;
    match found.value {
        DeValue::Boolean(true) => Some(Some(Sandbox::default())),
        DeValue::Boolean(false) => Some(None),
        DeValue::Table(entries) => {
            let table = Table::new(table.report, "sandbox", found.at, entries, SANDBOX_KEYS);
            let write = table.strings("write").unwrap_or_default();
            let write = write.into_iter().filter_map(|found| writable(&table, &found, folder)).collect();
            Some(Some(Sandbox { write, network: table.boolean("network").unwrap_or(true) }))
        }
        _ => {
            table.bad("sandbox", found.at, "must be true, false or a table");
            None
        }
    }
}

fn writable(table: &Table<'_, '_>, found: &Found<&str>, folder: &Path) -> Option<PathBuf> {
    let path: PathBuf = folder.join(found.value).components().collect();
    if path.is_dir() {
        return Some(path);
    }
    table.report.problem(
        found.at.clone(),
        format!("the folder '{}' that the sandbox may write is not there", found.value.escape_debug()),
        format!("make {}, or correct the path; it is relative to the manifest's folder", path.display()),
    );
    None
}
