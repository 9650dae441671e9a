//! What the client commands do, one room for each group of them. They know the server's JSON and how to
//! show it; how to reach the server is in `http.rs`, following a task in `follow.rs`.

pub(crate) mod admin;
pub(crate) mod artifacts;
pub(crate) mod control;
pub(crate) mod doctor;
pub(crate) mod mcp;
pub(crate) mod people;
pub(crate) mod schedules;
pub(crate) mod shell;
pub(crate) mod submit;
pub(crate) mod tasks;
pub(crate) mod watch;

use std::io::Read;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

use crate::exit::Failure;
use crate::out;
use crate::units;

/// The server takes no more than this as input; reading more would be for nothing.
const MAX_INPUT_BYTES: u64 = 16 * 1024 * 1024;

/// An argument that may be `-` for stdin or `@FILE`.
pub(crate) fn text_of(argument: &str) -> Result<String, Failure> {
    let read = |from: &mut dyn Read, what: &str| {
        let mut text = String::new();
        from.take(MAX_INPUT_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(|error| Failure::usage(format!("cannot read {what}: {error}")))?;
        if text.len() as u64 > MAX_INPUT_BYTES {
            return Err(Failure::usage(format!("{what} has more than {MAX_INPUT_BYTES} bytes")));
        }
        Ok(text)
    };
    if argument == "-" {
        return read(&mut std::io::stdin().lock(), "stdin");
    }
    match argument.strip_prefix('@') {
        Some(path) if !path.is_empty() => {
            let mut file = std::fs::File::open(path).map_err(|error| {
                Failure::usage(format!(
                    "cannot read {path}: {error}; a text that begins with @ is given by stdin: -"
                ))
            })?;
            read(&mut file, path)
        }
        _ => Ok(argument.to_owned()),
    }
}

/// JSON if it can be read as such, else a text. A line end that a file or pipe added is not part of a text.
pub(crate) fn input_of(argument: &str) -> Result<Value, Failure> {
    let text = text_of(argument)?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|_| {
        let text = if text == argument { &text[..] } else { text.strip_suffix('\n').unwrap_or(&text) };
        Value::String(text.to_owned())
    }))
}

/// A text field, harmless and short enough for a cell; `-` when there is none.
pub(crate) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => out::short(text, 200),
        other => out::short(&other.to_string(), 200),
    }
}

/// A moment of the server's JSON: a timestamp, or microseconds.
pub(crate) fn moment(value: &Value) -> Option<Timestamp> {
    match value {
        Value::String(text) => text.parse().ok(),
        Value::Number(number) => Timestamp::from_microsecond(number.as_i64()?).ok(),
        _ => None,
    }
}

/// How long ago.
pub(crate) fn age(value: &Value) -> String {
    moment(value).map_or_else(|| "-".to_owned(), |then| units::brief(between(then, Timestamp::now())))
}

/// From one moment to another; nothing when it is the other way round.
pub(crate) fn between(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or_default()
}

/// A moment as it is here.
pub(crate) fn local(value: &Value) -> String {
    moment(value).map_or_else(
        || "-".to_owned(),
        |then| then.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string(),
    )
}

/// The list that stands under a name.
pub(crate) fn list<'v>(answer: &'v Value, name: &str) -> Result<&'v [Value], Failure> {
    let items = answer[name].as_array().or_else(|| answer.as_array());
    items.map(Vec::as_slice).ok_or_else(|| {
        Failure::internal(format!("the server's answer has no list of {name}; is it of another version?"))
    })
}

/// `1 task`, `2 tasks`
pub(crate) fn count(number: usize, one: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {one}s") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn input_is_json_if_it_can_be_read_as_json_and_else_a_text() {
        assert_eq!(input_of(r#"{"a": 1}"#).expect("read"), json!({"a": 1}));
        assert_eq!(input_of("42").expect("read"), json!(42));
        assert_eq!(input_of("Disk is full").expect("read"), json!("Disk is full"));
        assert_eq!(input_of("").expect("read"), json!(""));
        assert_eq!(input_of("@").expect("read"), json!("@"));
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("in");
        std::fs::write(&file, "[1]\n").expect("written");
        assert_eq!(input_of(&format!("@{}", file.display())).expect("read"), json!([1]));
        std::fs::write(&file, "two\nlines\n").expect("written");
        assert_eq!(input_of(&format!("@{}", file.display())).expect("read"), json!("two\nlines"));
        assert_eq!(input_of("@no/such/file").expect_err("there is none").code(), 2);
    }

    #[test]
    fn moments_are_read_in_both_forms() {
        assert_eq!(moment(&json!("1970-01-01T00:00:01Z")), moment(&json!(1_000_000)));
        assert_eq!(age(&Value::Null), "-");
    }
}
