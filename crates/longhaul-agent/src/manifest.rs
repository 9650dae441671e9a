//! Manifests: handlers declared in the TOML files of one folder.
//!
//! [`load`] reads every `*.toml` of a folder (not of folders in it, not hidden files, and not
//! `longhaul.toml`, which is the configuration) and gives what could be read together with *all*
//! that is wrong, each with file, line and remedy. A manifest with a problem is not given.
//!
//! [`saga`] and [`agent`] say what a manifest may have and read it, `tool.rs` reads commands and HTTP calls,
//! `names.rs` checks what placeholders refer to, `table.rs` takes typed values out of a table.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

pub mod agent;
mod names;
mod problem;
pub mod saga;
mod table;
mod tool;

pub use agent::Agent;
pub use problem::{Problem, Report};
pub use saga::{Approve, Saga, Step};
pub use table::{json, nearest};

/// A manifest larger than this is a mistake.
const MAX_FILE_BYTES: u64 = 1024 * 1024;
/// The configuration's name, which may lie in the same folder.
const CONFIGURATION: &str = "longhaul.toml";
/// The tables a manifest can have.
const TABLES: [&str; 5] = ["agent", "mcp", "saga", "step", "tool"];

/// What a folder of manifests has.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// What could be read without a problem, by file name.
    pub manifests: Vec<Manifest>,
    /// All that is wrong, by file and line.
    pub problems: Vec<Problem>,
}

impl Loaded {
    /// What may be wrong, and may be right with what other workers have.
    pub fn warnings(&self) -> Vec<Problem> {
        let mut warnings = Vec::new();
        for manifest in &self.manifests {
            let Manifest::Agent(agent) = manifest else { continue };
            for delegate in &agent.delegates {
                if !self.manifests.iter().any(|known| known.name() == delegate) {
                    warnings.push(Problem::of_file(
                        manifest.file(),
                        format!("{} may delegate to '{delegate}', which no manifest here declares", agent.name),
                        "declare it, or see to it that another worker has it",
                    ));
                }
            }
        }
        warnings
    }
}

/// A handler that was declared.
#[derive(Clone, Debug)]
pub enum Manifest {
    /// A model with tools that works towards a goal.
    Agent(Box<Agent>),
    /// Steps that are undone when one of them fails.
    Saga(Saga),
}

impl Manifest {
    /// The handler's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Agent(agent) => &agent.name,
            Self::Saga(saga) => &saga.name,
        }
    }

    /// `agent` or `saga`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Agent(_) => "agent",
            Self::Saga(_) => "saga",
        }
    }

    /// Where it was read from.
    pub fn file(&self) -> &Path {
        match self {
            Self::Agent(agent) => &agent.file,
            Self::Saga(saga) => &saga.file,
        }
    }
}

/// Reads all manifests of a folder.
pub fn load(folder: &Path) -> Loaded {
    let mut loaded = Loaded::default();
    let files = match files(folder) {
        Ok(files) => files,
        Err(problem) => {
            loaded.problems.push(*problem);
            return loaded;
        }
    };
    // Handler names and where each was first declared.
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    for file in files {
        let text = match text(&file) {
            Ok(text) => text,
            Err(problem) => {
                loaded.problems.push(*problem);
                continue;
            }
        };
        let report = Report::new(&file, &text);
        let manifest = read(&report);
        if let Some((name, at)) = manifest.name {
            let here = report.place(&at);
            if let Some(first) = known.get(&name) {
                report.problem(
                    at,
                    format!("the handler '{name}' is declared twice: here and in {first}"),
                    "give one of them another name",
                );
            } else {
                known.insert(name, here);
            }
        }
        let problems = report.into_problems();
        if problems.is_empty() {
            loaded.manifests.extend(manifest.manifest);
        }
        loaded.problems.extend(problems);
    }
    loaded
}

/// What one file gave: its handler's name also when the rest of it is wrong.
#[derive(Default)]
struct Outcome {
    name: Option<(String, std::ops::Range<usize>)>,
    manifest: Option<Manifest>,
}

