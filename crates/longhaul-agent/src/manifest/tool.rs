//! Commands and HTTP calls of a manifest.

use std::ffi::OsString;
use std::fs::Metadata;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use reqwest::Method;
use reqwest::header::HeaderName;
use toml::de::DeValue;

use super::table::{Found, Key, Table};
use crate::template::{Body, Placeholder, Template};
use crate::tool::{BadUrl, Command, Http, Tool};

const HTTP_KEYS: &[Key] = &[
    Key { name: "method", example: r#"method = "POST""# },
    Key { name: "url", example: r#"url = "http://127.0.0.1:9000/apps/{{input.app}}""# },
    Key { name: "headers", example: r#"headers = { Authorization = "Bearer {{env.TOKEN}}" }"# },
    Key { name: "body", example: r#"body = { app = "{{input.app}}" }"# },
];

const METHODS: [(&str, &Method); 6] = [
    ("GET", &Method::GET),
    ("HEAD", &Method::HEAD),
    ("POST", &Method::POST),
    ("PUT", &Method::PUT),
    ("PATCH", &Method::PATCH),
    ("DELETE", &Method::DELETE),
];

/// Headers that are not the manifest's to set.
const OWN_HEADERS: [&str; 8] = [
    "connection",
    "content-length",
    "host",
    "idempotency-key",
    "longhaul-fence",
    "longhaul-step",
    "longhaul-task-id",
    "transfer-encoding",
];

/// Reads the tool that is declared under one of two keys; `refer` is told its placeholders.
pub(super) fn read(
    table: &Table<'_, '_>,
    command_key: &str,
    http_key: &str,
    folder: &Path,
    env: &[String],
    mut refer: impl FnMut(Found<Placeholder>),
) -> Option<Tool> {
    if table.has(command_key)
        && let Some(at) = table.place(http_key)
    {
        table.report.problem(
            at,
            format!("there are both '{command_key}' and '{http_key}'"),
            "keep one of the two; each does one thing",
        );
    }
    let command = command(table, command_key, folder, env, &mut refer).map(Tool::Command);
    let http = http(table, http_key, env, &mut refer).map(Tool::Http);
    command.or(http)
}

/// The names of the environment that a step may see.
pub(super) fn env(table: &Table<'_, '_>) -> Vec<String> {
    let mut names = Vec::new();
    for found in table.strings("env").unwrap_or_default() {
        let name = found.value;
        if name.is_empty() || name.contains(['=', '\0']) || name.chars().any(char::is_whitespace) {
            table.bad(
                "env",
                found.at,
                format_args!("has '{}', which cannot be a variable's name", name.escape_debug()),
            );
        } else if name.starts_with("LONGHAUL_") {
            table.bad(
                "env",
                found.at,
                format_args!("must not have {name}: names with LONGHAUL_ are set by Longhaul"),
            );
        } else {
            names.push(name.to_owned());
        }
    }
    names
}

/// Reads a string with placeholders.
pub(super) fn template(
    table: &Table<'_, '_>,
    found: &Found<&str>,
    refer: &mut impl FnMut(Found<Placeholder>),
) -> Option<Template> {
    match Template::parse(found.value) {
        Ok(template) => {
            for placeholder in template.placeholders() {
                refer(Found { value: placeholder.clone(), at: found.at.clone() });
            }
            Some(template)
        }
        Err(bad) => {
            table.report.problem(found.at.clone(), bad.message, bad.remedy);
            None
        }
    }
}

fn command(
    table: &Table<'_, '_>,
    key: &str,
    folder: &Path,
    env: &[String],
    refer: &mut impl FnMut(Found<Placeholder>),
) -> Option<Command> {
    let argv = table.strings(key)?;
    let Some((program, arguments)) = argv.split_first() else {
        table.bad(key, table.place(key)?, "is an empty list; its first element is the program");
        return None;
    };
    let mut complete = check_program(table, key, program, folder);
    let mut templates = Vec::new();
    for argument in arguments {
        if argument.value.contains('\0') {
            table.bad(
                key,
                argument.at.clone(),
                "has an argument with a NUL character, which no program can be given",
            );
            complete = false;
        }
        match template(table, argument, refer) {
            Some(template) => templates.push(template),
            None => complete = false,
        }
    }
    complete.then(|| Command {
        program: program.value.to_owned(),
        arguments: templates,
        env: env.to_vec(),
        folder: folder.to_owned(),
        sandbox: None,
    })
}

/// Whether the program can be started, as far as that can be seen from here.
fn check_program(table: &Table<'_, '_>, key: &str, program: &Found<&str>, folder: &Path) -> bool {
    let name = program.value;
    let shown = name.escape_debug();
    let problem = |message: String, remedy: String| {
        table.report.problem(program.at.clone(), message, remedy);
        false
    };
    if name.is_empty() || name.contains('\0') {
        return problem(format!("'{key}' has no program"), "its first element is the program".to_owned());
    }
    if name.contains("{{") {
        return problem(
            format!("the program '{shown}' has a placeholder"),
            "write the program itself; only its arguments may have placeholders".to_owned(),
        );
    }
    if name.contains(char::is_whitespace) && !name.contains('/') {
        return problem(
            format!("there is no program '{shown}' in PATH"),
            "write each argument as an element of its own: no shell reads this".to_owned(),
        );
    }
    if !name.contains('/') {
        return in_path(name)
            || problem(
                format!("there is no program '{shown}' in PATH"),
                format!("install it, or write ./{shown} when it lies beside the manifest"),
            );
    }
    let path = Command::program_path(name, folder);
    match std::fs::metadata(&path) {
        Err(_) => problem(
            format!("the program '{shown}' is not there"),
            format!("make {}, or correct the path; it is relative to the manifest's folder", path.display()),
        ),
        Ok(meta) if meta.is_dir() => {
            problem(format!("the program '{shown}' is a folder"), "name the file in it".to_owned())
        }
        Ok(meta) if !executable(&meta) => {
            problem(format!("the program '{shown}' is not executable"), format!("chmod +x {}", path.display()))
        }
        Ok(_) => true,
    }
}

fn in_path(name: &str) -> bool {
    let path: OsString = std::env::var_os("PATH").unwrap_or_default();
    let candidates = std::env::split_paths(&path).map(|folder: PathBuf| folder.join(name));
    candidates
        .into_iter()
        .any(|file| std::fs::metadata(file).is_ok_and(|meta| meta.is_file() && executable(&meta)))
}

fn executable(meta: &Metadata) -> bool {
    meta.permissions().mode() & 0o111 != 0
}

fn http(
    table: &Table<'_, '_>,
    key: &str,
    env: &[String],
    refer: &mut impl FnMut(Found<Placeholder>),
) -> Option<Http> {
    let found = table.table(key)?;
    let at = table.place(key).unwrap_or(found.at);
    let table = Table::new(table.report, "http", at, found.value, HTTP_KEYS);
    for required in ["method", "url"] {
        if !table.has(required) {
            table.missing(required, "");
        }
    }
    let method = table.word("method", &METHODS);
    let url = url(&table, refer);
    let headers = headers(&table, env, refer);
    let body = body(&table, refer);
    Some(Http::new(method?.clone(), url?, headers?, body?, env.to_vec()))
}

fn url(table: &Table<'_, '_>, refer: &mut impl FnMut(Found<Placeholder>)) -> Option<Template> {
    let found = table.string("url")?;
    let url = template(table, &found, refer)?;
    if let Err(BadUrl(why)) = Http::probe_url(&url) {
        table.bad("url", found.at, why);
        return None;
    }
    Some(url)
}

pub(super) fn headers(
    table: &Table<'_, '_>,
    env: &[String],
    refer: &mut impl FnMut(Found<Placeholder>),
) -> Option<Vec<(HeaderName, Template)>> {
    if !table.has("headers") {
        return Some(Vec::new());
    }
    let mut headers = Vec::new();
    let mut complete = true;
    for (key, value) in table.table("headers")?.value.iter() {
        let shown = key.get_ref().escape_debug();
        let name = HeaderName::from_bytes(key.get_ref().as_bytes()).ok();
        let Some(name) = name.filter(|name| !OWN_HEADERS.contains(&name.as_str())) else {
            table.bad(
                "headers",
                key.span(),
                format_args!("must not have '{shown}': it is set by Longhaul, or not a header"),
            );
            complete = false;
            continue;
        };
        let DeValue::String(text) = value.get_ref() else {
            table.bad("headers", value.span(), format_args!("must have strings only; '{shown}' is not one"));
            complete = false;
            continue;
        };
        let mut secret_or = |found: Found<Placeholder>| match found.value.path() {
            [root, name] if root == "env" && env.contains(name) => {}
            [root, name] if root == "env" => table.report.problem(
                found.at,
                format!("{} is not listed in 'env'", found.value),
                format!("add env = [\"{}\"] beside it", name.escape_debug()),
            ),
            _ => refer(found),
        };
        match template(table, &Found { value: text.as_ref(), at: value.span() }, &mut secret_or) {
            Some(template) => headers.push((name, template)),
            None => complete = false,
        }
    }
    complete.then_some(headers)
}

fn body(table: &Table<'_, '_>, refer: &mut impl FnMut(Found<Placeholder>)) -> Option<Option<Body>> {
    if !table.has("body") {
        return Some(None);
    }
    let found = table.json("body")?;
    match Body::parse(found.value) {
        Ok(body) => {
            for placeholder in body.placeholders() {
                refer(Found { value: placeholder.clone(), at: found.at.clone() });
            }
            Some(Some(body))
        }
        Err(bad) => {
            table.report.problem(found.at, bad.message, bad.remedy);
            None
        }
    }
}
