//! `[[mcp]]` of an agent.
//!
//! ```toml
//! [[mcp]]
//! name = "files"                        # its tools are called files__NAME
//! command = ["my-mcp-server"]           # or url = "https://…/mcp"
//! headers = { Authorization = "Bearer {{env.FILES_TOKEN}}" }   # with url only
//! env = ["FILES_TOKEN"]                 # what a command sees, and what headers may refer to
//! risk = "write_local"                  # for all its tools; default: external_action
//! effect = "idempotent"                 # for all its tools; default by the risk
//! timeout = "30s"                       # default, for one try of a tool
//! attempts = 3                          # default; tries in all
//! connect_timeout = "30s"               # default, until its tools are listed
//! sandbox = true                        # default: none, servers keep caches
//!
//! [mcp.tools.write_file]                # for one of its tools, by the server's name for it
//! risk = "external_action"
//! undo = "files__delete_file"
//! ```
//!
//! What a server says of its tools (read-only, idempotent, …) is a hint of a stranger: risk and effect come
//! from here alone.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use longhaul::{Effect, Risk};
use reqwest::header::HeaderName;
use toml::de::{DeTable, DeValue};

use super::super::problem::Report;
use super::super::saga::Name;
use super::super::table::{Found, Key, Table};
use super::super::tool;
use super::text;
use super::tools::{effect, rules, sandbox};
use crate::template::Template;
use crate::tool::{
    BadUrl, Command, DEFAULT_ATTEMPTS, DEFAULT_TIMEOUT, Http, MAX_NAME_BYTES, Tool, default_effect,
};

