//! Typed values out of a TOML table; what does not fit is reported where it stands.

use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use jiff::SignedDuration;
use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::Report;

/// The longest time a manifest may name.
const MAX_DURATION: Duration = Duration::from_secs(3_650 * 86_400);

/// A key that a table may have, and how it looks when it is right.
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) example: &'static str,
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Found<T> {
    pub(super) value: T,
    pub(super) at: Range<usize>,
}

/// A table whose keys are known.
pub(super) struct Table<'r, 't> {
    pub(super) report: &'r Report<'t>,
    /// How it is called in problems: `[saga]`, `[[step]]`.
    name: &'static str,
    entries: &'r DeTable<'t>,
    keys: &'static [Key],
    /// Where it begins.
    pub(super) at: Range<usize>,
}

impl<'r, 't> Table<'r, 't> {
    /// Reports the keys that it should not have.
    pub(super) fn new(
        report: &'r Report<'t>,
        name: &'static str,
        at: Range<usize>,
        entries: &'r DeTable<'t>,
        keys: &'static [Key],
    ) -> Self {
        for (key, _) in entries.iter() {
            let found = key.get_ref();
            if keys.iter().any(|known| known.name == found) {
                continue;
            }
            let names = keys.iter().map(|known| known.name);
            let remedy = match nearest(found, names.clone()) {
                Some(near) => format!("did you mean '{near}'?"),
                None => format!("{name} may have {}", names.collect::<Vec<_>>().join(", ")),
            };
            report.problem(key.span(), format!("unknown key '{}' in {name}", found.escape_debug()), remedy);
        }
        Self { report, name, entries, keys, at }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.place(key).is_some()
    }

    /// The value of a key that may be of several kinds, and where it stands.
    pub(super) fn any(&self, key: &str) -> Option<Found<&'r DeValue<'t>>> {
        self.get(key).map(|value| Found { value: value.get_ref(), at: value.span() })
    }

    /// Where a key stands.
    pub(super) fn place(&self, key: &str) -> Option<Range<usize>> {
        self.entries.iter().find(|(found, _)| found.get_ref() == key).map(|(found, _)| found.span())
    }

    fn get(&self, key: &str) -> Option<&'r Spanned<DeValue<'t>>> {
        self.entries.iter().find(|(found, _)| found.get_ref() == key).map(|(_, value)| value)
    }

    /// A key that must be there is not.
    pub(super) fn missing(&self, key: &str, why: &str) {
        self.report.problem(
            self.at.clone(),
            format!("{} has no '{key}'{why}", self.name),
            format!("add a line like {}", self.example(key)),
        );
    }

