//! What a person sees of a task that is followed: a live view on a terminal, one line per event otherwise.

use std::collections::BTreeMap;
use std::time::Duration;

use console::Style;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

use crate::exit::Failure;
use crate::follow::{Event, Heard};
use crate::out;

/// Of what an event says, so much is shown in a line.
const MAX_SAID_CHARS: usize = 160;
/// Of the steps that run at once, so many are shown.
const MAX_LINES: usize = 8;

/// How events are shown.
pub(crate) enum View {
    /// Each as its JSON, one a line.
    Json,
    /// Each as a line for people.
    Lines,
    /// Drawn on the terminal.
    Live(Box<Live>),
}

impl View {
    /// What fits where the output goes.
    pub(crate) fn choose(json: bool) -> Self {
        match (json, out::for_eyes()) {
            (true, _) => Self::Json,
            (false, true) => Self::Live(Box::new(Live::new())),
            (false, false) => Self::Lines,
        }
    }

    pub(crate) fn hear(&mut self, heard: &Heard) -> Result<(), Failure> {
        match (self, heard) {
            (Self::Json, Heard::Event(event)) => out::line(event.raw.replace(['\n', '\r'], " ")),
            (Self::Lines, Heard::Event(event)) => out::line(line(event)),
            (Self::Live(live), heard) => {
                live.hear(heard);
                Ok(())
            }
            (_, Heard::Trouble(why)) => {
                out::note(format!("longhaul: {why}\nlonghaul: trying again"));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Takes away what was drawn.
    pub(crate) fn end(&mut self) {
        if let Self::Live(live) = self {
            live.end();
        }
    }
}

/// `12:00:01 step.completed create_dns …`
pub(crate) fn line(event: &Event) -> String {
    let step = event.step.as_deref().map(|step| format!(" {}", out::clean(step))).unwrap_or_default();
    let said = said(event);
    let said = if said.is_empty() { said } else { format!(" {said}") };
    format!("{} {}{step}{said}", clock(&event.time), out::clean(&event.kind))
}

/// The time of day here.
fn clock(time: &str) -> String {
    let time: Option<Timestamp> = time.parse().ok();
    time.map_or_else(
        || "--:--:--".to_owned(),
        |time| time.to_zoned(TimeZone::system()).strftime("%H:%M:%S").to_string(),
    )
}

/// When it happened; now, if nobody knows.
fn time(event: &Event) -> Timestamp {
    event.time.parse().unwrap_or_else(|_| Timestamp::now())
}

/// How long ago that was; nothing when the clocks of two machines disagree.
fn since(time: Timestamp) -> Duration {
    Duration::try_from(Timestamp::now().duration_since(time)).unwrap_or_default()
}

/// What an event says besides its name.
fn said(event: &Event) -> String {
    let data = &event.data;
    let text = |name: &str| data[name].as_str();
    let said = match event.kind.as_str() {
        "progress" => progress(data),
        "task.completed" => value(&data["result"]),
        "task.failed" | "agent.error" | "step.failed" | "task.cancelled" if data["error"].is_object() => {
            error(&data["error"])
        }
        "task.waiting" => {
            let until = text("until").map(|until| format!(" until {until}")).unwrap_or_default();
            format!("for {}{until}", text("kind").unwrap_or("something"))
        }
        "question.asked" => text("question").map_or_else(|| value(data), str::to_owned),
        "approval.requested" => text("reason").or_else(|| text("tool")).map_or_else(|| value(data), str::to_owned),
        "step.completed" if data.get("result").is_some() => value(&data["result"]),
        _ => value(data),
    };
    out::short(&said, MAX_SAID_CHARS)
}

fn progress(data: &Value) -> String {
    let (step, total) = (data["step"].as_u64().unwrap_or(0), data["total_step"].as_u64().unwrap_or(0));
    let place = match (step, total) {
        (0, 0) => String::new(),
        (step, 0) => format!("[{step}] "),
        (step, total) => format!("[{step}/{total}] "),
    };
    let status = data["status"].as_str().unwrap_or_default();
    let tool = data["tool"].as_str().map(|tool| format!(" {tool}")).unwrap_or_default();
    let message = data["message"].as_str().unwrap_or_default();
    format!("{place}{status}{tool}: {message}")
}

/// A JSON value in a line: text as it is, nothing for nothing.
pub(crate) fn value(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Object(fields) if fields.is_empty() => String::new(),
        other => other.to_string(),
    }
}

/// A task's error in a sentence, its causes behind it.
pub(crate) fn error(error: &Value) -> String {
    let mut said = format!(
        "{} [{}]",
        error["message"].as_str().unwrap_or("it failed"),
        error["code"].as_str().unwrap_or("error")
    );
    // A chain that is longer says nothing more.
    let (mut cause, mut depth) = (&error["cause"], 0);
    while cause.is_object() && depth < 8 {
        said = format!("{said}: {}", cause["message"].as_str().unwrap_or("unknown"));
        (cause, depth) = (&cause["cause"], depth + 1);
    }
    said
}

/// The view on a terminal: what happened scrolls by, what happens now stays below it.
pub(crate) struct Live {
    all: MultiProgress,
    head: ProgressBar,
    model: Model,
    steps: BTreeMap<String, ProgressBar>,
}

/// What is known of the task, without anything of how it is drawn.
#[derive(Debug, Default)]
struct Model {
    state: &'static str,
    step: u64,
    total: u64,
    status: String,
    tool: Option<String>,
    message: String,
    /// The steps under way, and since when.
    running: BTreeMap<String, Timestamp>,
    done: u64,
    /// Of a model's text, by step and attempt: only the newest attempt counts.
    writing: Option<(String, u64, String)>,
    trouble: Option<String>,
}

impl Model {
    fn hear(&mut self, heard: &Heard) {
        match heard {
            Heard::Trouble(why) => self.trouble = Some(out::short(why, MAX_SAID_CHARS)),
            Heard::Back => self.trouble = None,
            Heard::Live { step, attempt, text } => {
                let same = matches!(&self.writing, Some((s, a, _)) if s == step && a == attempt);
                let mut written =
                    self.writing.take().filter(|_| same).map(|(_, _, text)| text).unwrap_or_default();
                written.push_str(text);
                // Only its end is shown.
                let from = written.char_indices().rev().nth(500).map_or(0, |(at, _)| at);
                self.writing = Some((step.clone(), *attempt, written[from..].to_owned()));
            }
            Heard::Event(event) => self.event(event),
        }
    }

    fn event(&mut self, event: &Event) {
        let step = event.step.clone().unwrap_or_default();
        match event.kind.as_str() {
            "task.submitted" | "task.resumed" => self.state = "pending",
            "task.started" => {
                self.state = "running";
                self.running.clear();
            }
            "task.waiting" => {
                self.state = "waiting";
                self.message = said(event);
                self.running.clear();
            }
            "task.completed" => self.state = "completed",
            "task.failed" => self.state = "failed",
            "task.cancelled" => self.state = "cancelled",
            "step.started" => {
                self.running.insert(step, time(event));
            }
            "step.completed" | "step.failed" | "tool.executed" => {
                self.done += u64::from(event.kind == "step.completed");
                self.running.remove(&step);
                self.writing = None;
            }
            "progress" => {
                let data = &event.data;
                self.step = data["step"].as_u64().unwrap_or(0);
                self.total = data["total_step"].as_u64().unwrap_or(0);
                self.status = out::clean(data["status"].as_str().unwrap_or_default());
                self.tool = data["tool"].as_str().map(out::clean);
                self.message = out::short(data["message"].as_str().unwrap_or_default(), MAX_SAID_CHARS);
            }
            _ => {}
        }
    }

    /// What happens now, in a line.
    fn now(&self) -> String {
        if let Some(trouble) = &self.trouble {
            return format!("{trouble} (trying again)");
        }
        if let Some((_, _, text)) = &self.writing {
            let line = text.trim_end().rsplit('\n').next().unwrap_or_default();
            return out::short(line, MAX_SAID_CHARS);
        }
        let status = if self.status.is_empty() || self.state != "running" { self.state } else { &self.status };
        let tool = self.tool.as_deref().map(|tool| format!(" {tool}")).unwrap_or_default();
        let done = match self.done {
            0 => String::new(),
            1 => " · 1 step done".to_owned(),
            many => format!(" · {many} steps done"),
        };
        let message = if self.message.is_empty() { String::new() } else { format!(" · {}", self.message) };
        format!("{status}{tool}{done}{message}")
    }
}

impl Live {
    fn new() -> Self {
        let all = MultiProgress::new();
        let head = all.add(ProgressBar::new_spinner());
        head.set_style(spinner("{spinner} {elapsed:>4} {wide_msg}"));
        head.enable_steady_tick(Duration::from_millis(120));
        Self { all, head, model: Model { state: "pending", ..Model::default() }, steps: BTreeMap::new() }
    }

    fn hear(&mut self, heard: &Heard) {
        self.model.hear(heard);
        if let Heard::Event(event) = heard
            && event.kind == "task.submitted"
        {
            // The bar is shared, so that this sets the one that is drawn.
            drop(self.head.clone().with_elapsed(since(time(event))));
        }
        if let Heard::Event(event) = heard
            && !matches!(event.kind.as_str(), "progress" | "step.started")
        {
            // What cannot be drawn is not worth ending for.
            let _ = self.all.println(painted(event));
        }
        self.draw();
    }

    fn draw(&mut self) {
        if self.model.total > 0 {
            if self.head.length() != Some(self.model.total) {
                self.head.set_length(self.model.total);
                self.head.set_style(spinner("{spinner} {elapsed:>4} {bar:24} {pos}/{len} {wide_msg}"));
            }
            self.head.set_position(self.model.step.min(self.model.total));
        }
        self.head.set_message(self.model.now());
        let gone: Vec<String> =
            self.steps.keys().filter(|name| !self.model.running.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some(bar) = self.steps.remove(&name) {
                bar.finish_and_clear();
                self.all.remove(&bar);
            }
        }
        for (name, began) in &self.model.running {
            if self.steps.len() >= MAX_LINES || self.steps.contains_key(name) {
                continue;
            }
            let bar = self.all.add(ProgressBar::new_spinner().with_elapsed(since(*began)));
            bar.set_style(spinner("  {spinner} {elapsed:>4} {wide_msg}"));
            bar.set_message(out::clean(name));
            bar.enable_steady_tick(Duration::from_millis(120));
            self.steps.insert(name.clone(), bar);
        }
    }

    fn end(&mut self) {
        for (_, bar) in std::mem::take(&mut self.steps) {
            bar.finish_and_clear();
        }
        self.head.finish_and_clear();
    }
}

fn spinner(template: &str) -> ProgressStyle {
    // The templates are constants that parse; a bar without style is better than no view.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn painted(event: &Event) -> String {
    let style = match event.kind.as_str() {
        "task.completed" | "step.completed" => Style::new().green(),
        "task.failed" | "step.failed" | "agent.error" | "saga.compensation_failed" => Style::new().red(),
        "task.cancelled" | "approval.requested" | "question.asked" => Style::new().yellow(),
        _ => Style::new().dim(),
    };
    style.apply_to(line(event)).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(kind: &str, step: Option<&str>, data: Value) -> Event {
        let time = "2026-01-02T12:00:01Z".to_owned();
        Event { seq: 1, kind: kind.to_owned(), time, step: step.map(str::to_owned), data, raw: String::new() }
    }

    fn told(kind: &str, step: Option<&str>, data: Value) -> String {
        line(&event(kind, step, data)).split_once(' ').expect("a time first").1.to_owned()
    }

    #[test]
    fn an_event_is_one_line_that_says_what_happened() {
        assert_eq!(
            told("step.completed", Some("create_dns"), json!({"attempt": 1, "result": "ok"})),
            "step.completed create_dns ok"
        );
        assert_eq!(
            told(
                "progress",
                None,
                json!({"step": 3, "total_step": 20, "status": "tool_call", "tool": "df", "message": "look\nhere"})
            ),
            "progress [3/20] tool_call df: look here"
        );
        assert_eq!(
            told(
                "task.failed",
                None,
                json!({"error": {"code": "step_failed", "message": "deploy failed", "cause": {"message": "no route"}}})
            ),
            "task.failed deploy failed [step_failed]: no route"
        );
        assert_eq!(
            told("task.waiting", None, json!({"kind": "approval", "until": null})),
            "task.waiting for approval"
        );
        assert_eq!(told("disk.cleaned", None, json!({})), "disk.cleaned");
        assert!(!told("x", Some("a\u{1b}[2J"), json!("\u{1b}]0;owned\u{7}")).contains('\u{1b}'));
    }

    #[test]
    fn the_live_view_knows_what_runs_and_shows_only_the_newest_attempt_of_a_text() {
        let mut model = Model::default();
        let hear = |model: &mut Model, kind: &str, step: Option<&str>, data| {
            model.hear(&Heard::Event(event(kind, step, data)))
        };
        hear(&mut model, "task.started", None, json!({}));
        hear(&mut model, "step.started", Some("a"), json!({}));
        hear(&mut model, "step.started", Some("b"), json!({}));
        hear(&mut model, "step.completed", Some("a"), json!({}));
        assert_eq!(model.running.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(model.now(), "running · 1 step done");
        let live = |attempt, text: &str| Heard::Live { step: "b".to_owned(), attempt, text: text.to_owned() };
        model.hear(&live(1, "Hello "));
        model.hear(&live(1, "wor"));
        assert_eq!(model.now(), "Hello wor");
        model.hear(&live(2, "Good day"));
        assert_eq!(model.now(), "Good day");
        model.hear(&Heard::Trouble("gone".to_owned()));
        assert_eq!(model.now(), "gone (trying again)");
        model.hear(&Heard::Back);
        hear(&mut model, "step.completed", Some("b"), json!({}));
        hear(
            &mut model,
            "progress",
            None,
            json!({"step": 1, "total_step": 4, "status": "thinking", "message": "Hm"}),
        );
        assert_eq!((model.total, model.now().as_str()), (4, "thinking · 2 steps done · Hm"));
    }
}
