//! Saga manifests: steps in order, each a command or an HTTP call, undone in reverse when one of
//! them fails.
//!
//! ```toml
//! [saga]
//! name = "deploy_app"                   # the handler name; its input is JSON
//! timeout = "24h"                       # default; everything counts
//! description = "Puts an app online"    # optional, for people
//!
//! [[step]]
//! name = "create_dns"                   # letters, digits, _ and -
//! command = ["./dns", "create", "{{input.app}}.example.com"]
//! undo    = ["./dns", "delete", "{{input.app}}.example.com"]   # stdin: {"input", "result", "steps"}
//! attempts = 3                          # default; tries in all; undo_attempts for the undo
//! timeout = "30s"                       # default, for one try; undo_timeout for the undo
//! effect = "idempotent"                 # default; read | idempotent | compensable | irreversible
//! verify = ["./dns", "exists", "{{input.app}}.example.com"]   # compensable and irreversible only:
//!                                       # says {"done": true, "result": …} or {"done": false}
//! env = ["DNS_TOKEN"]                   # what it sees besides PATH, HOME, LANG
//!
//! [[step]]
//! name = "go_live"
//! approve = "Put {{input.app}} live?"   # waits for a person before the step
//! risk = "external_action"              # default; read_only | write_local | external_action
//! approval_timeout = "24h"              # until when the person may answer
//! http = { method = "POST", url = "http://127.0.0.1:9000/live" }
//! undo_http = { method = "DELETE", url = "http://127.0.0.1:9000/live" }
//! ```
//!
//! Steps that follow each other and have the same `group = "name"` run at the same time; the next
//! step waits for all of them. When one of them fails, those that have begun are waited for, those
//! that still wait for an approval are not begun. Approvals of a group are asked for at
//! the same time.
//!
//! Placeholders: `{{input…}}`, `{{steps.NAME.result…}}` of a step before, and in an undo also
//! `{{result…}}`, its own step's result. An `http` table may have `headers` (there also
//! `{{env.NAME}}`, for names listed in `env`) and a `body`; without one the body is the same JSON
//! that a command has on stdin, and GET and HEAD have none.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use longhaul::{Effect, Risk};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::names::{Names, Place};
use super::problem::Report;
use super::table::{Key, Table};
use super::tool;
use crate::template::Template;
use crate::tool::Tool;

/// Names are keys in the store and parts of URLs and placeholders.
const MAX_NAME_BYTES: usize = 128;
const DEFAULT_SAGA_TIMEOUT: Duration = Duration::from_secs(86_400);
const DEFAULT_STEP_TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_ATTEMPTS: u32 = 3;