    fn example(&self, key: &str) -> &'static str {
        self.keys.iter().find(|known| known.name == key).map_or("", |known| known.example)
    }

    fn wrong(&self, key: &str, at: Range<usize>, wanted: &str, found: &DeValue<'_>) {
        self.report.problem(
            at,
            format!("'{key}' must be {wanted}, not {}", kind(found)),
            format!("write it like {}", self.example(key)),
        );
    }

    /// Something is wrong with the value of a key.
    pub(super) fn bad(&self, key: &str, at: Range<usize>, problem: impl std::fmt::Display) {
        self.report.problem(at, format!("'{key}' {problem}"), format!("write it like {}", self.example(key)));
    }

    pub(super) fn string(&self, key: &str) -> Option<Found<&'r str>> {
        let value = self.get(key)?;
        match value.get_ref() {
            DeValue::String(text) => Some(Found { value: text, at: value.span() }),
            other => {
                self.wrong(key, value.span(), "a string", other);
                None
            }
        }
    }

    /// One of several words.
    pub(super) fn word<T: Copy>(&self, key: &str, words: &[(&'static str, T)]) -> Option<T> {
        self.one_of(key, &self.string(key)?, words)
    }

    /// Several of several words; `None` when one of them is not among those.
    pub(super) fn words<T: Copy>(&self, key: &str, words: &[(&'static str, T)]) -> Option<Vec<T>> {
        let found = self.strings(key)?;
        let all: Vec<Option<T>> = found.iter().map(|found| self.one_of(key, found, words)).collect();
        all.into_iter().collect()
    }

    fn one_of<T: Copy>(&self, key: &str, found: &Found<&str>, words: &[(&'static str, T)]) -> Option<T> {
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == found.value) {
            return Some(*value);
        }
        let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let near = nearest(found.value, all.iter().copied());
        self.report.problem(
            found.at.clone(),
            format!("'{key}' is '{}', which is none of {}", found.value.escape_debug(), all.join(", ")),
            near.map_or_else(
                || format!("write it like {}", self.example(key)),
                |near| format!("did you mean '{near}'?"),
            ),
        );
        None
    }

    pub(super) fn strings(&self, key: &str) -> Option<Vec<Found<&'r str>>> {
        let value = self.get(key)?;
        let DeValue::Array(items) = value.get_ref() else {
            self.wrong(key, value.span(), "a list of strings", value.get_ref());
            return None;
        };
        let mut strings = Vec::new();
        for item in items.iter() {
            let DeValue::String(text) = item.get_ref() else {
                self.wrong(key, item.span(), "a list of strings only", item.get_ref());
                return None;
            };
            strings.push(Found { value: text.as_ref(), at: item.span() });
        }
        Some(strings)
    }

    pub(super) fn table(&self, key: &str) -> Option<Found<&'r DeTable<'t>>> {
        let value = self.get(key)?;
        match value.get_ref() {
            DeValue::Table(table) => Some(Found { value: table, at: value.span() }),
            other => {
                self.wrong(key, value.span(), "a table", other);
                None
            }
        }
    }

    /// Any value, as JSON.
    pub(super) fn json(&self, key: &str) -> Option<Found<Value>> {
        let value = self.get(key)?;
        match json(value.get_ref()) {
            Some(json) => Some(Found { value: json, at: value.span() }),
            None => {
                self.bad(key, value.span(), "has a number or date that JSON cannot hold");
                None
            }
        }
    }

    pub(super) fn boolean(&self, key: &str) -> Option<bool> {
        let value = self.get(key)?;
        match value.get_ref() {
            DeValue::Boolean(flag) => Some(*flag),
            other => {
                self.wrong(key, value.span(), "true or false", other);
                None
            }
        }
    }

    /// A whole number in a range.
    pub(super) fn whole(&self, key: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.get(key)?;
        let DeValue::Integer(number) = value.get_ref() else {
            self.wrong(key, value.span(), "a whole number", value.get_ref());
            return None;
        };
        let whole = u64::from_str_radix(number.as_str(), number.radix()).ok();
        if whole.is_none_or(|whole| !range.contains(&whole)) {
            let (least, most) = range.into_inner();
            self.bad(key, value.span(), format_args!("is {number}; it must be {least} to {most}"));
            return None;
        }
        whole
    }

    /// A number in a range, whole or not.
    pub(super) fn number(&self, key: &str, range: RangeInclusive<f64>) -> Option<f64> {
        let value = self.get(key)?;
        let number = match value.get_ref() {
            DeValue::Integer(number) => number.as_str(),
            DeValue::Float(number) => number.as_str(),
            other => {
                self.wrong(key, value.span(), "a number", other);
                return None;
            }
        };
        let parsed = number.parse::<f64>().ok().filter(|parsed| range.contains(parsed));
        if parsed.is_none() {
            let (least, most) = range.into_inner();
            self.bad(key, value.span(), format_args!("is {number}; it must be {least} to {most}"));
        }
        parsed
    }

    /// How many tries, from 1 to 1000.
    pub(super) fn attempts(&self, key: &str) -> Option<u32> {
        let value = self.get(key)?;
        let DeValue::Integer(number) = value.get_ref() else {
            self.wrong(key, value.span(), "a whole number", value.get_ref());
            return None;
        };
        match u32::from_str_radix(number.as_str(), number.radix()) {
            Ok(attempts @ 1..=1_000) => Some(attempts),
            _ => {
                self.bad(key, value.span(), format_args!("is {number}; it must be 1 to 1000 (tries in all)"));
                None
            }
        }
    }

    /// A time like `30s` or `1h 30m`.
    pub(super) fn duration(&self, key: &str) -> Option<Duration> {
        let found = self.string(key)?;
        let parsed: Result<SignedDuration, _> = found.value.parse();
        let problem = match parsed.map(Duration::try_from) {
            Ok(Ok(duration)) if duration > MAX_DURATION => "is more than ten years",
            Ok(Ok(duration)) if !duration.is_zero() => return Some(duration),
            Ok(_) => "must be more than nothing",
            Err(_) => "is not a time",
        };
        let shown = found.value.escape_debug();
        self.report.problem(
            found.at,
            format!("'{key}' {problem}: '{shown}'"),
            "write hours, minutes and seconds, like \"24h\", \"5m\", \"30s\" or \"1h 30m\"",
        );
        None
    }
}

/// The known name that was probably meant.
pub fn nearest<'n>(found: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let distance = |name: &str| strsim::damerau_levenshtein(&found.to_lowercase(), name);
    let near = known.into_iter().map(|name| (distance(name), name)).min()?;
    // A third of the letters may be wrong, and one in any case.
    (near.0 <= (near.1.len() / 3).max(1)).then_some(near.1)
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// A TOML value as JSON; `None` when it has a date or a number that JSON cannot hold.
pub fn json(value: &DeValue<'_>) -> Option<Value> {
    Some(match value {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix()).ok()?.into(),
        DeValue::Float(number) => serde_json::Number::from_f64(number.as_str().parse().ok()?)?.into(),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(_) => return None,
        DeValue::Array(items) => {
            Value::Array(items.iter().map(|item| json(item.get_ref())).collect::<Option<_>>()?)
        }
        DeValue::Table(fields) => Value::Object(
            fields
                .iter()
                .map(|(name, field)| Some((name.get_ref().to_string(), json(field.get_ref())?)))
                .collect::<Option<_>>()?,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_one_that_could_have_been_meant() {
        let keys = ["attempts", "command", "effect", "env", "name"];
        assert_eq!(nearest("atempts", keys), Some("attempts"));
        assert_eq!(nearest("Command", keys), Some("command"));
        assert_eq!(nearest("evn", keys), Some("env"));
        assert_eq!(nearest("colour", keys), None);
    }
}
