//! What the placeholders of a saga refer to: only what is there when they are filled.

use std::collections::HashMap;
use std::ops::Range;

use super::problem::Report;
use super::table::{Found, nearest};
use crate::template::Placeholder;

/// Where a placeholder stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In what a step does.
    Forward,
    /// In how it is undone; its own result is there by then.
    Undo,
}

/// The steps of a saga and all that their strings refer to.
#[derive(Default)]
pub(super) struct Names {
    steps: Vec<Named>,
}

struct Named {
    at: Range<usize>,
    name: Option<(String, Range<usize>)>,
    group: Option<(String, Range<usize>)>,
    references: Vec<(Place, Found<Placeholder>)>,
}

impl Names {
    /// The next step; what is referred to from now on is in it.
    pub(super) fn begin(
        &mut self,
        at: Range<usize>,
        name: Option<(String, Range<usize>)>,
        group: Option<(String, Range<usize>)>,
    ) {
        self.steps.push(Named { at, name, group, references: Vec::new() });
    }

    pub(super) fn refer(&mut self, place: Place, placeholder: Found<Placeholder>) {
        if let Some(step) = self.steps.last_mut() {
            step.references.push((place, placeholder));
        }
    }

    pub(super) fn check(&self, report: &Report<'_>) {
        self.check_names(report);
        self.check_groups(report);
        for (position, step) in self.steps.iter().enumerate() {
            for (place, found) in &step.references {
                if let Some((message, remedy)) = self.fault(position, *place, &found.value) {
                    report.problem(found.at.clone(), message, remedy);
                }
            }
        }
    }

    fn check_names(&self, report: &Report<'_>) {
        let mut first: HashMap<&str, usize> = HashMap::new();
        for (name, at) in self.steps.iter().filter_map(|step| step.name.as_ref()) {
            let line = report.line(at.start);
            if let Some(before) = first.get(name.as_str()) {
                report.problem(
                    at.clone(),
                    format!("there are two steps '{name}': on line {before} and here"),
                    "give one of them another name",
                );
            } else {
                first.insert(name, line);
            }
        }
    }

    fn check_groups(&self, report: &Report<'_>) {
        // Where each group was last seen.
        let mut last: HashMap<&str, usize> = HashMap::new();
        for (position, step) in self.steps.iter().enumerate() {
            let Some((group, at)) = &step.group else { continue };
            if let Some(before) = last.insert(group, position)
                && before + 1 != position
            {
                let line = report.line(self.steps[before].at.start);
                report.problem(
                    at.clone(),
                    format!("the group '{group}' is interrupted: its step before is on line {line}"),
                    "put the steps of a group one after the other, or give this one another group",
                );
            }
        }
    }

    /// What is wrong with a placeholder in the step at `position`, and what to do about it.
    fn fault(&self, position: usize, place: Place, placeholder: &Placeholder) -> Option<(String, String)> {
        let path: Vec<&str> = placeholder.path().iter().map(String::as_str).collect();
        let fault = |message: String, remedy: &str| Some((message, remedy.to_owned()));
        match path.as_slice() {
            ["input", ..] => None,
            ["result", ..] if place == Place::Undo => None,
            ["result", ..] => fault(
                format!("{placeholder} has a value in an undo only"),
                "refer to a step before with {{steps.NAME.result}}",
            ),
            ["steps", name, "result", ..] => self.fault_of_step(position, place, placeholder, name),
            ["steps", ..] => fault(
                format!("{placeholder} does not say which result of which step"),
                "write {{steps.NAME.result}} or {{steps.NAME.result.FIELD}}",
            ),
            ["env", ..] => fault(
                format!("{placeholder} may stand in the headers of http only, where it stays secret"),
                "list the name in env: a command then finds it in its environment",
            ),
            _ => fault(
                format!("{placeholder} refers to nothing"),
                "write {{input}}, {{input.FIELD}} or {{steps.NAME.result}}; a literal {{ is written {{{{",
            ),
        }
    }

    fn fault_of_step(
        &self,
        position: usize,
        place: Place,
        placeholder: &Placeholder,
        name: &str,
    ) -> Option<(String, String)> {
        let named = |step: &Named| step.name.as_ref().is_some_and(|(known, _)| known == name);
        let Some(target) = self.steps.iter().position(named) else {
            let names = self.steps.iter().filter_map(|step| step.name.as_ref()).map(|(name, _)| name.as_str());
            let remedy = nearest(name, names).map_or_else(
                || "refer to a step before this one".to_owned(),
                |near| format!("did you mean '{near}'?"),
            );
            return Some((format!("{placeholder} refers to a step '{name}' that is not there"), remedy));
        };
        let here = &self.steps[position];
        let there = &self.steps[target];
        let group = |step: &Named| step.group.as_ref().map(|(group, _)| group.clone());
        if target == position {
            return (place == Place::Forward).then(|| {
                (
                    format!("{placeholder} refers to its own step, which has no result yet"),
                    "refer to a step before this one".to_owned(),
                )
            });
        }
        if group(here).is_some() && group(here) == group(there) {
            return Some((
                format!("{placeholder} refers to a step of the same group, which runs at the same time"),
                "take one of the two out of the group".to_owned(),
            ));
        }
        (target > position).then(|| {
            (
                format!("{placeholder} refers to a later step"),
                format!("move step '{name}' before this one, or do not refer to it"),
            )
        })
    }
}
