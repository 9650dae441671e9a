//! What the tools of an agent refer to: each other, and their parameters.

use std::collections::HashMap;
use std::ops::Range;

use serde_json::Value;

use super::super::problem::Report;
use super::super::saga::Name;
use super::super::table::nearest;
use super::{servers, tools};
use crate::template::Placeholder;

/// Reports every reference to something that is not there, and every name that is taken twice.
pub(super) fn check(report: &Report<'_>, tools: &[tools::Declared], servers: &[servers::Declared]) {
    twice(report, "tools", tools.iter().filter_map(|tool| tool.name.as_ref()));
    twice(report, "servers", servers.iter().filter_map(|server| server.name.as_ref()));
    let names = Names { report, tools, servers };
    for tool in tools {
        for reference in [&tool.undo, &tool.verify].into_iter().flatten() {
            names.check_reference(reference, tool.name.as_ref());
        }
        names.check_undone_undo(tool);
        names.check_placeholders(tool);
    }
    for reference in servers.iter().flat_map(|server| server.undos.iter().chain(&server.verifies)) {
        names.check_reference(reference, None);
    }
}

fn twice<'n>(report: &Report<'_>, what: &str, names: impl Iterator<Item = &'n Name>) {
    let mut first: HashMap<&str, usize> = HashMap::new();
    for (name, at) in names {
        if let Some(line) = first.get(name.as_str()) {
            report.problem(
                at.clone(),
                format!("there are two {what} '{name}': on line {line} and here"),
                "give one of them another name",
            );
        } else {
            first.insert(name, report.line(at.start));
        }
    }
}

struct Names<'a, 't> {
    report: &'a Report<'t>,
    tools: &'a [tools::Declared],
    servers: &'a [servers::Declared],
}

impl Names<'_, '_> {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().filter_map(|tool| tool.name.as_ref()).map(|(name, _)| name.as_str())
    }

    /// An `undo` or `verify` names another tool of this agent.
    fn check_reference(&self, (name, at): &Name, own: Option<&Name>) {
        let problem = |message: String, remedy: String| self.report.problem(at.clone(), message, remedy);
        if own.is_some_and(|(own, _)| own == name) {
            return problem(
                format!("the tool '{name}' cannot be its own undo or verify"),
                "name another tool".to_owned(),
            );
        }
        if self.names().any(|known| known == name) || self.is_of_a_server(name) {
            return;
        }
        let shown = name.escape_debug();
        let remedy = nearest(name, self.names()).map_or_else(
            || format!("add a [[tool]] with name = \"{shown}\", or SERVER__TOOL for one of an [[mcp]]"),
            |near| format!("did you mean '{near}'?"),
        );
        problem(format!("there is no tool '{shown}'"), remedy);
    }

    /// What undoes another is run when something failed; nothing undoes it again.
    fn check_undone_undo(&self, tool: &tools::Declared) {
        let (Some((name, _)), Some((undo, at))) = (&tool.name, &tool.undo) else { return };
        let names_it = |other: &&tools::Declared| other.undo.as_ref().is_some_and(|(named, _)| named == name);
        if let Some((other, _)) = self.tools.iter().filter(names_it).find_map(|other| other.name.as_ref())
            && other != name
        {
            self.report.problem(
                at.clone(),
                format!("'{name}' undoes '{other}' and is itself undone by '{undo}', which never happens"),
                format!("remove this line, or declare another tool that undoes '{other}'"),
            );
        }
    }

    /// Which tools a server has is known when it is connected.
    fn is_of_a_server(&self, name: &str) -> bool {
        let named = self.servers.iter().filter_map(|server| server.name.as_ref());
        named.map(|(server, _)| format!("{server}__")).any(|prefix| name.starts_with(&prefix))
    }

    fn check_placeholders(&self, tool: &tools::Declared) {
        let Some((name, _)) = &tool.name else { return };
        let names_it = |reference: &Option<Name>| reference.as_ref().is_some_and(|(named, _)| named == name);
        let undone: Vec<_> = self.tools.iter().filter(|other| names_it(&other.undo)).collect();
        let verified: Vec<_> = self.tools.iter().filter(|other| names_it(&other.verify)).collect();
        let undoes = !undone.is_empty() || self.servers.iter().any(|server| has(&server.undos, name));
        let verifies = !verified.is_empty() || self.servers.iter().any(|server| has(&server.verifies, name));
        for found in &tool.placeholders {
            let path: Vec<&str> = found.value.path().iter().map(String::as_str).collect();
            match path.as_slice() {
                ["env", ..] => self.report.problem(
                    found.at.clone(),
                    format!("{} may stand in the headers of http only, where it stays secret", found.value),
                    "list the name in env: a command then finds it in its environment",
                ),
                ["result", ..] | ["arguments"] if undoes => {}
                ["arguments", parameter, ..] if undoes => {
                    self.check_parameter(
                        &found.value,
                        parameter,
                        &found.at,
                        undone.iter().map(|other| &other.parameters),
                    );
                }
                [parameter, ..] if verifies => {
                    self.check_parameter(
                        &found.value,
                        parameter,
                        &found.at,
                        verified.iter().map(|other| &other.parameters),
                    );
                }
                _ if undoes => self.report.problem(
                    found.at.clone(),
                    format!("{} refers to nothing: '{name}' is an undo", found.value),
                    "an undo gets {{arguments.NAME}} and {{result}} of what it undoes",
                ),
                [parameter, ..] => {
                    self.check_parameter(&found.value, parameter, &found.at, std::iter::once(&tool.parameters));
                }
                [] => {}
            }
        }
    }

    fn check_parameter<'s>(
        &self,
        placeholder: &Placeholder,
        parameter: &str,
        at: &Range<usize>,
        schemas: impl Iterator<Item = &'s Value>,
    ) {
        for schema in schemas {
            let properties = schema["properties"].as_object();
            if properties.is_some_and(|properties| properties.contains_key(parameter)) {
                continue;
            }
            let known: Vec<&str> =
                properties.into_iter().flat_map(|known| known.keys()).map(String::as_str).collect();
            let remedy = match nearest(parameter, known.iter().copied()) {
                Some(near) => format!("did you mean '{near}'?"),
                None => {
                    let line = format!(
                        "parameters = {{ type = \"object\", properties = {{ {parameter} = {{ type = \"string\" }} }} }}"
                    );
                    format!("declare it, like {line}; a literal {{{{ is written {{{{{{{{")
                }
            };
            self.report.problem(at.clone(), format!("{placeholder} is not a parameter of the tool"), remedy);
            return;
        }
    }
}

fn has(names: &[Name], name: &str) -> bool {
    names.iter().any(|(known, _)| known == name)
}
