//! Where values come from: flags, the environment, files, defaults, in this order.
//!
//! [`Sources::get`] is asked once for every value there is. So it knows what is configured and from
//! where, and afterwards what stands in a file that nobody asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use longhaul_agent::manifest::{Problem, Report, json, nearest};
use serde::Serialize;
use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::value::Setting;

/// Configuration has no data in it; a larger file is a mistake.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Tables of tables, whose names are free: `[queue.NAME]`.
const NAMED: [&str; 3] = ["queue", "limit", "tenant"];

/// Something in the configuration that must be mended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Fault {
    /// `longhaul.toml:3`, `LONGHAUL_STORE`, `--store`.
    pub(crate) place: String,
    pub(crate) message: String,
    pub(crate) remedy: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n    {}", self.place, self.message, self.remedy)
    }
}

impl From<Problem> for Fault {
    fn from(problem: Problem) -> Self {
        let file = problem.file.display();
        let place = problem.line.map_or_else(|| file.to_string(), |line| format!("{file}:{line}"));
        Self { place, message: problem.message, remedy: problem.remedy }
    }
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub(crate) enum Origin {
    Default,
    File { path: PathBuf, line: usize },
    Environment { name: String },
    Flag { name: String },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment { name } | Self::Flag { name } => f.write_str(name),
        }
    }
}

/// A value that is in force, as it may be shown to anyone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) origin: Origin,
}

/// Values given on the command line, by key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags(BTreeMap<&'static str, (&'static str, String)>);

impl Flags {
    /// `--store` says what `store.url` is, if it was given.
    pub(crate) fn set(mut self, flag: &'static str, key: &'static str, value: Option<&str>) -> Self {
        if let Some(value) = value {
            self.0.insert(key, (flag, value.to_owned()));
        }
        self
    }
}

/// The variables of the environment; a parameter, so that tests need not change the process's own.
pub(crate) type Environment<'e> = &'e dyn Fn(&str) -> Option<OsString>;

/// See the module.
pub(super) struct Sources<'e> {
    flags: Flags,
    environment: Environment<'e>,
    files: Vec<File>,
    /// Keys that were asked for; `*` stands for a free name.
    asked: BTreeSet<String>,
    pub(super) rows: Vec<Row>,
    pub(super) faults: Vec<Fault>,
    /// The variables that mean something.
    pub(super) variables: BTreeSet<String>,
}

struct File {
    path: PathBuf,
    text: String,
    entries: Vec<Entry>,
}

struct Entry {
    path: Vec<String>,
    at: Range<usize>,
    value: Value,
}

impl<'e> Sources<'e> {
    pub(super) fn new(flags: Flags, environment: Environment<'e>) -> Self {
        Self {
            flags,
            environment,
            files: Vec::new(),
            asked: BTreeSet::new(),
            rows: Vec::new(),
            faults: Vec::new(),
            variables: BTreeSet::new(),
        }
    }

    /// A file to look into after those read before. One that is not there is an error only when
    /// someone named it. Says whether there is one.
    pub(super) fn read(&mut self, path: &Path, named: bool) -> bool {
        let text = match text(path) {
            Ok(Some(text)) => text,
            Ok(None) if !named => return false,
            Ok(None) => {
                let fault = Problem::of_file(path, "there is no such file", "write one: longhaul config > FILE");
                self.faults.push(fault.into());
                return false;
            }
            Err(fault) => {
                self.faults.push(fault);
                return true;
            }
        };
        let report = Report::new(path, &text);
        let entries = entries(&report);
        self.faults.extend(report.into_problems().into_iter().map(Fault::from));
        self.files.push(File { path: path.to_owned(), text, entries });
        true
    }

    /// The names below a table of tables: the queues of `[queue.NAME]`.
    pub(super) fn names(&self, table: &str) -> BTreeSet<String> {
        let entries = self.files.iter().flat_map(|file| &file.entries);
        entries
            .filter(|entry| entry.path.len() == 3 && entry.path[0] == table)
            .map(|e| e.path[1].clone())
            .collect()
    }