const SAGA_KEYS: &[Key] = &[
    Key { name: "name", example: r#"name = "deploy_app""# },
    Key { name: "timeout", example: r#"timeout = "24h""# },
    Key { name: "description", example: r#"description = "Puts an app online""# },
];

const STEP_KEYS: &[Key] = &[
    Key { name: "name", example: r#"name = "create_dns""# },
    Key { name: "command", example: r#"command = ["./dns", "create", "{{input.app}}"]"# },
    Key { name: "http", example: r#"http = { method = "POST", url = "http://127.0.0.1:9000/live" }"# },
    Key { name: "undo", example: r#"undo = ["./dns", "delete", "{{input.app}}"]"# },
    Key { name: "undo_http", example: r#"undo_http = { method = "DELETE", url = "http://127.0.0.1:9000/live" }"# },
    Key { name: "verify", example: r#"verify = ["./dns", "exists", "{{input.app}}"]"# },
    Key {
        name: "verify_http",
        example: r#"verify_http = { method = "GET", url = "http://127.0.0.1:9000/live" }"#,
    },
    Key { name: "attempts", example: "attempts = 3" },
    Key { name: "timeout", example: r#"timeout = "30s""# },
    Key { name: "undo_attempts", example: "undo_attempts = 3" },
    Key { name: "undo_timeout", example: r#"undo_timeout = "30s""# },
    Key { name: "effect", example: r#"effect = "idempotent""# },
    Key { name: "approve", example: r#"approve = "Put {{input.app}} live?""# },
    Key { name: "risk", example: r#"risk = "external_action""# },
    Key { name: "approval_timeout", example: r#"approval_timeout = "24h""# },
    Key { name: "env", example: r#"env = ["AWS_PROFILE"]"# },
    Key { name: "group", example: r#"group = "machines""# },
];

pub(super) const EFFECTS: [(&str, Effect); 4] = [
    ("read", Effect::Read),
    ("idempotent", Effect::Idempotent),
    ("compensable", Effect::Compensable),
    ("irreversible", Effect::Irreversible),
];

pub(super) const RISKS: [(&str, Risk); 3] =
    [("read_only", Risk::ReadOnly), ("write_local", Risk::WriteLocal), ("external_action", Risk::ExternalAction)];

/// A saga as it was declared.
#[derive(Clone, Debug)]
pub struct Saga {
    /// The handler's name.
    pub name: String,
    /// For people.
    pub description: Option<String>,
    /// How long a task of it may take, everything counted.
    pub timeout: Duration,
    /// Its steps, in order.
    pub steps: Vec<Step>,
    /// Where it was read from.
    pub file: PathBuf,
}

/// One step of a saga.
#[derive(Clone, Debug)]
pub struct Step {
    /// Unique in its saga.
    pub name: String,
    /// What it does.
    pub action: Tool,
    /// How that is undone.
    pub undo: Option<Tool>,
    /// How to find out whether it happened, when that is in doubt.
    pub verify: Option<Tool>,
    /// Tries in all.
    pub attempts: u32,
    /// How long one try may take.
    pub timeout: Duration,
    /// Tries of the undo in all.
    pub undo_attempts: u32,
    /// How long one try of the undo may take.
    pub undo_timeout: Duration,
    /// Whether it may be started again when its outcome is unknown.
    pub effect: Effect,
    /// What a person must allow first.
    pub approve: Option<Approve>,
    /// Runs at the same time as its neighbours of the same group.
    pub group: Option<String>,
}

/// A question to a person before a step.
#[derive(Clone, Debug)]
pub struct Approve {
    /// What is asked.
    pub text: Template,
    /// How dangerous it is.
    pub risk: Risk,
    /// How long the answer may take.
    pub expires: Option<Duration>,
}

impl Saga {
    /// The steps by what runs at the same time: most stages have one step.
    pub fn stages(&self) -> impl Iterator<Item = &[Step]> {
        self.steps.chunk_by(|one, next| one.group.is_some() && one.group == next.group)
    }
}

/// A key of a document and its value.
pub(super) type Entry<'r, 't> = (&'r Spanned<DeString<'t>>, &'r Spanned<DeValue<'t>>);
/// A name and where it stands.
pub(super) type Name = (String, Range<usize>);

/// Reads a saga; its name also when the rest is wrong.
pub(super) fn read<'t>(
    report: &Report<'t>,
    at: Range<usize>,
    head: &DeTable<'t>,
    steps: Option<Entry<'_, 't>>,
) -> (Option<Name>, Option<Saga>) {
    let folder = folder(report.file());
    let head = Table::new(report, "[saga]", at.clone(), head, SAGA_KEYS);
    let name = handler_name(&head);
    let timeout = head.duration("timeout").unwrap_or(DEFAULT_SAGA_TIMEOUT);
    let description = head.string("description").map(|found| found.value.to_owned());
    let mut names = Names::default();
    let mut read = Vec::new();
    match steps.map(|(key, value)| (key, value.get_ref())) {
        None => report.problem(at, "the saga has no steps", "add [[step]] with a name and a command or http"),
        Some((_, DeValue::Array(tables))) => {
            for table in tables.iter() {
                if let DeValue::Table(entries) = table.get_ref() {
                    let table = Table::new(report, "[[step]]", table.span(), entries, STEP_KEYS);
                    read.push(step(&table, &folder, &mut names));
                } else {
                    report.problem(table.span(), "a step must be a table", "write [[step]] before each step");
                }
            }
        }
        Some((key, _)) => {
            report.problem(key.span(), "'step' must be a list of tables", "write [[step]] with two brackets");
        }
    }
    names.check(report);
    let complete: Option<Vec<Step>> = read.into_iter().collect();
    let saga = name.clone().zip(complete).map(|((name, _), steps)| {
        let file = report.file().to_owned();
        Saga { name, description, timeout, steps, file }
    });
    (name, saga)
}

fn step(table: &Table<'_, '_>, folder: &Path, names: &mut Names) -> Option<Step> {
    let report = table.report;
    let env = tool::env(table);
    let name = step_name(table, "name");
    if !table.has("name") {
        table.missing("name", "");
    }
    let group = step_name(table, "group");
    names.begin(table.at.clone(), name.clone(), group.clone());

    let action = tool::read(table, "command", "http", folder, &env, |name| names.refer(Place::Forward, name));
    if !table.has("command") && !table.has("http") {
        table.missing("command", " and no 'http'");
    }
    let undo = tool::read(table, "undo", "undo_http", folder, &env, |name| names.refer(Place::Undo, name));
    let verify =
        tool::read(table, "verify", "verify_http", folder, &env, |name| names.refer(Place::Forward, name));
    let effect = table.word("effect", &EFFECTS).unwrap_or_default();
    if effect == Effect::Irreversible
        && let Some(at) = table.place("undo").or_else(|| table.place("undo_http"))
    {
        report.problem(
            at,
            "an irreversible step cannot have an undo",
            "write effect = \"compensable\", or remove the undo",
        );
    }
    if !effect.needs_intent()
        && let Some(at) = table.place("verify").or_else(|| table.place("verify_http"))
    {
        report.problem(
            at,
            "'verify' is never asked here: a read or idempotent step is simply tried again",
            "write effect = \"compensable\" or \"irreversible\", or remove it",
        );
    }
    let approve = approve(table, names);
    let attempts = table.attempts("attempts").unwrap_or(DEFAULT_ATTEMPTS);
    let timeout = table.duration("timeout").unwrap_or(DEFAULT_STEP_TIMEOUT);
    Some(Step {
        name: name?.0,
        action: action?,
        undo,
        verify,
        attempts,
        timeout,
        undo_attempts: table.attempts("undo_attempts").unwrap_or(attempts),
        undo_timeout: table.duration("undo_timeout").unwrap_or(timeout),
        effect,
        approve,
        group: group.map(|(group, _)| group),
    })
}

fn approve(table: &Table<'_, '_>, names: &mut Names) -> Option<Approve> {
    let risk = table.word("risk", &RISKS).unwrap_or(Risk::ExternalAction);
    let expires = table.duration("approval_timeout");
    if !table.has("approve") {
        for key in ["risk", "approval_timeout"] {
            if let Some(at) = table.place(key) {
                table.report.problem(
                    at,
                    format!("'{key}' does nothing without 'approve'"),
                    "say what is to be approved, like approve = \"Put {{input.app}} live?\", or remove it",
                );
            }
        }
        return None;
    }
    let found = table.string("approve")?;
    if found.value.trim().is_empty() {
        table.bad("approve", found.at, "is empty; it is the question a person is asked");
        return None;
    }
    let text = tool::template(table, &found, &mut |name| names.refer(Place::Forward, name))?;
    Some(Approve { text, risk, expires })
}

/// A handler's name, by the rules for every handler.
pub(super) fn handler_name(head: &Table<'_, '_>) -> Option<Name> {
    if !head.has("name") {
        head.missing("name", "");
    }
    let found = head.string("name")?;
    let shown = found.value.escape_debug();
    if found.value.is_empty() || found.value.len() > MAX_NAME_BYTES {
        head.bad("name", found.at, format_args!("must have 1 to {MAX_NAME_BYTES} bytes"));
    } else if found.value.chars().any(|c| c.is_control() || c.is_whitespace() || c == '/') {
        head.bad("name", found.at, format_args!("must have no spaces, slashes or control characters: '{shown}'"));
    } else {
        return Some((found.value.to_owned(), found.at));
    }
    None
}

/// A step's or group's name: something that can stand in a placeholder.
fn step_name(table: &Table<'_, '_>, key: &str) -> Option<Name> {
    let found = table.string(key)?;
    let shown = found.value.escape_debug();
    if found.value.is_empty() || found.value.len() > MAX_NAME_BYTES {
        table.bad(key, found.at, format_args!("must have 1 to {MAX_NAME_BYTES} bytes"));
    } else if !found.value.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-') {
        table.bad(key, found.at, format_args!("may have letters, digits, _ and - only: '{shown}'"));
    } else {
        return Some((found.value.to_owned(), found.at));
    }
    None
}

/// Where the commands of a manifest run: its folder, wherever the worker is started.
pub(super) fn folder(file: &Path) -> PathBuf {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())
}
