//! OpenAI chat completions, as OpenAI and the many others that offer them speak them.

use reqwest::header::{AUTHORIZATION, HeaderName};
use serde_json::{Map, Value, json};

use super::draft::{CALLS, Draft, DraftCall, merge_fields, object_text, take};
use super::environment::Variables;
use super::protocol::{Broken, Protocol};
use super::{Finish, Message, Request, anthropic};

pub(super) struct OpenAi;

/// OpenAI's own host: it wants a key, and has another name for the most tokens.
const HOST: &str = "api.openai.com";

/// The names of the part with the words, in a whole answer and in a piece of one.
const WHOLE: &str = "message";
const PIECE: &str = "delta";

impl Protocol for OpenAi {
    fn variables(&self) -> Variables {
        Variables {
            key: "OPENAI_API_KEY",
            key_file: "OPENAI_API_KEY_FILE",
            base_url: "OPENAI_BASE_URL",
            default_base_url: "https://api.openai.com/v1",
            key_needed_by: HOST,
        }
    }

    fn path(&self, _base_path: &str) -> &'static str {
        "chat/completions"
    }

    fn key_header(&self, key: &str) -> (HeaderName, String) {
        (AUTHORIZATION, format!("Bearer {key}"))
    }

    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    fn body(&self, request: &Request, stream: bool, host: &str) -> Value {
        let mut messages = Vec::with_capacity(request.messages.len() + 1);
        if !request.system.is_empty() {
            messages.push(json!({"role": "system", "content": request.system}));
        }
        messages.extend(request.messages.iter().map(message));
        let mut body = json!({"model": request.model, "messages": messages});
        if !request.tools.is_empty() {
            let tools = request.tools.iter().map(|tool| {
                let function =
                    json!({"name": tool.name, "description": tool.description, "parameters": tool.parameters});
                json!({"type": "function", "function": function})
            });
            body["tools"] = tools.collect();
        }
        if let Some(temperature) = request.temperature {
            body["temperature"] = temperature.into();
        }
        if let Some(limit) = request.max_tokens {
            let name = if host == HOST { "max_completion_tokens" } else { "max_tokens" };
            body[name] = limit.into();
        }
        if stream {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }

    fn whole(&self, answer: Value, draft: &mut Draft) -> Result<(), Broken> {
        let first = answer["choices"].get(0);
        if !first.is_some_and(|choice| choice[WHOLE].is_object()) {
            return Err(Broken("it has no message".to_owned()));
        }
        chunk(answer, WHOLE, draft)?;
        draft.ended = true;
        Ok(())
    }

    fn event(&self, event: Value, draft: &mut Draft) -> Result<(), Broken> {
        chunk(event, PIECE, draft)
    }
}

/// Takes a whole answer, or a piece of one.
fn chunk(mut value: Value, part: &str, draft: &mut Draft) -> Result<(), Broken> {
    if let (true, Some(model)) = (draft.model.is_empty(), value["model"].as_str()) {
        draft.model = model.to_owned();
    }
    // Some tell the usage with every piece, each time more.
    draft.input_tokens = value["usage"]["prompt_tokens"].as_u64().or(draft.input_tokens);
    draft.output_tokens = value["usage"]["completion_tokens"].as_u64().or(draft.output_tokens);
    let mut choices = take(&mut value, "choices");
    let Some(choice) = choices.get_mut(0) else { return Ok(()) };
    if let Value::Object(fields) = take(choice, part) {
        take_message(fields, part == WHOLE, draft)?;
    }
    if let Some(reason) = choice["finish_reason"].as_str().filter(|reason| !reason.is_empty()) {
        draft.finish = Some(finish(reason)?);
    }
    Ok(())
}

fn finish(reason: &str) -> Result<Finish, Broken> {
    Ok(match reason {
        "stop" => Finish::Stop,
        "tool_calls" | "function_call" => Finish::ToolCalls,
        "length" => Finish::Length,
        "content_filter" => Finish::Refused,
        "error" => return Err(Broken("the provider broke it off".to_owned())),
        other => Finish::Other(other.to_owned()),
    })
}

