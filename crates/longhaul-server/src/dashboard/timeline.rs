//! The life of a task as a waterfall: what it did when, with tries, pauses, waits and undos. A pure projection of its events.

use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};
use longhaul::Event;
use serde_json::Value;

use super::show;

/// How wide the picture is, in units of its own.
const WIDTH: f64 = 1000.0;
/// The narrowest bar: shorter ones could not be seen.
const NARROWEST: f64 = 4.0;
/// How much of the picture waiting may take, if there is anything else.
const WAITING: f64 = 0.4;
/// How many rows are shown, the newest.
const ROWS: usize = 200;
/// How many bars of a row are kept: one that is tried for days must not fill the page.
const BARS: usize = 200;

/// What a stretch of time was spent on. Its name is its class in the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spent {
    Queued,
    Running,
    Work,
    Failed,
    Pause,
    Wait,
    Undo,
    UndoFailed,
    Doubt,
    /// Its worker was lost.
    Lost,
}

impl Spent {
    fn class(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Work => "work",
            Self::Failed => "failed",
            Self::Pause => "pause",
            Self::Wait => "wait",
            Self::Undo => "undo",
            Self::UndoFailed => "undo-failed",
            Self::Doubt => "doubt",
            Self::Lost => "lost",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Queued => "in the queue",
            Self::Running => "run by a worker",
            Self::Work => "worked",
            Self::Failed => "failed",
            Self::Pause => "paused before the next try",
            Self::Wait => "waited",
            Self::Undo => "undone",
            Self::UndoFailed => "could not be undone",
            Self::Doubt => "ended in doubt",
            Self::Lost => "lost with its worker",
        }
    }
}

#[derive(Clone, Debug)]
struct Stretch {
    from: Timestamp,
    to: Option<Timestamp>,
    spent: Spent,
    attempt: u64,
}

/// A step, a wait, or the task itself.
#[derive(Clone, Debug)]
struct Lane {
    name: String,
    kind: String,
    stretches: Vec<Stretch>,
}

impl Lane {
    fn open(&mut self, from: Timestamp, spent: Spent, attempt: u64) {
        self.close(from, None);
        if self.stretches.len() == BARS {
            self.stretches.remove(0);
        }
        self.stretches.push(Stretch { from, to: None, spent, attempt });
    }

    /// Ends what is under way, as `spent` if given.
    fn close(&mut self, to: Timestamp, spent: Option<Spent>) {
        if let Some(last) = self.stretches.last_mut().filter(|last| last.to.is_none()) {
            last.to = Some(to);
            last.spent = spent.unwrap_or(last.spent);
        }
    }

    fn under_way(&self) -> Option<Spent> {
        self.stretches.last().filter(|last| last.to.is_none()).map(|last| last.spent)
    }
}

/// The life of a task, read event by event.
pub(super) struct Timeline {
    /// The first is the task's own.
    lanes: Vec<Lane>,
    places: HashMap<String, usize>,
    /// The lane of each question and approval, by id.
    asked: HashMap<String, usize>,
    /// Arguments of tool calls, by step.
    pub(super) calls: HashMap<String, Value>,
}

impl Timeline {
    pub(super) fn new() -> Self {
        let own = Lane { name: "task".to_owned(), kind: "task".to_owned(), stretches: Vec::new() };
        Self { lanes: vec![own], places: HashMap::new(), asked: HashMap::new(), calls: HashMap::new() }
    }

    fn lane(&mut self, name: &str, kind: &str) -> &mut Lane {
        let place = *self.places.entry(name.to_owned()).or_insert_with(|| {
            self.lanes.push(Lane { name: name.to_owned(), kind: kind.to_owned(), stretches: Vec::new() });
            self.lanes.len() - 1
        });
        &mut self.lanes[place]
    }