    /// The value of a key, from the first place that has one. A value that cannot be read is a fault, and
    /// the default is used meanwhile, so that all faults are found at once.
    pub(super) fn get<T: Setting>(&mut self, path: &[&str], variables: &[&'static str], default: T) -> T {
        let (value, origin) = self.find(path, variables).unwrap_or((default, Origin::Default));
        self.rows.push(Row { key: key(path), value: value.show(), origin });
        value
    }

    /// Keys there may be in a table of tables, also when no file has one.
    pub(super) fn know(&mut self, keys: &[&str]) {
        self.asked.extend(keys.iter().map(|&key| key.to_owned()));
    }

    /// Where the value came from that was asked for last.
    pub(super) fn origin(&self) -> &Origin {
        self.rows.last().map_or(&Origin::Default, |row| &row.origin)
    }

    /// The value that was asked for last is not acceptable.
    pub(super) fn refuse(&mut self, message: impl Into<String>, remedy: impl Into<String>) {
        if let Some(row) = self.rows.last() {
            let message = format!("'{}' {}", row.key, message.into());
            self.faults.push(Fault { place: row.origin.to_string(), message, remedy: remedy.into() });
        }
    }

    fn find<T: Setting>(&mut self, path: &[&str], variables: &[&'static str]) -> Option<(T, Origin)> {
        let key = key(path);
        let mut pattern: Vec<&str> = path.to_vec();
        if pattern.len() == 3 && NAMED.contains(&pattern[0]) {
            pattern[1] = "*";
        }
        self.asked.insert(pattern.join("."));
        if let Some((flag, text)) = self.flags.0.remove(key.as_str()) {
            return self.judge(flag, T::from_text(&text), Origin::Flag { name: flag.to_owned() });
        }
        for &name in variables {
            self.variables.insert(name.to_owned());
            if T::SECRET {
                self.variables.insert(format!("{name}_FILE"));
            }
        }
        for &name in variables {
            match variable(self.environment, name, T::SECRET) {
                Ok(None) => {}
                Ok(Some((name, text))) => {
                    return self.judge(&name, T::from_text(&text), Origin::Environment { name: name.clone() });
                }
                Err(fault) => {
                    self.faults.push(fault);
                    return None;
                }
            }
        }
        let found = self.files.iter().find_map(|file| {
            let entry = file.entries.iter().find(|entry| entry.path.iter().eq(path.iter()))?;
            let line = Report::new(&file.path, &file.text).line(entry.at.start);
            Some((T::from_json(&entry.value), Origin::File { path: file.path.clone(), line }))
        });
        let (value, origin) = found?;
        self.judge(&origin.to_string(), value.map_err(|why| format!("'{key}' {why}")), origin)
    }

    fn judge<T: Setting>(&mut self, place: &str, value: Result<T, String>, origin: Origin) -> Option<(T, Origin)> {
        match value {
            Ok(value) => Some((value, origin)),
            Err(message) => {
                self.faults.push(Fault { place: place.to_owned(), message, remedy: T::HELP.to_owned() });
                None
            }
        }
    }

    /// Reports what files have that was not asked for; call it when everything was.
    pub(super) fn finish(&mut self) {
        let tables: BTreeSet<&str> = self.asked.iter().filter_map(|key| key.split('.').next()).collect();
        for file in &self.files {
            let report = Report::new(&file.path, &file.text);
            for entry in &file.entries {
                self.unknown(&report, entry, &tables);
            }
            self.faults.extend(report.into_problems().into_iter().map(Fault::from));
        }
    }

    fn unknown(&self, report: &Report<'_>, entry: &Entry, tables: &BTreeSet<&str>) {
        let mut pattern: Vec<&str> = entry.path.iter().map(String::as_str).collect();
        let named = NAMED.contains(&pattern[0]);
        if pattern.len() == 3 && named {
            pattern[1] = "*";
        }
        if self.asked.contains(&pattern.join(".")) {
            return;
        }
        let table = pattern[0];
        if pattern.len() == 1 || !tables.contains(table) {
            let (what, remedy) = match nearest(table, tables.iter().copied()) {
                Some(near) if near == table => {
                    let form = if named { format!("[{near}.NAME]") } else { format!("[{near}]") };
                    (format!("'{table}' must be a table"), format!("write {form} on a line of its own"))
                }
                Some(near) => (unknown_table(table), format!("did you mean [{near}]?")),
                None => (unknown_table(table), format!("there are {}", list(tables.iter().copied()))),
            };
            report.problem(entry.at.clone(), what, remedy);
            return;
        }
        if named && pattern.len() == 2 {
            let what = format!("'{}' in [{table}] must be a table", pattern[1].escape_debug());
            let remedy = format!("the name comes first: [{table}.NAME], then its keys on lines of their own");
            report.problem(entry.at.clone(), what, remedy);
            return;
        }
        let (head, name) = (pattern[..pattern.len() - 1].join("."), pattern[pattern.len() - 1]);
        let siblings: Vec<&str> = self
            .asked
            .iter()
            .filter_map(|key| key.rsplit_once('.'))
            .filter(|k| k.0 == head)
            .map(|k| k.1)
            .collect();
        let shown = head.replace('*', "NAME");
        let remedy = match nearest(name, siblings.iter().copied()) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("[{shown}] may have {}", list(siblings.iter().copied())),
        };
        report.problem(entry.at.clone(), format!("unknown key '{}' in [{shown}]", name.escape_debug()), remedy);
    }
}

fn unknown_table(name: &str) -> String {
    format!("unknown table '{}'", name.escape_debug())
}

fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

fn key(path: &[&str]) -> String {
    path.join(".")
}

/// A variable of the environment that is set and not empty; a secret may also be in the file that
/// `NAME_FILE` names.
pub(crate) fn variable(
    environment: Environment<'_>,
    name: &str,
    secret: bool,
) -> Result<Option<(String, String)>, Fault> {
    let set = |name: &str| environment(name).filter(|value| !value.is_empty());
    if let Some(value) = set(name) {
        let text = value.into_string().map_err(|_| Fault {
            place: name.to_owned(),
            message: "is not UTF-8 text".to_owned(),
            remedy: "set it to text".to_owned(),
        })?;
        return Ok(Some((name.to_owned(), text)));
    }
    let from_file = format!("{name}_FILE");
    let Some(path) = secret.then(|| set(&from_file)).flatten() else { return Ok(None) };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some((from_file, text.trim_end_matches(['\n', '\r']).to_owned()))),
        Err(error) => Err(Fault {
            place: from_file,
            message: format!("{} cannot be read: {error}", Path::new(&path).display()),
            remedy: "name a file that has the secret and nothing else".to_owned(),
        }),
    }
}

