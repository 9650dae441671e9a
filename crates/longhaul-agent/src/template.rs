//! Placeholders in the strings of a manifest: `{{input.app}}`, `{{steps.create_dns.result.id}}`.
//!
//! A string is parsed once, when the manifest is read, and rendered against JSON for every call. A
//! value that is a string is put in as it is, any other as compact JSON. What a value contains is
//! never read as a placeholder. A literal `{{` is written `{{{{`.
//!
//! `template/body.rs` does the same for a whole JSON body. No I/O here.

use std::fmt;

use longhaul::TaskError;
use serde_json::Value;

mod body;

pub use body::Body;

/// Names listed in an error, at most.
const MAX_NAMES: usize = 12;

/// A string with placeholders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Value(Placeholder),
}

/// What stands between `{{` and `}}`: a path into JSON, by field names and list positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placeholder {
    path: Vec<String>,
}

/// Why a string cannot be a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadTemplate {
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl Template {
    /// Reads a string of a manifest.
    ///
    /// ```
    /// use longhaul_agent::Template;
    /// use serde_json::json;
    ///
    /// let template = Template::parse("{{input.app}}.example.com").unwrap();
    /// let values = json!({"input": {"app": "shop"}});
    /// assert_eq!(template.render(&values).unwrap(), "shop.example.com");
    /// ```
    pub fn parse(text: &str) -> Result<Self, BadTemplate> {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(open) = rest.find("{{") {
            plain.push_str(&rest[..open]);
            rest = &rest[open + 2..];
            if let Some(after) = rest.strip_prefix("{{") {
                plain.push_str("{{");
                rest = after;
                continue;
            }
            let Some(close) = rest.find("}}") else {
                return Err(BadTemplate {
                    message: format!("the placeholder '{{{{{}' has no end", rest.escape_debug()),
                    remedy: "close it with }}, or write {{{{ for a literal {{".to_owned(),
                });
            };
            if !plain.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut plain)));
            }
            parts.push(Part::Value(Placeholder::parse(&rest[..close])?));
            rest = &rest[close + 2..];
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Self { parts })
    }

    /// Its placeholders, in order.
    pub fn placeholders(&self) -> impl Iterator<Item = &Placeholder> {
        self.parts.iter().filter_map(|part| match part {
            Part::Value(placeholder) => Some(placeholder),
            Part::Text(_) => None,
        })
    }

    /// The placeholder that is all there is, when the string is exactly one.
    fn whole(&self) -> Option<&Placeholder> {
        match self.parts.as_slice() {
            [Part::Value(placeholder)] => Some(placeholder),
            _ => None,
        }
    }

    /// Fills the placeholders.
    pub fn render(&self, values: &Value) -> Result<String, TaskError> {
        self.render_by(|placeholder, _| placeholder.text(values))
    }

    /// Fills the placeholders with what `text` gives for each, which is also told what stands
    /// before it.
    pub fn render_by(
        &self,
        mut text: impl FnMut(&Placeholder, &str) -> Result<String, TaskError>,
    ) -> Result<String, TaskError> {
        let mut rendered = String::new();
        for part in &self.parts {
            match part {
                Part::Text(plain) => rendered.push_str(plain),
                Part::Value(placeholder) => {
                    let value = text(placeholder, &rendered)?;
                    rendered.push_str(&value);
                }
            }
        }
        Ok(rendered)
    }
}

/// As it is written in a manifest.
impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.iter().try_for_each(|part| match part {
            Part::Text(plain) => f.write_str(&plain.replace("{{", "{{{{")),
            Part::Value(placeholder) => placeholder.fmt(f),
        })
    }
}

impl Placeholder {
    fn parse(text: &str) -> Result<Self, BadTemplate> {
        let path: Vec<String> = text.trim().split('.').map(str::to_owned).collect();
        let bad = |name: &String| {
            name.is_empty() || name.chars().any(|c| c.is_whitespace() || c.is_control() || "{}".contains(c))
        };
        if path.iter().any(bad) {
            return Err(BadTemplate {
                message: format!("'{{{{{}}}}}' is not a placeholder", text.escape_debug()),
                remedy: "write names with dots between them, like {{input.app}}; a literal {{ is written {{{{"
                    .to_owned(),
            });
        }
        Ok(Self { path })
    }

    /// The names it is made of.
    pub fn path(&self) -> &[String] {
        &self.path
    }