    /// The lane of what an undo undoes: the step's own, so that both stand together.
    fn undone(&mut self, undo: &str) -> &mut Lane {
        let step = undo.strip_prefix("undo ").unwrap_or(undo);
        // Steps after a checkpoint have the number of their part before their name.
        let (part, inner) = step.split_once('/').unwrap_or(("", step));
        let inner = if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) { inner } else { step };
        let known = if self.places.contains_key(step) { step } else { inner };
        let known = known.to_owned();
        self.lane(&known, "undo")
    }

    pub(super) fn read(&mut self, event: &Event) {
        let (at, data) = (event.time, &event.data);
        let step = event.step.as_deref();
        let kind = data["kind"].as_str().unwrap_or("step");
        let attempt = data["attempt"].as_u64().unwrap_or(1);
        match (event.kind.as_str(), step) {
            ("task.submitted" | "task.resumed", _) => self.lanes[0].open(at, Spent::Queued, 0),
            ("task.started", _) => {
                self.interrupt(at);
                self.lanes[0].open(at, Spent::Running, 0);
            }
            ("task.waiting", _) => {
                self.lanes[0].open(at, Spent::Wait, 0);
                self.wait(kind, data["id"].as_str().unwrap_or_default(), at);
            }
            ("progress", _) if event.run == 0 && data["status"] == "retrying" => {
                self.interrupt(at);
                self.lanes[0].open(at, Spent::Queued, 0);
            }
            ("task.completed" | "task.failed" | "task.cancelled", _) => {
                self.interrupt(at);
                self.lanes[0].close(at, None);
            }
            ("step.started", Some(step)) => match kind {
                "undo" => self.undone(step).open(at, Spent::Undo, attempt),
                "sleep" => self.lane(step, kind).open(at, Spent::Wait, 0),
                _ => self.lane(step, kind).open(at, Spent::Work, attempt),
            },
            ("step.completed", Some(step)) if kind == "undo" => self.undone(step).close(at, None),
            ("step.completed", Some(step)) => self.lane(step, kind).close(at, None),
            ("step.failed", Some(step)) if kind == "undo" => self.undone(step).close(at, Some(Spent::UndoFailed)),
            ("step.failed", Some(step)) => {
                let lane = self.lane(step, kind);
                lane.close(at, Some(Spent::Failed));
                if data["retry_in_ms"].is_u64() {
                    lane.open(at, Spent::Pause, attempt);
                }
            }
            ("step.in_doubt", Some(step)) => {
                let lane = self.lane(step, kind);
                lane.close(at, Some(Spent::Doubt));
                lane.open(at, Spent::Wait, 0);
            }
            ("question.asked" | "approval.requested", Some(step)) => {
                let kind = if event.kind == "question.asked" { "question" } else { "approval" };
                self.lane(step, kind).open(at, Spent::Wait, 0);
                if let (Some(id), Some(place)) = (data["id"].as_str(), self.places.get(step)) {
                    self.asked.insert(id.to_owned(), *place);
                }
            }
            ("question.answered" | "approval.decided", _) => {
                let place = data["id"].as_str().and_then(|id| self.asked.get(id));
                if let Some(&place) = place {
                    self.lanes[place].close(at, None);
                }
            }
            ("tool.executed", Some(step)) => {
                self.calls.insert(step.to_owned(), data["arguments"].clone());
            }
            _ => {}
        }
    }

    /// A suspended task says what it waits for. Questions, approvals, pauses and doubts have said so themselves.
    fn wait(&mut self, kind: &str, id: &str, at: Timestamp) {
        if matches!(kind, "signal" | "child" | "lock") {
            let name = match kind {
                "child" => format!("child {}", &id[id.len().saturating_sub(8)..]),
                kind => format!("{kind} {id}"),
            };
            self.lane(&name, kind).open(at, Spent::Wait, 0);
        }
    }

    /// Its run is over: what was under way is so no longer, and what was waited for by being suspended has come.
    fn interrupt(&mut self, at: Timestamp) {
        for lane in &mut self.lanes[1..] {
            match (lane.under_way(), lane.kind.as_str()) {
                (Some(Spent::Work | Spent::Undo), _) => lane.close(at, Some(Spent::Lost)),
                (Some(Spent::Wait), "signal" | "child" | "lock") | (Some(Spent::Pause), _) => lane.close(at, None),
                _ => {}
            }
        }
    }

    /// The picture, from the first event to `end`.
    pub(super) fn picture(&self, end: Timestamp) -> Picture {
        let all = || self.lanes.iter().flat_map(|lane| &lane.stretches);
        let start = all().map(|stretch| stretch.from).min().unwrap_or(end);
        let last = all().map(|stretch| stretch.to.unwrap_or(stretch.from)).max().unwrap_or(end);
        let end = end.max(last);
        let scale = Scale::new(&self.lanes[0].stretches, start, end);
        let draw = |lane: &Lane| {
            let bars = lane.stretches.iter().map(|stretch| {
                let to = stretch.to.unwrap_or(end);
                let (x, right) = (scale.place(stretch.from), scale.place(to));
                let width = (right - x).max(NARROWEST);
                let took = show::exact(to.duration_since(stretch.from));
                let tries =
                    if stretch.attempt > 1 { format!(" (try {})", stretch.attempt) } else { String::new() };
                let going = if stretch.to.is_none() { ", still" } else { "" };
                Bar {
                    x: format!("{:.1}", x.min(WIDTH - width)),
                    width: format!("{width:.1}"),
                    class: stretch.spent.class(),
                    live: stretch.to.is_none(),
                    title: format!("{}{tries} {took}{going}", stretch.spent.words()),
                }
            });
            let bars: Vec<Bar> = bars.collect();
            let words: Vec<&str> = bars.iter().map(|bar| bar.title.as_str()).collect();
            let told = show::cut(&words.join("; "), 300).0;
            // The time between a step and its undo is not its own.
            let spent =
                lane.stretches.iter().map(|stretch| stretch.to.unwrap_or(end).duration_since(stretch.from));
            let took = spent.fold(SignedDuration::ZERO, |sum, spent| sum.saturating_add(spent));
            let took = (!bars.is_empty()).then(|| show::exact(took));
            Lines { name: lane.name.clone(), kind: lane.kind.clone(), told, bars, took }
        };
        let steps = &self.lanes[1..];
        let left_out = steps.len().saturating_sub(ROWS);
        let ticks =
            (0..=4).map(|part| show::exact(scale.time(WIDTH * f64::from(part) / 4.0).duration_since(start)));
        Picture {
            own: draw(&self.lanes[0]),
            rows: steps[left_out..].iter().map(draw).collect(),
            left_out,
            ticks: ticks.collect(),
            folded: scale.folded,
        }
    }
}

