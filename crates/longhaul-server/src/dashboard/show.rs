//! Values as people read them. Pure.

use std::fmt;

use askama::filters::HtmlSafe;
use jiff::{SignedDuration, Timestamp};
use longhaul::{State, Task, TaskId};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use serde_json::value::RawValue;

/// What stays as it is in a query.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// A value in a query, or a segment of a path.
pub(super) fn query_value(text: &str) -> String {
    utf8_percent_encode(text, QUERY).to_string()
}

/// A time: how long ago, or in how long; the browser keeps it up to date.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    at: Timestamp,
    now: Timestamp,
}

impl Moment {
    pub(super) fn new(at: Timestamp, now: Timestamp) -> Self {
        Self { at, now }
    }

    fn text(self) -> String {
        let span = self.now.duration_since(self.at);
        match span.as_secs() {
            0 => "now".to_owned(),
            1.. => format!("{} ago", rough(span)),
            _ => format!("in {}", rough(span.abs())),
        }
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = self.at.strftime("%Y-%m-%d %H:%M:%S UTC");
        let iso = self.at.strftime("%Y-%m-%dT%H:%M:%S.%3fZ");
        write!(f, "<time datetime=\"{iso}\" title=\"{full}\" data-ago>{}</time>", self.text())
    }
}

// Made of a time alone.
impl HtmlSafe for Moment {}

/// A time of day, with the day when it is another one; the browser shows it in its own time zone.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    at: Timestamp,
    now: Timestamp,
}

impl Clock {
    fn text(self) -> String {
        let same_day = self.at.strftime("%F").to_string() == self.now.strftime("%F").to_string();
        let format = if same_day { "%H:%M:%S UTC" } else { "%b %-d, %H:%M UTC" };
        self.at.strftime(format).to_string()
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = self.at.strftime("%Y-%m-%d %H:%M:%S UTC");
        let iso = self.at.strftime("%Y-%m-%dT%H:%M:%S.%3fZ");
        write!(f, "<time datetime=\"{iso}\" title=\"{full}\" data-clock>{}</time>", self.text())
    }
}

// Made of a time alone.
impl HtmlSafe for Clock {}

/// A state in its colour.
#[derive(Clone, Copy)]
pub(super) struct Badge(pub(super) &'static str);

impl Badge {
    pub(super) fn of(task: &Task) -> Self {
        match (task.state, task.phase) {
            (State::Running, longhaul::task::Phase::Compensating) => Self("undoing"),
            (state, _) => Self(state.name()),
        }
    }
}

impl fmt::Display for Badge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<span class=\"badge {0}\"><i></i>{0}</span>", self.0)
    }
}

// Made of words of this program alone.
impl HtmlSafe for Badge {}

/// A length of time at a glance: two figures.
pub(super) fn rough(span: SignedDuration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h {:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// A length of time as exactly as it matters.
pub(super) fn exact(span: SignedDuration) -> String {
    let ms = span.as_millis().max(0);
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..10_000 => format!("{:.2} s", ms as f64 / 1e3),
        10_000..60_000 => format!("{:.1} s", ms as f64 / 1e3),
        60_000..3_600_000 => format!("{}m {:02}s", ms / 60_000, ms / 1_000 % 60),
        _ => rough(span),
    }
}

pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0..1_024 => format!("{bytes} B"),
        1_024..1_048_576 => format!("{:.1} kB", bytes as f64 / 1_024.0),
        _ => format!("{:.1} MB", bytes as f64 / 1_048_576.0),
    }
}

/// A number in at most four characters.
pub(super) fn compact(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        1_000..10_000 => format!("{:.1}k", number as f64 / 1e3),
        10_000..1_000_000 => format!("{}k", number / 1_000),
        _ => format!("{:.1}M", number as f64 / 1e6),
    }
}

/// A number with its thousands apart.
pub(super) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut shown = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

pub(super) fn dollars(dollars: f64) -> String {
    if dollars >= 1.0 || dollars == 0.0 { format!("${dollars:.2}") } else { format!("${dollars:.4}") }
}