    /// The value it stands for.
    pub fn value<'v>(&self, values: &'v Value) -> Result<&'v Value, TaskError> {
        let mut at = values;
        for (depth, name) in self.path.iter().enumerate() {
            let next = match at {
                Value::Object(fields) => fields.get(name),
                Value::Array(items) => name.parse::<usize>().ok().and_then(|position| items.get(position)),
                _ => None,
            };
            at = next.ok_or_else(|| self.missing(depth, at))?;
        }
        Ok(at)
    }

    /// Its value as text: a string as it is, anything else as compact JSON.
    pub fn text(&self, values: &Value) -> Result<String, TaskError> {
        Ok(match self.value(values)? {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        })
    }

    /// The path ends at `there`, before the name at `depth`.
    fn missing(&self, depth: usize, there: &Value) -> TaskError {
        let place = if depth == 0 { "there".to_owned() } else { self.path[..depth].join(".") };
        let what = match there {
            Value::Object(fields) if fields.is_empty() => format!("{place} has no fields"),
            Value::Object(fields) => {
                let more = if fields.len() > MAX_NAMES { ", …" } else { "" };
                let names: Vec<&str> = fields.keys().take(MAX_NAMES).map(String::as_str).collect();
                format!("{place} has only {}{more}", names.join(", "))
            }
            Value::Array(items) if items.is_empty() => format!("{place} is an empty list"),
            Value::Array(items) => format!("{place} is a list with positions 0 to {}", items.len() - 1),
            Value::Null => format!("{place} is null"),
            Value::Bool(_) => format!("{place} is true or false"),
            Value::Number(_) => format!("{place} is a number"),
            Value::String(_) => format!("{place} is a string"),
        };
        TaskError::fatal("placeholder_missing", format!("{self} has no value: {what}"))
            .detail("placeholder", self.to_string())
    }
}

impl fmt::Display for Placeholder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{{{}}}}}", self.path.join("."))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn render(text: &str, values: Value) -> String {
        Template::parse(text).expect("a template").render(&values).expect("all values are there")
    }

    fn missing(text: &str, values: Value) -> String {
        let error = Template::parse(text).expect("a template").render(&values).expect_err("a value is missing");
        assert_eq!((error.code.as_str(), error.retryable), ("placeholder_missing", false));
        error.message
    }

    #[test]
    fn strings_are_put_in_as_they_are_and_others_as_compact_json() {
        let values = json!({"input": {"s": "a \"b\"", "n": 1.5, "l": [1, {"x": null}], "t": true}});
        assert_eq!(render("<{{input.s}}>", values.clone()), "<a \"b\">");
        assert_eq!(render("{{input.n}}{{input.t}}", values.clone()), "1.5true");
        assert_eq!(render("{{ input.l }}", values.clone()), r#"[1,{"x":null}]"#);
        assert_eq!(render("{{input.l.1.x}}", values), "null");
    }

    #[test]
    fn a_value_that_looks_like_a_placeholder_is_not_one() {
        assert_eq!(render("{{input}}", json!({"input": "{{secret}}", "secret": 1})), "{{secret}}");
    }

    #[test]
    fn four_braces_are_two_literal_ones() {
        assert_eq!(render("{{{{.Names}} of {{input}}", json!({"input": "x"})), "{{.Names}} of x");
        assert_eq!(render("a } b }} c {", json!(null)), "a } b }} c {");
    }

    #[test]
    fn a_missing_value_names_the_placeholder_and_what_is_there() {
        let values = json!({"input": {"name": "x", "size": 3, "list": [1, 2], "none": {}, "empty": []}});
        assert_eq!(
            missing("{{input.app}}", values.clone()),
            "{{input.app}} has no value: input has only empty, list, name, none, size"
        );
        assert_eq!(
            missing("{{input.name.first}}", values.clone()),
            "{{input.name.first}} has no value: input.name is a string"
        );
        assert_eq!(
            missing("{{input.list.2}}", values.clone()),
            "{{input.list.2}} has no value: input.list is a list with positions 0 to 1"
        );
        assert_eq!(
            missing("{{input.none.a}}", values.clone()),
            "{{input.none.a}} has no value: input.none has no fields"
        );
        assert_eq!(
            missing("{{input.empty.0}}", values),
            "{{input.empty.0}} has no value: input.empty is an empty list"
        );
    }

    #[test]
    fn what_is_not_a_placeholder_is_refused_when_it_is_read() {
        for bad in
            ["{{", "x{{input", "{{}}", "{{ }}", "{{input..a}}", "{{.a}}", "{{a b}}", "{{input.{a}}", "{{{x}}"]
        {
            assert!(Template::parse(bad).is_err(), "{bad} was accepted");
        }
        let error = Template::parse("a {{input.app").expect_err("it has no end");
        assert_eq!(error.message, "the placeholder '{{input.app' has no end");
    }

    #[test]
    fn a_template_is_shown_as_it_was_written() {
        for text in ["{{input.a}}-{{b}}", "{{{{.Names}} of {{input}}", "plain }}", ""] {
            assert_eq!(Template::parse(text).expect("a template").to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn text_without_braces_stays_as_it_is(text in "[^{]*") {
            prop_assert_eq!(render(&text, Value::Null), text);
        }

        #[test]
        fn any_string_value_is_rendered_unchanged(value in any::<String>()) {
            prop_assert_eq!(render("{{v}}", json!({"v": value.clone()})), value);
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in any::<String>()) {
            let _ = Template::parse(&text);
        }
    }
}