fn text(path: &Path) -> Result<Option<String>, Fault> {
    let fault = |message: String, remedy: &str| Fault::from(Problem::of_file(path, message, remedy));
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Ok(meta) if meta.len() > MAX_FILE_BYTES => {
            return Err(fault(
                format!("has {} bytes; at most {MAX_FILE_BYTES} are read", meta.len()),
                "is it another file?",
            ));
        }
        _ => {}
    }
    std::fs::read_to_string(path)
        .map(Some)
        .map_err(|error| fault(format!("cannot be read: {error}"), "make it a readable file of UTF-8 text"))
}

/// What the file has, one entry per key; tables that are not as they should be are entries too.
fn entries(report: &Report<'_>) -> Vec<Entry> {
    let (document, errors) = DeTable::parse_recoverable(report.text());
    if !errors.is_empty() {
        let mut lines = BTreeSet::new();
        for error in errors {
            let at = error.span().unwrap_or(0..0);
            if lines.insert(report.line(at.start)) {
                let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
                let remedy =
                    "see https://toml.io for how TOML is written; strings need quotes, lists square brackets";
                report.problem(at, format!("this is not TOML: {message}"), remedy);
            }
        }
        return Vec::new();
    }
    let mut entries = Vec::new();
    for (name, value) in document.into_inner().iter() {
        let depth = if NAMED.contains(&name.get_ref().as_ref()) { 2 } else { 1 };
        walk(report, &mut vec![name.get_ref().to_string()], name.span(), value.get_ref(), depth, &mut entries);
    }
    entries
}

fn walk(
    report: &Report<'_>,
    path: &mut Vec<String>,
    at: Range<usize>,
    value: &DeValue<'_>,
    depth: usize,
    entries: &mut Vec<Entry>,
) {
    if let (DeValue::Table(table), true) = (value, depth > 0) {
        for (name, value) in table.iter() {
            path.push(name.get_ref().to_string());
            walk(report, path, name.span(), value.get_ref(), depth - 1, entries);
            path.pop();
        }
        return;
    }
    match json(value) {
        Some(value) => entries.push(Entry { path: path.clone(), at, value }),
        None => report.problem(
            at,
            format!("'{}' has a date or a number that is too large", path.join(".")),
            "write a string or a smaller number",
        ),
    }
}