/// What a task has cost, if it says.
pub(super) fn cost(task: &Task) -> Option<String> {
    task.usage.as_ref()?.get("cost_usd")?.as_f64().map(dollars)
}

/// How many tokens a task has used, if it says.
pub(super) fn tokens(task: &Task) -> Option<u64> {
    task.usage.as_ref().and_then(sum_of_tokens)
}

fn sum_of_tokens(usage: &Value) -> Option<u64> {
    let of = |name: &str| usage.get(name).and_then(Value::as_u64);
    match (of("input_tokens"), of("output_tokens")) {
        (None, None) => None,
        // A handler may say anything.
        (input, output) => Some(input.unwrap_or(0).saturating_add(output.unwrap_or(0))),
    }
}

/// The first line of a JSON value, at most so many characters.
pub(super) fn line(value: &RawValue, most: usize) -> String {
    let text = match serde_json::from_str::<String>(value.get()) {
        Ok(text) => text,
        Err(_) => value.get().to_owned(),
    };
    let mut words = String::new();
    for word in text.split_whitespace() {
        if words.len() > most * 4 {
            break;
        }
        if !words.is_empty() {
            words.push(' ');
        }
        words.push_str(word);
    }
    cut(&words, most).0
}

/// At most so many characters, and whether something is missing.
pub(super) fn cut(text: &str, most: usize) -> (String, bool) {
    match text.char_indices().nth(most) {
        Some((end, _)) => (format!("{}…", &text[..end]), true),
        None => (text.to_owned(), false),
    }
}

/// A JSON value over several lines, at most so many characters; a string as it is.
pub(super) fn pretty(value: &Value, most: usize) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        value => {
            let mut text = String::new();
            write_pretty(value, 0, &mut text);
            text
        }
    };
    cut(&text, most).0
}

/// How wide a line of JSON may be.
const LINE: usize = 80;

/// JSON of which only what does not fit on a line takes several.
fn write_pretty(value: &Value, indent: usize, text: &mut String) {
    // Whether it is short is found out by writing it, as far as there is room.
    let flat = flat(value, LINE.saturating_sub(indent));
    let (open, close, members): (_, _, Vec<(Option<&String>, &Value)>) = match (value, flat) {
        (_, Some(flat)) => return text.push_str(&flat),
        (Value::Array(values), None) => ('[', ']', values.iter().map(|value| (None, value)).collect()),
        (Value::Object(members), None) => {
            ('{', '}', members.iter().map(|(name, value)| (Some(name), value)).collect())
        }
        (value, None) => return text.push_str(&value.to_string()),
    };
    text.push(open);
    let count = members.len();
    for (place, (name, value)) in members.into_iter().enumerate() {
        text.push('\n');
        text.extend(std::iter::repeat_n(' ', indent + 2));
        if let Some(name) = name {
            text.push_str(&format!("{}: ", Value::from(name.as_str())));
        }
        write_pretty(value, indent + 2, text);
        if place + 1 < count {
            text.push(',');
        }
    }
    text.push('\n');
    text.extend(std::iter::repeat_n(' ', indent));
    text.push(close);
}

/// JSON on one line, if it is no longer than this.
fn flat(value: &Value, most: usize) -> Option<String> {
    let text = match value {
        Value::Array(values) => {
            let mut parts = Vec::new();
            let mut left = most;
            for value in values {
                let part = flat(value, left)?;
                left = left.checked_sub(part.len() + 2)?;
                parts.push(part);
            }
            format!("[{}]", parts.join(", "))
        }
        Value::Object(members) if members.is_empty() => "{}".to_owned(),
        Value::Object(members) => {
            let mut parts = Vec::new();
            let mut left = most;
            for (name, value) in members {
                let part = format!("{}: {}", Value::from(name.as_str()), flat(value, left)?);
                left = left.checked_sub(part.len() + 2)?;
                parts.push(part);
            }
            format!("{{ {} }}", parts.join(", "))
        }
        value => value.to_string(),
    };
    (text.len() <= most).then_some(text)
}