const MCP_KEYS: &[Key] = &[
    Key { name: "name", example: r#"name = "files""# },
    Key { name: "command", example: r#"command = ["my-mcp-server"]"# },
    Key { name: "url", example: r#"url = "http://127.0.0.1:9000/mcp""# },
    Key { name: "headers", example: r#"headers = { Authorization = "Bearer {{env.TOKEN}}" }"# },
    Key { name: "env", example: r#"env = ["TOKEN"]"# },
    Key { name: "risk", example: r#"risk = "write_local""# },
    Key { name: "effect", example: r#"effect = "irreversible""# },
    Key { name: "timeout", example: r#"timeout = "30s""# },
    Key { name: "attempts", example: "attempts = 3" },
    Key { name: "connect_timeout", example: r#"connect_timeout = "30s""# },
    Key { name: "sandbox", example: "sandbox = true" },
    Key { name: "tools", example: "[mcp.tools.NAME] on a line of its own" },
];

const OVERRIDE_KEYS: &[Key] = &[
    Key { name: "risk", example: r#"risk = "read_only""# },
    Key { name: "effect", example: r#"effect = "irreversible""# },
    Key { name: "timeout", example: r#"timeout = "30s""# },
    Key { name: "attempts", example: "attempts = 3" },
    Key { name: "undo", example: r#"undo = "files__delete""# },
    Key { name: "verify", example: r#"verify = "files__exists""# },
    Key { name: "lock", example: r#"lock = "disk""# },
    Key { name: "fatal", example: "fatal = true" },
];

/// A tool's name is `SERVER__TOOL`, and must leave room for the second part.
const MAX_SERVER_BYTES: usize = 32;

/// An MCP server whose tools an agent has.
#[derive(Clone, Debug)]
pub struct McpServer {
    /// Its tools are called `NAME__TOOL`.
    pub name: String,
    /// How it is reached.
    pub transport: McpTransport,
    /// How dangerous its tools are.
    pub risk: Risk,
    /// Whether its tools may be started again when their outcome is unknown.
    pub effect: Effect,
    /// How long one try of a tool may take.
    pub timeout: Duration,
    /// Tries of a tool in all.
    pub attempts: u32,
    /// How long it may take until its tools are listed.
    pub connect_timeout: Duration,
    /// What is different for single tools, by the server's name for them.
    pub tools: BTreeMap<String, Override>,
}

/// How an MCP server is reached.
#[derive(Clone, Debug)]
pub enum McpTransport {
    /// A child process that speaks on stdin and stdout.
    Stdio(Command),
    /// Streamable HTTP.
    Http {
        /// The endpoint.
        url: String,
        /// Sent with every request; may have `{{env.NAME}}`, which is why they are never shown.
        headers: Vec<(HeaderName, Template)>,
        /// What `{{env.NAME}}` may refer to.
        env: Vec<String>,
    },
}

/// What is different for one tool of a server.
#[derive(Clone, Debug)]
pub struct Override {
    /// How dangerous it is.
    pub risk: Risk,
    /// Whether it may be started again when its outcome is unknown.
    pub effect: Effect,
    /// How long one try may take.
    pub timeout: Duration,
    /// Tries in all.
    pub attempts: u32,
    /// The tool that undoes it.
    pub undo: Option<String>,
    /// The tool that says whether it happened.
    pub verify: Option<String>,
    /// The lock that is held while it runs.
    pub lock: Option<String>,
    /// Whether its failure is the task's.
    pub fatal: bool,
}

/// A server as far as it could be read, and the tools it refers to.
pub(super) struct Declared {
    pub(super) name: Option<Name>,
    pub(super) undos: Vec<Name>,
    pub(super) verifies: Vec<Name>,
    pub(super) server: Option<McpServer>,
}

pub(super) fn read<'t>(report: &Report<'t>, at: Range<usize>, entries: &DeTable<'t>, folder: &Path) -> Declared {
    let table = Table::new(report, "[[mcp]]", at, entries, MCP_KEYS);
    if !table.has("name") {
        table.missing("name", "");
    }
    let name = server_name(&table);
    let env = tool::env(&table);
    let transport = transport(&table, folder, &env);
    let rules = rules(&table);
    let risk = rules.risk.unwrap_or(Risk::ExternalAction);
    if rules.effect == Some(Effect::Compensable)
        && let Some(at) = table.place("effect")
    {
        report.problem(
            at,
            "the tools of a server cannot all be compensable: each needs an 'undo' of its own",
            "write it in [mcp.tools.NAME] for the tools that can be undone",
        );
    }
    let server = McpServer {
        name: name.as_ref().map(|(name, _)| name.clone()).unwrap_or_default(),
        transport: transport.unwrap_or(McpTransport::Http { url: String::new(), headers: Vec::new(), env }),
        risk,
        effect: rules.effect.unwrap_or(default_effect(risk)),
        timeout: table.duration("timeout").unwrap_or(DEFAULT_TIMEOUT),
        attempts: table.attempts("attempts").unwrap_or(DEFAULT_ATTEMPTS),
        connect_timeout: table.duration("connect_timeout").unwrap_or(DEFAULT_TIMEOUT),
        tools: BTreeMap::new(),
    };
    let mut declared = Declared { name, undos: Vec::new(), verifies: Vec::new(), server: None };
    let tools = overrides(&table, &server, &mut declared);
    declared.server = report.is_clean().then_some(McpServer { tools, ..server });
    declared
}

fn server_name(table: &Table<'_, '_>) -> Option<Name> {
    let found = table.string("name")?;
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if found.value.is_empty() || found.value.len() > MAX_SERVER_BYTES || !found.value.chars().all(fits) {
        table.bad(
            "name",
            found.at,
            format_args!(
                "must have 1 to {MAX_SERVER_BYTES} characters, of a-z, A-Z, 0-9, _ and -: it is the first part of \
                 its tools' names, which have at most {MAX_NAME_BYTES}"
            ),
        );
        return None;
    }
    Some((found.value.to_owned(), found.at))
}

fn transport(table: &Table<'_, '_>, folder: &Path, env: &[String]) -> Option<McpTransport> {
    if !table.has("command") && !table.has("url") {
        table.missing("command", " and no 'url'");
    }
    if table.has("command")
        && let Some(at) = table.place("url")
    {
        table.report.problem(
            at,
            "there are both 'command' and 'url'",
            "keep one of the two; a server is reached in one way",
        );
    }
    let (wrong, right) = if table.has("command") { ("headers", "url") } else { ("sandbox", "command") };
    if let Some(at) = table.place(wrong)
        && !table.has(right)
    {
        table.report.problem(
            at,
            format!("'{wrong}' goes with '{right}' only"),
            format!("remove it, or write {right}"),
        );
    }
    let mut fixed = |found: Found<crate::template::Placeholder>| {
        table.report.problem(
            found.at,
            format!("{} refers to nothing: a server is started before anything is asked of it", found.value),
            "write the value itself; secrets come from the environment: list them in env",
        );
    };
    if table.has("command") {
        let found = tool::read(table, "command", "http", folder, env, &mut fixed)?;
        let Tool::Command(command) = found else { return None };
        return Some(McpTransport::Stdio(Command { sandbox: sandbox(table, folder).flatten(), ..command }));
    }
    let headers = tool::headers(table, env, &mut fixed);
    let found = table.string("url")?;
    let url = tool::template(table, &found, &mut fixed)?;
    if let Err(BadUrl(why)) = Http::probe_url(&url) {
        table.bad("url", found.at, why);
        return None;
    }
    Some(McpTransport::Http { url: found.value.to_owned(), headers: headers?, env: env.to_vec() })
}

fn overrides(table: &Table<'_, '_>, server: &McpServer, declared: &mut Declared) -> BTreeMap<String, Override> {
    let mut tools = BTreeMap::new();
    let Some(found) = table.table("tools") else { return tools };
    for (key, value) in found.value.iter() {
        let DeValue::Table(entries) = value.get_ref() else {
            table.bad(
                "tools",
                value.span(),
                format_args!("must have tables only; '{}' is not one", key.get_ref().escape_debug()),
            );
            continue;
        };
        let table = Table::new(table.report, "[mcp.tools.NAME]", key.span(), entries, OVERRIDE_KEYS);
        let rules = rules(&table);
        // A risk of its own brings the effect that is usual for it.
        let inherited =
            if rules.risk.is_some() { None } else { Some(server.effect).filter(|_| rules.undo.is_none()) };
        let risk = rules.risk.unwrap_or(server.risk);
        let rules = super::tools::Rules { effect: rules.effect.or(inherited), ..rules };
        let effect = effect(&table, &rules, risk);
        let over = Override {
            risk,
            effect,
            timeout: table.duration("timeout").unwrap_or(server.timeout),
            attempts: table.attempts("attempts").unwrap_or(server.attempts),
            undo: rules.undo.as_ref().map(|(name, _)| name.clone()),
            verify: rules.verify.as_ref().map(|(name, _)| name.clone()),
            lock: text(&table, "lock"),
            fatal: table.boolean("fatal").unwrap_or_default(),
        };
        declared.undos.extend(rules.undo);
        declared.verifies.extend(rules.verify);
        tools.insert(key.get_ref().to_string(), over);
    }
    tools
}