/// Where in the picture a time is. A task can wait for a day and work for a second: when waiting would take most of the room, it is
/// drawn shorter than it was.
struct Scale {
    /// From when on, where that is, and how wide a second is from there.
    pieces: Vec<(Timestamp, f64, f64)>,
    end: Timestamp,
    folded: bool,
}

impl Scale {
    fn new(own: &[Stretch], start: Timestamp, end: Timestamp) -> Self {
        let idle = |stretch: &Stretch| matches!(stretch.spent, Spent::Wait | Spent::Queued);
        let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).as_secs_f64().max(0.0);
        let waited: f64 = own
            .iter()
            .filter(|stretch| idle(stretch))
            .map(|stretch| seconds(stretch.from, stretch.to.unwrap_or(end)))
            .sum();
        let whole = seconds(start, end).max(0.001);
        let worked = whole - waited;
        let most = worked * WAITING / (1.0 - WAITING);
        let folded = worked > 0.0 && waited > most;
        let weight = if folded { most / waited } else { 1.0 };
        let wide = WIDTH / (worked + waited * weight).max(0.001);
        let (mut pieces, mut at) = (vec![(start, 0.0, wide)], 0.0);
        let mut before = start;
        for stretch in own {
            at += seconds(before, stretch.from) * pieces.last().map_or(wide, |(_, _, wide)| *wide);
            before = stretch.from;
            pieces.push((stretch.from, at, if idle(stretch) { wide * weight } else { wide }));
        }
        if let Some(to) = own.last().and_then(|last| last.to) {
            at += seconds(before, to) * pieces.last().map_or(wide, |(_, _, wide)| *wide);
            pieces.push((to, at, wide));
        }
        Self { pieces, end, folded }
    }

    fn place(&self, time: Timestamp) -> f64 {
        let piece = self.pieces.iter().rev().find(|(from, ..)| *from <= time).or(self.pieces.first());
        let place = piece.map_or(0.0, |(from, at, wide)| at + time.duration_since(*from).as_secs_f64() * wide);
        place.clamp(0.0, WIDTH)
    }

    /// The time at a place.
    fn time(&self, place: f64) -> Timestamp {
        let piece = self.pieces.iter().rev().find(|(_, at, _)| *at <= place);
        let time = piece.and_then(|(from, at, wide)| {
            let after = SignedDuration::try_from_secs_f64((place - at) / wide).ok()?;
            from.checked_add(after).ok()
        });
        time.unwrap_or(self.end).min(self.end)
    }
}

/// What is drawn.
pub(super) struct Picture {
    pub(super) own: Lines,
    pub(super) rows: Vec<Lines>,
    /// How many older rows are not shown.
    pub(super) left_out: usize,
    pub(super) ticks: Vec<String>,
    /// Whether waiting is drawn shorter than it was.
    pub(super) folded: bool,
}

/// A row of the picture.
pub(super) struct Lines {
    pub(super) name: String,
    pub(super) kind: String,
    /// The bars in words, for those who cannot see them.
    pub(super) told: String,
    pub(super) bars: Vec<Bar>,
    pub(super) took: Option<String>,
}

/// A stretch of time in the picture.
pub(super) struct Bar {
    pub(super) x: String,
    pub(super) width: String,
    pub(super) class: &'static str,
    pub(super) live: bool,
    pub(super) title: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul::TaskId;
    use serde_json::json;