fn take_message(mut fields: Map<String, Value>, whole: bool, draft: &mut Draft) -> Result<(), Broken> {
    fields.remove("role");
    match fields.remove("content") {
        Some(Value::String(text)) => draft.text.push_str(&text),
        Some(Value::Array(parts)) => {
            draft.text.extend(parts.iter().filter_map(|part| part["text"].as_str()));
        }
        _ => {}
    }
    if let Some(refusal) = fields.remove("refusal") {
        draft.refusal.push_str(refusal.as_str().unwrap_or_default());
    }
    if let Some(Value::Array(calls)) = fields.remove("tool_calls") {
        for call in calls {
            let Value::Object(call) = call else {
                return Err(Broken("one of its tool calls is no object".to_owned()));
            };
            take_call(call, whole, &mut draft.calls);
        }
    }
    merge_fields(&mut draft.extra, fields);
    Ok(())
}

fn take_call(mut fields: Map<String, Value>, whole: bool, calls: &mut Vec<DraftCall>) {
    let index = fields.remove("index").and_then(|index| index.as_u64());
    let text = |value: Option<Value>| match value {
        Some(Value::String(text)) => text,
        _ => String::new(),
    };
    let id = text(fields.remove("id"));
    fields.remove("type");
    let mut function = match fields.remove("function") {
        Some(Value::Object(function)) => function,
        _ => Map::new(),
    };
    let name = text(function.remove("name"));
    let arguments = match function.remove("arguments") {
        Some(Value::String(text)) => text,
        Some(Value::Null) | None => String::new(),
        // Some give the arguments as what they are, not as text.
        Some(object) => object.to_string(),
    };
    let begun = if whole { None } else { find(calls, index, &id, &name) };
    let place = begun.unwrap_or_else(|| {
        calls.push(DraftCall { index, ..DraftCall::default() });
        calls.len() - 1
    });
    let call = &mut calls[place];
    if call.id.is_empty() {
        call.id = id;
    }
    // Told again with each piece by some, in pieces by others.
    if call.name != name {
        call.name.push_str(&name);
    }
    call.arguments.push_str(&arguments);
    merge_fields(&mut call.extra, fields);
}

/// The call that a piece belongs to. Some providers do not count the calls, and some give each the
/// same number: then a new id, or without ids a new name, begins a new call.
fn find(calls: &[DraftCall], index: Option<u64>, id: &str, name: &str) -> Option<usize> {
    let place = match index {
        Some(_) => calls.iter().rposition(|call| call.index == index)?,
        None => calls.len().checked_sub(1)?,
    };
    let call = &calls[place];
    let other_id = !id.is_empty() && !call.id.is_empty() && id != call.id;
    let new_name = index.is_none() && id.is_empty() && !name.is_empty();
    (!other_id && !new_name).then_some(place)
}

fn message(message: &Message) -> Value {
    match message {
        Message::User { text } => json!({"role": "user", "content": text}),
        Message::Assistant { text, tool_calls, extra } => {
            let unknown = |name: &str| ![CALLS, anthropic::BLOCKS].contains(&name);
            let mut message: Map<String, Value> = extra
                .iter()
                .filter(|(name, _)| unknown(name))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect();
            message.insert("role".to_owned(), "assistant".into());
            let nothing = || if tool_calls.is_empty() { "".into() } else { Value::Null };
            message.insert("content".to_owned(), text.clone().map_or_else(nothing, Value::from));
            if !tool_calls.is_empty() {
                let calls = tool_calls.iter().map(|call| {
                    let mut fields = match extra.get(CALLS).and_then(|calls| calls.get(&call.id)) {
                        Some(Value::Object(fields)) => fields.clone(),
                        _ => Map::new(),
                    };
                    fields.insert("id".to_owned(), call.id.clone().into());
                    fields.insert("type".to_owned(), "function".into());
                    let function = json!({"name": call.name, "arguments": object_text(&call.arguments)});
                    fields.insert("function".to_owned(), function);
                    Value::Object(fields)
                });
                message.insert("tool_calls".to_owned(), calls.collect());
            }
            Value::Object(message)
        }
        Message::ToolResult { call_id, name, content, failed: _ } => {
            json!({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_tokens_have_another_name_at_openai_itself() {
        let request = Request {
            model: "m".to_owned(),
            system: String::new(),
            messages: Vec::new(),
            tools: Vec::new(),
            temperature: None,
            max_tokens: Some(7),
        };
        let at = |host: &str| OpenAi.body(&request, false, host);
        assert_eq!(at(HOST), json!({"model": "m", "messages": [], "max_completion_tokens": 7}));
        assert_eq!(at("localhost"), json!({"model": "m", "messages": [], "max_tokens": 7}));
    }
}