/// The same for JSON as it was kept.
pub(super) fn pretty_raw(value: &RawValue, most: usize) -> String {
    match serde_json::from_str::<Value>(value.get()) {
        Ok(value) => pretty(&value, most),
        Err(_) => cut(value.get(), most).0,
    }
}

/// A piece of a sentence.
pub(super) enum Piece {
    Text(String),
    Time(Clock),
    /// A task's id, and what is shown of it.
    Task(TaskId, String),
}

/// A sentence with its times and tasks made out.
pub(super) fn sentence(text: &str, now: Timestamp) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut plain = String::new();
    for word in text.split_inclusive(char::is_whitespace) {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        let piece = if bare.len() == 36 {
            bare.parse::<TaskId>().ok().map(|id| Piece::Task(id, short(id)))
        } else if bare.len() >= 20 && bare.ends_with('Z') {
            bare.parse::<Timestamp>().ok().map(|at| Piece::Time(Clock { at, now }))
        } else {
            None
        };
        match (piece, word.split_once(bare)) {
            (Some(piece), Some((before, after))) => {
                plain.push_str(before);
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
                pieces.push(piece);
                plain.push_str(after);
            }
            _ => plain.push_str(word),
        }
    }
    pieces.push(Piece::Text(plain));
    pieces
}

/// What tells a task from the others: the end of its id, which is random.
pub(super) fn short(id: TaskId) -> String {
    let id = id.to_string();
    id[id.len().saturating_sub(8)..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_tasks_of_a_sentence_are_made_out() {
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().expect("a time");
        let id = TaskId::new();
        let text = format!("It waits since 2026-01-01T00:05:00Z for task {id}; <b>soon</b>.");
        let shown: Vec<String> = sentence(&text, now)
            .into_iter()
            .map(|piece| match piece {
                Piece::Text(text) => text,
                Piece::Time(clock) => clock.text(),
                Piece::Task(_, short) => format!("[{short}]"),
            })
            .collect();
        assert_eq!(shown.concat(), format!("It waits since 00:05:00 UTC for task [{}]; <b>soon</b>.", short(id)));
    }

    #[test]
    fn json_is_shown_on_as_few_lines_as_can_be_read() {
        let short = serde_json::json!({"command": ["echo", "it"], "none": {}, "n": 1});
        assert_eq!(pretty(&short, 1_000), r#"{ "command": ["echo", "it"], "n": 1, "none": {} }"#);
        let long = serde_json::json!({"list": [1, [2, 3]], "text": "x".repeat(90)});
        let shown = pretty(&long, 1_000);
        assert_eq!(shown.lines().count(), 4, "{shown}");
        assert_eq!(serde_json::from_str::<Value>(&shown).expect("it is still JSON"), long);
        let deep = (0..200).fold(Value::from("x".repeat(100)), |inner, _| serde_json::json!([inner]));
        assert!(pretty(&deep, 100_000).contains("xxx"));
    }

    #[test]
    fn tokens_beyond_all_numbers_are_the_largest_one() {
        let most = serde_json::json!({"input_tokens": u64::MAX, "output_tokens": u64::MAX});
        assert_eq!(
            [sum_of_tokens(&most), sum_of_tokens(&serde_json::json!({"output_tokens": 3}))],
            [Some(u64::MAX), Some(3)]
        );
        assert_eq!(sum_of_tokens(&serde_json::json!({"input_tokens": -1})), None);
    }

    #[test]
    fn values_are_shown_as_people_read_them() {
        assert_eq!(number(1_234_567), "1,234,567");
        assert_eq!(number(999), "999");
        assert_eq!(rough(SignedDuration::from_secs(3_725)), "1h 02m");
        assert_eq!(exact(SignedDuration::from_millis(1_250)), "1.25 s");
        assert_eq!(cut("äöü", 2), ("äö…".to_owned(), true));
        let input = RawValue::from_string(r#""two\nlines  here""#.to_owned()).expect("JSON");
        assert_eq!(line(&input, 100), "two lines here");
    }
}
