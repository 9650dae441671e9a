//! JSON schemas of what tools take and give, made of the descriptions that the OpenAPI document is made of.

use rmcp::model::JsonObject;
use serde_json::{Map, Value};
use utoipa::ToSchema;

const COMPONENTS: &str = "#/components/schemas/";

/// The schema of an object, complete in itself.
pub(super) fn schema<T: ToSchema>() -> JsonObject {
    let mut further = Vec::new();
    T::schemas(&mut further);
    let parts: Map<String, Value> = further.into_iter().map(|(name, part)| (name, json(part))).collect();
    let mut schema = match json(T::schema()) {
        Value::Object(schema) => schema,
        _ => Map::new(),
    };
    // One that is composed of others does not say it by itself.
    schema.entry("type").or_insert_with(|| "object".into());
    if !parts.is_empty() {
        schema.insert("$defs".to_owned(), Value::Object(parts));
    }
    schema
}

/// A description as JSON, its references pointing into the schema it becomes a part of.
fn json(part: impl serde::Serialize) -> Value {
    // Made of types that always serialise.
    let mut part = serde_json::to_value(part).unwrap_or_default();
    redirect(&mut part);
    part
}

fn redirect(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if let Some(Value::String(target)) = members.get_mut("$ref")
                && let Some(name) = target.strip_prefix(COMPONENTS)
            {
                *target = format!("#/$defs/{name}");
            }
            members.values_mut().for_each(redirect);
        }
        Value::Array(elements) => elements.iter_mut().for_each(redirect),
        _ => {}
    }
}
