//! The JSON schema of a tool's arguments: compiled once, asked before anything runs.
//!
//! What does not fit is told in words for a model: where, what was wrong and what is wanted, in
//! about 1 KB at most. A schema can refer to its own parts only; nothing is ever fetched.

use jsonschema::{ValidationError, Validator};
use serde_json::{Map, Value, json};

use crate::artifact::cut_to;

/// Faults told at once; more would not help.
const MAX_FAULTS: usize = 5;
const MAX_FAULT_BYTES: usize = 160;
const MAX_WANTED_BYTES: usize = 400;

/// The schema of a tool that takes no arguments.
pub(crate) fn none() -> Value {
    json!({"type": "object", "properties": {}, "additionalProperties": false})
}

/// Compiles a schema, or says why it cannot be one of arguments.
pub(crate) fn compile(schema: &Value) -> Result<Validator, String> {
    if schema["type"] != "object" {
        return Err("must have type = \"object\": arguments are always an object".to_owned());
    }
    if let Some(remote) = remote_reference(schema) {
        let shown = cut_to(remote, 100).escape_debug();
        return Err(format!("refers to '{shown}', but only its own parts (#/$defs/…) can be referred to"));
    }
    jsonschema::options().offline().build(schema).map_err(|error| {
        let place = error.instance_path().as_str();
        let place = if place.is_empty() { String::new() } else { format!(" at {place}") };
        format!("is not a JSON schema{place}: {}", cut_to(&error.to_string(), MAX_FAULT_BYTES))
    })
}

/// A reference that leads out of the schema.
fn remote_reference(schema: &Value) -> Option<&str> {
    match schema {
        Value::Object(fields) => fields.iter().find_map(|(name, value)| match value {
            Value::String(target) if is_reference(name) && !target.starts_with('#') => Some(target.as_str()),
            other => remote_reference(other),
        }),
        Value::Array(items) => items.iter().find_map(remote_reference),
        _ => None,
    }
}

fn is_reference(keyword: &str) -> bool {
    matches!(keyword, "$ref" | "$dynamicRef" | "$recursiveRef")
}

/// The arguments that a model wrote, with the schema's defaults where it wrote nothing.
pub(crate) fn read(validator: &Validator, schema: &Value, written: &str) -> Result<Value, String> {
    let written = if written.trim().is_empty() { "{}" } else { written };
    let mut arguments: Value = serde_json::from_str(written)
        .map_err(|error| format!("The arguments are not JSON: {error}. {}", wanted(schema)))?;
    if let Value::Object(fields) = &mut arguments {
        fill_defaults(fields, schema);
    }
    let mut faults: Vec<String> =
        validator.iter_errors(&arguments).take(MAX_FAULTS + 1).map(|error| fault(&error)).collect();
    if faults.is_empty() {
        return Ok(arguments);
    }
    if faults.len() > MAX_FAULTS {
        faults[MAX_FAULTS] = "- and more".to_owned();
    }
    Err(format!("The arguments do not fit:\n{}\n{}", faults.join("\n"), wanted(schema)))
}

fn fill_defaults(arguments: &mut Map<String, Value>, schema: &Value) {
    let Some(properties) = schema["properties"].as_object() else { return };
    for (name, property) in properties {
        if let Some(default) = property.get("default")
            && !arguments.contains_key(name)
        {
            arguments.insert(name.clone(), default.clone());
        }
    }
}

fn fault(error: &ValidationError<'_>) -> String {
    let place = error.instance_path().as_str();
    let place = if place.is_empty() { "the arguments" } else { place };
    let what = error.to_string();
    let cut = cut_to(&what, MAX_FAULT_BYTES);
    // The end says what is wanted, the beginning what is there.
    let what = if cut.len() < what.len() {
        let masked = error.masked().to_string();
        format!("{}…", cut_to(&masked, MAX_FAULT_BYTES))
    } else {
        what
    };
    format!("- {}: {what}", cut_to(place, MAX_FAULT_BYTES))
}

fn wanted(schema: &Value) -> String {
    let text = schema.to_string();
    let cut = cut_to(&text, MAX_WANTED_BYTES);
    let more = if cut.len() < text.len() { "…" } else { "" };
    format!("Wanted is one JSON object that fits this schema: {cut}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(schema: Value, written: &str) -> Result<Value, String> {
        read(&compile(&schema).expect("a schema"), &schema, written)
    }

    fn paths() -> Value {
        json!({"type": "object", "required": ["path"], "additionalProperties": false,
               "properties": {"path": {"type": "string"}, "depth": {"type": "integer", "default": 2},
                              "kind": {"enum": ["file", "folder"]}}})
    }

    #[test]
    fn arguments_that_fit_are_given_with_the_defaults() {
        assert_eq!(told(paths(), r#"{"path": "/tmp"}"#), Ok(json!({"path": "/tmp", "depth": 2})));
        assert_eq!(told(none(), " "), Ok(json!({})));
        assert_eq!(told(none(), ""), Ok(json!({})));
    }

    #[test]
    fn a_model_is_told_where_what_was_wrong_and_what_is_wanted() {
        let said = told(paths(), r#"{"depth": "deep", "kind": "disk", "colour": 1}"#).expect_err("four faults");
        for part in [
            "- /depth: \"deep\" is not of type \"integer\"",
            "- /kind: \"disk\" is not one of",
            "\"path\" is a required property",
            "'colour' was unexpected",
            "Wanted is one JSON object that fits this schema: {",
        ] {
            assert!(said.contains(part), "{part} is not in {said}");
        }
        assert!(told(paths(), "{\"path\": ").expect_err("cut").starts_with("The arguments are not JSON: EOF"));
        assert!(told(paths(), "[1]").expect_err("a list").contains("is not of type \"object\""));
        assert!(told(none(), r#"{"x": 1}"#).is_err());
    }

    #[test]
    fn what_a_model_is_told_stays_short() {
        let long = "x".repeat(100_000);
        let written = json!({"path": [long], "depth": long, "kind": long}).to_string();
        let said = told(paths(), &written).expect_err("nothing fits");
        assert!(said.len() < 1_300, "{} bytes: {said}", said.len());
        assert!(said.contains("is not of type \"integer\""), "{said}");
    }

    #[test]
    fn a_schema_that_is_none_or_leads_elsewhere_is_refused() {
        let refused = |schema: Value| compile(&schema).expect_err("not usable");
        assert!(refused(json!({"type": "string"})).contains("type = \"object\""));
        assert!(refused(json!({})).contains("type = \"object\""));
        assert!(
            refused(json!({"type": "object", "properties": {"a": {"type": "strin"}}}))
                .contains("/properties/a/type")
        );
        let remote = json!({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}});
        assert!(refused(remote).contains("http://127.0.0.1:1/x.json"));
        let own = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "null"}}});
        assert_eq!(told(own, r#"{"a": null}"#), Ok(json!({"a": null})));
    }
}
