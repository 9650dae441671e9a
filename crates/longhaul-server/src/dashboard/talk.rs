//! What was said and called: the words of a model, its tool calls with arguments and results, and what people told it. Made of
//! the recorded steps of a task; one without a model has none.

use std::collections::HashMap;

use longhaul::{StepInfo, StepState};
use serde_json::Value;

use super::show;

/// How many entries are shown, the newest.
const ENTRIES: usize = 200;
/// How much of a text is shown.
const SHOWN: usize = 8_000;

/// One thing that was said or called.
pub(super) struct Said {
    /// `person`, `model` or `tool`: its class.
    pub(super) class: &'static str,
    pub(super) who: String,
    pub(super) text: String,
    /// The arguments of a call.
    pub(super) arguments: Option<String>,
    /// What came of a call.
    pub(super) result: Option<String>,
    pub(super) error: Option<String>,
    /// What else is known, in a few words.
    pub(super) note: String,
}

/// What was said and called, oldest first, and how much of it is left out.
pub(super) struct Talk {
    pub(super) entries: Vec<Said>,
    pub(super) left_out: usize,
}

impl Talk {
    /// `calls` has the arguments of the tool calls that were told, by step.
    pub(super) fn of(steps: &[StepInfo], calls: &HashMap<String, Value>) -> Self {
        let has_model = steps.iter().any(|step| step.kind == "model");
        let entries = steps.iter().filter_map(|step| said(step, calls)).filter(|_| has_model);
        let mut entries: Vec<Said> = entries.collect();
        let left_out = entries.len().saturating_sub(ENTRIES);
        entries.drain(..left_out);
        Self { entries, left_out }
    }
}

fn said(step: &StepInfo, calls: &HashMap<String, Value>) -> Option<Said> {
    let result: Option<Value> = step.result.as_ref().and_then(|result| serde_json::from_str(result.get()).ok());
    let took = step.started_at.zip(step.finished_at).map(|(from, to)| show::exact(to.duration_since(from)));
    let error = step.error.as_ref().map(|error| show::cut(&error.message, SHOWN).0);
    let plain = Said {
        class: "person",
        who: String::new(),
        text: String::new(),
        arguments: None,
        result: None,
        error,
        note: took.unwrap_or_default(),
    };
    match &*step.kind {
        "model" if step.state == StepState::Running => {
            Some(Said { class: "model", who: "model".to_owned(), note: "under way".to_owned(), ..plain })
        }
        "model" => Some(model(result.unwrap_or_default(), plain)),
        "tool" => {
            let result = result.map(|result| match result.get("tool_result") {
                Some(given) => show::pretty(given, SHOWN),
                None => show::pretty(&result, SHOWN),
            });
            let note = match step.state {
                StepState::Running => "under way".to_owned(),
                StepState::Undone => format!("{}, undone", plain.note),
                _ => plain.note,
            };
            let arguments = calls.get(&step.name).map(|arguments| show::pretty(arguments, SHOWN));
            Some(Said { class: "tool", who: step.name.clone(), arguments, result, note, ..plain })
        }
        "question" | "signal" => {
            let text = show::pretty(&result?, SHOWN);
            Some(Said { who: step.kind.to_string(), text, note: String::new(), ..plain })
        }
        _ => None,
    }
}

fn model(result: Value, plain: Said) -> Said {
    let answer = &result["answer"];
    let calls = answer["tool_calls"].as_array().into_iter().flatten();
    let calls: Vec<&str> = calls.filter_map(|call| call["name"].as_str()).collect();
    let text = answer["text"].as_str().or(answer["refusal"].as_str()).unwrap_or_default();
    let usage = &answer["usage"];
    let tokens = usage["input_tokens"].as_u64().unwrap_or(0) + usage["output_tokens"].as_u64().unwrap_or(0);
    let mut note = plain.note.clone();
    if tokens > 0 {
        note.push_str(&format!(" · {} tokens", show::number(tokens)));
    }
    if !calls.is_empty() {
        note.push_str(&format!(" · calls {}", show::cut(&calls.join(", "), 200).0));
    }
    let who = answer["model"].as_str().unwrap_or("model");
    Said { class: "model", who: show::cut(who, 60).0, text: show::cut(text, SHOWN).0, note, ..plain }
}
