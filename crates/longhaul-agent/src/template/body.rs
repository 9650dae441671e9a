//! A JSON body with placeholders in its strings.

use longhaul::TaskError;
use serde_json::Value;

use super::{BadTemplate, Placeholder, Template};

/// JSON whose strings may have placeholders. A string that is exactly one placeholder becomes the
/// value itself, whatever its type; any other is rendered as text. So no value can change the
/// shape of the body around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    node: Node,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Text(Template),
    List(Vec<Node>),
    Fields(Vec<(String, Node)>),
    Plain(Value),
}

impl Body {
    /// Reads a value of a manifest.
    pub fn parse(value: Value) -> Result<Self, BadTemplate> {
        Ok(Self { node: Node::parse(value)? })
    }

    /// Its placeholders.
    pub fn placeholders(&self) -> Vec<&Placeholder> {
        let mut found = Vec::new();
        self.node.collect(&mut found);
        found
    }

    /// As it is written in a manifest.
    pub fn source(&self) -> Value {
        self.node.source()
    }

    /// Fills the placeholders.
    pub fn render(&self, values: &Value) -> Result<Value, TaskError> {
        self.node.render(values)
    }
}

impl Node {
    fn parse(value: Value) -> Result<Self, BadTemplate> {
        Ok(match value {
            Value::String(text) => Self::Text(Template::parse(&text)?),
            Value::Array(items) => Self::List(items.into_iter().map(Self::parse).collect::<Result<_, _>>()?),
            Value::Object(fields) => {
                let field = |(name, value)| Ok((name, Self::parse(value)?));
                Self::Fields(fields.into_iter().map(field).collect::<Result<_, _>>()?)
            }
            plain => Self::Plain(plain),
        })
    }

    fn collect<'a>(&'a self, found: &mut Vec<&'a Placeholder>) {
        match self {
            Self::Text(template) => found.extend(template.placeholders()),
            Self::List(items) => items.iter().for_each(|item| item.collect(found)),
            Self::Fields(fields) => fields.iter().for_each(|(_, field)| field.collect(found)),
            Self::Plain(_) => {}
        }
    }

    fn source(&self) -> Value {
        match self {
            Self::Text(template) => Value::String(template.to_string()),
            Self::List(items) => Value::Array(items.iter().map(Self::source).collect()),
            Self::Fields(fields) => {
                Value::Object(fields.iter().map(|(name, field)| (name.clone(), field.source())).collect())
            }
            Self::Plain(plain) => plain.clone(),
        }
    }

    fn render(&self, values: &Value) -> Result<Value, TaskError> {
        Ok(match self {
            Self::Text(template) => match template.whole() {
                Some(placeholder) => placeholder.value(values)?.clone(),
                None => Value::String(template.render(values)?),
            },
            Self::List(items) => {
                Value::Array(items.iter().map(|item| item.render(values)).collect::<Result<_, _>>()?)
            }
            Self::Fields(fields) => {
                let field = |(name, field): &(String, Node)| Ok((name.clone(), field.render(values)?));
                Value::Object(fields.iter().map(field).collect::<Result<_, TaskError>>()?)
            }
            Self::Plain(value) => value.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_string_that_is_one_placeholder_becomes_the_value_and_text_stays_text() {
        let body =
            Body::parse(json!({"app": "{{input.app}}", "text": "app {{input.app}}", "n": [3, "{{input.n}}"]}))
                .expect("a body");
        let values = json!({"input": {"app": "a\", \"admin\": \"yes", "n": {"deep": true}}});
        assert_eq!(
            body.render(&values).expect("all values are there"),
            json!({"app": "a\", \"admin\": \"yes", "text": "app a\", \"admin\": \"yes", "n": [3, {"deep": true}]})
        );
        assert_eq!(body.placeholders().len(), 3);
    }
}