    fn second(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).expect("a time")
    }

    fn event(at: i64, kind: &str, step: Option<&str>, data: Value) -> Event {
        let step = step.map(str::to_owned);
        Event { seq: 1, task_id: TaskId::new(), kind: kind.to_owned(), time: second(at), run: 1, step, data }
    }

    fn classes(lines: &Lines) -> Vec<&'static str> {
        lines.bars.iter().map(|bar| bar.class).collect()
    }

    #[test]
    fn tries_pauses_waits_and_undos_are_told_apart() {
        let mut timeline = Timeline::new();
        for event in [
            event(0, "task.submitted", None, json!({})),
            event(1, "task.started", None, json!({})),
            event(1, "step.started", Some("dns"), json!({"attempt": 1})),
            event(2, "step.failed", Some("dns"), json!({"attempt": 1, "retry_in_ms": 1000})),
            event(3, "step.started", Some("dns"), json!({"attempt": 2})),
            event(4, "step.completed", Some("dns"), json!({"attempt": 2})),
            event(4, "approval.requested", Some("go"), json!({"id": "a"})),
            event(5, "task.waiting", None, json!({"kind": "approval", "id": "a"})),
            event(8, "approval.decided", None, json!({"id": "a"})),
            event(8, "task.resumed", None, json!({})),
            event(9, "task.started", None, json!({})),
            event(9, "step.started", Some("undo dns"), json!({"attempt": 1, "kind": "undo"})),
            event(10, "step.completed", Some("undo dns"), json!({"attempt": 1, "kind": "undo"})),
            event(10, "task.failed", None, json!({})),
        ] {
            timeline.read(&event);
        }
        let picture = timeline.picture(second(20));
        assert_eq!(classes(&picture.own), ["queued", "running", "wait", "queued", "running"]);
        assert_eq!(picture.rows.len(), 2, "the undo stands beside what it undoes");
        assert_eq!(classes(&picture.rows[0]), ["failed", "pause", "work", "undo"]);
        assert_eq!(classes(&picture.rows[1]), ["wait"]);
        assert!(picture.rows[0].told.contains("try 2"), "{}", picture.rows[0].told);
        assert!(picture.rows.iter().all(|row| row.bars.iter().all(|bar| !bar.live)));
    }

    #[test]
    fn what_a_lost_worker_did_is_shown_as_lost() {
        let mut timeline = Timeline::new();
        timeline.read(&event(0, "task.submitted", None, json!({})));
        timeline.read(&event(1, "task.started", None, json!({})));
        timeline.read(&event(1, "step.started", Some("pay"), json!({"attempt": 1})));
        timeline.read(&event(9, "task.started", None, json!({})));
        timeline.read(&event(9, "step.started", Some("pay"), json!({"attempt": 1})));
        let picture = timeline.picture(second(10));
        assert_eq!(classes(&picture.rows[0]), ["lost", "work"]);
        assert!(picture.rows[0].bars[1].live);
    }

    #[test]
    fn a_long_wait_leaves_room_for_the_work() {
        let mut timeline = Timeline::new();
        for event in [
            event(0, "task.submitted", None, json!({})),
            event(0, "task.started", None, json!({})),
            event(0, "step.started", Some("one"), json!({"attempt": 1})),
            event(2, "step.completed", Some("one"), json!({"attempt": 1})),
            event(2, "task.waiting", None, json!({"kind": "signal", "id": "go"})),
            event(100_000, "task.started", None, json!({})),
            event(100_000, "step.started", Some("two"), json!({"attempt": 1})),
            event(100_004, "step.completed", Some("two"), json!({"attempt": 1})),
            event(100_004, "task.completed", None, json!({})),
        ] {
            timeline.read(&event);
        }
        let picture = timeline.picture(second(100_004));
        let width = |row: usize| picture.rows[row].bars[0].width.parse::<f64>().expect("a number");
        assert!(picture.folded);
        assert!((width(0) - 200.0).abs() < 1.0 && (width(2) - 400.0).abs() < 1.0, "{} {}", width(0), width(2));
        assert!((width(1) - 400.0).abs() < 1.0, "the wait has what is left: {}", width(1));
        assert_eq!(picture.ticks.last().map(String::as_str), Some("1d 3h"));
    }

    #[test]
    fn a_bar_never_leaves_the_picture() {
        let mut timeline = Timeline::new();
        timeline.read(&event(0, "task.submitted", None, json!({})));
        timeline.read(&event(1_000_000, "step.started", Some("late"), json!({"attempt": 1})));
        timeline.read(&event(1_000_000, "step.completed", Some("late"), json!({"attempt": 1})));
        let bar = &timeline.picture(second(1_000_000)).rows[0].bars[0];
        let (x, width): (f64, f64) = (bar.x.parse().expect("a number"), bar.width.parse().expect("a number"));
        assert!(x + width <= WIDTH + 0.2 && width >= NARROWEST, "{x} {width}");
    }
}
