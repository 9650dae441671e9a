//! The Anthropic Messages API.

use reqwest::header::HeaderName;
use serde_json::{Map, Value, json};

use super::draft::{Draft, DraftCall, merge, object, take};
use super::environment::Variables;
use super::protocol::{Broken, Protocol};
use super::{Finish, Message, Request};

pub(super) struct Anthropic;

/// Where the pieces of content that this program does not know (thinking) are kept in a message's
/// `extra`.
pub(super) const BLOCKS: &str = "anthropic_blocks";

/// The API must be told a limit; this one every current model takes.
const DEFAULT_MAX_TOKENS: u32 = 8_192;

impl Protocol for Anthropic {
    fn variables(&self) -> Variables {
        Variables {
            key: "ANTHROPIC_API_KEY",
            key_file: "ANTHROPIC_API_KEY_FILE",
            base_url: "ANTHROPIC_BASE_URL",
            default_base_url: "https://api.anthropic.com",
            key_needed_by: "api.anthropic.com",
        }
    }

    fn path(&self, base_path: &str) -> &'static str {
        // Base URLs are written with and without the version.
        if base_path.trim_end_matches('/').ends_with("/v1") { "messages" } else { "v1/messages" }
    }

    fn key_header(&self, key: &str) -> (HeaderName, String) {
        (HeaderName::from_static("x-api-key"), key.to_owned())
    }

    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        &[("anthropic-version", "2023-06-01")]
    }

    fn body(&self, request: &Request, stream: bool, _host: &str) -> Value {
        let mut body = json!({
            "model": request.model,
            "max_tokens": request.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
            "messages": messages(&request.messages),
        });
        if !request.system.is_empty() {
            body["system"] = request.system.clone().into();
        }
        if !request.tools.is_empty() {
            let tools = request.tools.iter().map(|tool| {
                json!({"name": tool.name, "description": tool.description, "input_schema": tool.parameters})
            });
            body["tools"] = tools.collect();
        }
        if let Some(temperature) = request.temperature {
            body["temperature"] = temperature.into();
        }
        if stream {
            body["stream"] = true.into();
        }
        body
    }

    fn whole(&self, mut answer: Value, draft: &mut Draft) -> Result<(), Broken> {
        let Value::Array(blocks) = take(&mut answer, "content") else {
            return Err(Broken("it has no content".to_owned()));
        };
        for (index, block) in (0..).zip(blocks) {
            begin_block(index, block, draft)?;
        }
        begin_message(&answer, draft);
        end_message(&answer, draft);
        draft.ended = true;
        Ok(())
    }

    fn event(&self, mut event: Value, draft: &mut Draft) -> Result<(), Broken> {
        let index = event["index"].as_u64().unwrap_or_default();
        let kind = take(&mut event, "type");
        match kind.as_str().unwrap_or_default() {
            "message_start" => begin_message(&event["message"], draft),
            "content_block_start" => begin_block(index, take(&mut event, "content_block"), draft)?,
            "content_block_delta" => go_on(index, take(&mut event, "delta"), draft)?,
            "message_delta" => {
                usage(&event["usage"], draft);
                end_message(&event["delta"], draft);
            }
            "message_stop" => draft.ended = true,
            // Pings, ends of blocks, and what the API may add: it says that clients shall not mind.
            _ => {}
        }
        Ok(())
    }
}

fn begin_message(message: &Value, draft: &mut Draft) {
    draft.model = message["model"].as_str().unwrap_or_default().to_owned();
    usage(&message["usage"], draft);
}

fn usage(usage: &Value, draft: &mut Draft) {
    let count = |name: &str| usage[name].as_u64();
    if let Some(tokens) = count("input_tokens") {
        let cached = ["cache_creation_input_tokens", "cache_read_input_tokens"].into_iter().filter_map(count);
        // What a stranger counts may be anything.
        draft.input_tokens = Some(cached.fold(tokens, u64::saturating_add));
    }
    draft.output_tokens = count("output_tokens").or(draft.output_tokens);
}