fn read(report: &Report<'_>) -> Outcome {
    let (document, errors) = DeTable::parse_recoverable(report.text());
    if !errors.is_empty() {
        // What the rest means is a guess then; one problem for each line is enough.
        let mut lines = Vec::new();
        for error in errors {
            let at = error.span().unwrap_or(0..0);
            let line = report.line(at.start);
            if !lines.contains(&line) {
                lines.push(line);
                report.problem(at, format!("this is not TOML: {}", one_line(error.message())), syntax_remedy());
            }
        }
        return Outcome::default();
    }
    let document = document.into_inner();
    for (key, _) in document.iter().filter(|(key, _)| !TABLES.contains(&key.get_ref().as_ref())) {
        let name = key.get_ref();
        report.problem(
            key.span(),
            format!("unknown table or key '{}'", name.escape_debug()),
            nearest(name, TABLES).map_or_else(
                || "an agent has [agent], [[tool]] and [[mcp]]; a saga has [saga] and [[step]]".to_owned(),
                |near| format!("did you mean '{near}'?"),
            ),
        );
    }
    let find = |name: &str| document.iter().find(|(key, _)| key.get_ref() == name);
    if let Some((key, value)) = find("agent") {
        for (key, _) in find("saga").into_iter().chain(find("step")) {
            report.problem(
                key.span(),
                format!("'{}' belongs to a saga, not to an agent", key.get_ref()),
                "a file declares one of the two; move it to a file of its own",
            );
        }
        let DeValue::Table(head) = value.get_ref() else {
            report.problem(key.span(), "'agent' must be a table", "write [agent] on a line of its own");
            return Outcome::default();
        };
        let (name, agent) = agent::read(report, key.span(), head, find("tool"), find("mcp"));
        return Outcome { name, manifest: agent.map(Box::new).map(Manifest::Agent) };
    }
    if let Some((key, _)) = find("tool").or_else(|| find("mcp")) {
        report.problem(
            key.span(),
            format!("[[{}]] belongs to an agent, and there is no [agent]", key.get_ref()),
            "begin the file with [agent]; a saga has [[step]]s instead",
        );
    }
    let Some((key, value)) = find("saga") else {
        report.problem(
            0..0,
            "no [agent] and no [saga] table, so there is nothing to run",
            "begin the file with [agent] or [saga] and name = \"…\", or move it out of this folder",
        );
        return Outcome::default();
    };
    let DeValue::Table(head) = value.get_ref() else {
        report.problem(key.span(), "'saga' must be a table", "write [saga] on a line of its own");
        return Outcome::default();
    };
    let (name, saga) = saga::read(report, key.span(), head, find("step"));
    Outcome { name, manifest: saga.map(Manifest::Saga) }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn syntax_remedy() -> &'static str {
    "see https://toml.io for how TOML is written; strings need quotes, lists square brackets"
}

/// The manifests of a folder, by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Box<Problem>> {
    let unreadable = |error: std::io::Error| {
        Box::new(Problem::of_file(
            folder,
            format!("cannot read the folder: {error}"),
            "give the folder that has the manifests (*.toml)",
        ))
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        let hidden = name.as_encoded_bytes().starts_with(b".");
        let path = folder.join(&name);
        if path.extension() == Some(OsStr::new("toml")) && !hidden && name != CONFIGURATION {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(Box::new(Problem::of_file(
            folder,
            "no manifests (*.toml) in this folder",
            "write one: an agent has [agent] with name and model, and [[tool]]s; a saga has [saga] and [[step]]s",
        )));
    }
    Ok(files)
}

fn text(file: &Path) -> Result<String, Box<Problem>> {
    let problem = |message: String, remedy: &str| Err(Box::new(Problem::of_file(file, message, remedy)));
    match std::fs::metadata(file) {
        Ok(meta) if !meta.is_file() => {
            return problem("is not a file".to_owned(), "only files can end in .toml here; rename it");
        }
        Ok(meta) if meta.len() > MAX_FILE_BYTES => {
            return problem(
                format!("has {} bytes; at most {MAX_FILE_BYTES} are read", meta.len()),
                "a manifest only declares; move data into files of its own",
            );
        }
        _ => {}
    }
    let bytes = match std::fs::read(file) {
        Ok(bytes) => bytes,
        Err(error) => {
            return problem(format!("cannot be read: {error}"), "make it readable for the worker's user");
        }
    };
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let line = error.as_bytes()[..good].iter().filter(|&&byte| byte == b'\n').count() + 1;
        let problem = Problem::of_file(file, "is not UTF-8 text", "save it with the encoding UTF-8");
        Box::new(Problem { line: Some(line), ..problem })
    })
}