fn end_message(fields: &Value, draft: &mut Draft) {
    let Some(reason) = fields["stop_reason"].as_str() else { return };
    let finish = match reason {
        "end_turn" | "stop_sequence" => Finish::Stop,
        "tool_use" => Finish::ToolCalls,
        "max_tokens" | "model_context_window_exceeded" => Finish::Length,
        "refusal" => Finish::Refused,
        other => Finish::Other(other.to_owned()),
    };
    if finish == Finish::Refused {
        let why = fields["stop_details"]["explanation"].as_str();
        draft.refusal = why.unwrap_or("the model refuses to answer").to_owned();
    }
    if !draft.blocks.is_empty() {
        let blocks = std::mem::take(&mut draft.blocks).into_values().collect();
        draft.extra.insert(BLOCKS.to_owned(), blocks);
    }
    draft.finish = Some(finish);
}

fn begin_block(index: u64, mut block: Value, draft: &mut Draft) -> Result<(), Broken> {
    match block["type"].as_str() {
        Some("text") => draft.text.push_str(block["text"].as_str().unwrap_or_default()),
        Some("tool_use") => {
            // In a stream it begins as {} and is written by the pieces that follow.
            let arguments = match take(&mut block, "input") {
                Value::Object(fields) if !fields.is_empty() => Value::Object(fields).to_string(),
                _ => String::new(),
            };
            let text = |name: &str| block[name].as_str().unwrap_or_default().to_owned();
            let (id, name) = (text("id"), text("name"));
            draft.calls.push(DraftCall { index: Some(index), id, name, arguments, extra: Map::new() });
        }
        Some(_) => {
            draft.blocks.insert(index, block);
        }
        None => return Err(Broken("a part of its content does not say what it is".to_owned())),
    }
    Ok(())
}

fn go_on(index: u64, mut delta: Value, draft: &mut Draft) -> Result<(), Broken> {
    let piece = |name: &str| delta[name].as_str().unwrap_or_default();
    match delta["type"].as_str() {
        Some("text_delta") => draft.text.push_str(piece("text")),
        Some("input_json_delta") => {
            let call = draft.calls.iter_mut().find(|call| call.index == Some(index));
            let call = call.ok_or_else(|| Broken("arguments came for a tool call that had not".to_owned()))?;
            call.arguments.push_str(piece("partial_json"));
        }
        _ => {
            if let (Some(block), Some(fields)) = (draft.blocks.get_mut(&index), delta.as_object_mut()) {
                fields.remove("type");
                merge(block, delta.take());
            }
        }
    }
    Ok(())
}

/// The conversation in turns of user and assistant. Results of tools are the user's, before
/// whatever else the user says in that turn; empty texts are not allowed.
fn messages(messages: &[Message]) -> Vec<Value> {
    let mut turns: Vec<(&str, Vec<Value>)> = Vec::new();
    for message in messages {
        let (role, blocks): (_, Vec<Value>) = match message {
            Message::User { text } => ("user", text_block(text).into_iter().collect()),
            Message::ToolResult { call_id, content, failed, .. } => {
                let mut result = json!({"type": "tool_result", "tool_use_id": call_id, "content": content});
                if *failed {
                    result["is_error"] = true.into();
                }
                ("user", vec![result])
            }
            Message::Assistant { text, tool_calls, extra } => {
                let mut blocks: Vec<Value> = match extra.get(BLOCKS) {
                    Some(Value::Array(blocks)) => blocks.clone(),
                    _ => Vec::new(),
                };
                blocks.extend(text.as_deref().and_then(text_block));
                blocks.extend(tool_calls.iter().map(|call| {
                    let input = object(&call.arguments);
                    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
                }));
                ("assistant", blocks)
            }
        };
        match turns.last_mut() {
            _ if blocks.is_empty() => {}
            Some((last, all)) if *last == role => all.extend(blocks),
            _ => turns.push((role, blocks)),
        }
    }
    for (_, blocks) in &mut turns {
        // A stable sort: within their kinds they stay as they were.
        blocks.sort_by_key(|block| block["type"] != "tool_result");
    }
    turns.into_iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

fn text_block(text: &str) -> Option<Value> {
    (!text.trim().is_empty()).then(|| json!({"type": "text", "text": text}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_beyond_all_numbers_is_the_largest_one() {
        let mut draft = Draft::default();
        usage(&json!({"input_tokens": u64::MAX, "cache_read_input_tokens": 1, "output_tokens": 3}), &mut draft);
        assert_eq!((draft.input_tokens, draft.output_tokens), (Some(u64::MAX), Some(3)));
    }
}
