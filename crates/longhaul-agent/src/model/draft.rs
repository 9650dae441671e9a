//! An answer while it comes, and when it may be taken for a whole one.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use super::{Answer, Finish, Message, Request, ToolCall, Usage, answer_tokens, estimate_tokens};

/// Where the fields of tool calls that this program does not know are kept in a message's `extra`,
/// by the id of the call. No provider's own field: it is one that this program does know.
pub(super) const CALLS: &str = "tool_calls";

/// The letters of ids that a provider did not give. Nine of them: the form that the strictest asks for.
const ID_LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
const ID_LENGTH: usize = 9;

/// What has come of an answer.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) text: String,
    pub(super) refusal: String,
    pub(super) calls: Vec<DraftCall>,
    /// Pieces of content that this program does not know, in their places.
    pub(super) blocks: BTreeMap<u64, Value>,
    /// Why the answer ends; with it, the answer is whole.
    pub(super) finish: Option<Finish>,
    /// The provider said that nothing more comes.
    pub(super) ended: bool,
    pub(super) input_tokens: Option<u64>,
    pub(super) output_tokens: Option<u64>,
    pub(super) model: String,
    pub(super) extra: Map<String, Value>,
}

/// What has come of a tool call.
#[derive(Debug, Default)]
pub(super) struct DraftCall {
    /// Which of the calls it is, if the provider counts them.
    pub(super) index: Option<u64>,
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: String,
    /// Fields that this program does not know.
    pub(super) extra: Map<String, Value>,
}

impl Draft {
    /// Whether any part of the answer has come.
    pub(super) fn has_begun(&self) -> bool {
        let said = !self.text.is_empty() || !self.refusal.is_empty() || !self.extra.is_empty();
        said || !self.calls.is_empty() || !self.blocks.is_empty() || self.finish.is_some()
    }

    /// Whether nothing is missing: the provider said why the answer ends, or that it ends, and then
    /// every call must be one that could be run.
    pub(super) fn is_whole(&self) -> bool {
        self.finish.is_some() || self.ended && self.calls.iter().all(DraftCall::is_whole)
    }

    /// The answer to this request. To be asked only when the draft is whole.
    pub(super) fn answer(mut self, request: &Request) -> Answer {
        let mut finish = self.finish.unwrap_or(Finish::Stop);
        if finish == Finish::Length {
            self.calls.retain(DraftCall::is_whole);
        }
        // Some providers say "stop" after tool calls, or after a refusal.
        if finish == Finish::Stop && !self.calls.is_empty() {
            finish = Finish::ToolCalls;
        }
        if !self.refusal.is_empty() {
            finish = Finish::Refused;
        }
        let text = Some(self.text).filter(|text| !text.is_empty());
        let (tool_calls, calls_extra) = named(self.calls, request);
        if !calls_extra.is_empty() {
            self.extra.insert(CALLS.to_owned(), Value::Object(calls_extra));
        }
        let estimated = self.input_tokens.is_none() || self.output_tokens.is_none();
        let usage = Usage {
            input_tokens: self.input_tokens.unwrap_or_else(|| estimate_tokens(request)),
            output_tokens: self.output_tokens.unwrap_or_else(|| answer_tokens(text.as_deref(), &tool_calls)),
            estimated,
        };
        Answer {
            text,
            tool_calls,
            finish,
            refusal: Some(self.refusal).filter(|refusal| !refusal.is_empty()),
            usage,
            model: if self.model.is_empty() { request.model.clone() } else { self.model },
            extra: self.extra,
        }
    }
}

impl DraftCall {
    /// Whether it could be run: the beginning of an object is never an object.
    fn is_whole(&self) -> bool {
        let object = || serde_json::from_str::<Map<String, Value>>(&self.arguments).is_ok();
        !self.name.is_empty() && object()
    }
}

/// The calls with an id each that is unique in the conversation, and their unknown fields by id.
fn named(drafts: Vec<DraftCall>, request: &Request) -> (Vec<ToolCall>, Map<String, Value>) {
    let mut taken: HashSet<String> = request.messages.iter().flat_map(call_ids).map(str::to_owned).collect();
    let mut calls = Vec::with_capacity(drafts.len());
    let mut extras = Map::new();
    for draft in drafts {
        let mut id = draft.id;
        while id.is_empty() || taken.contains(&id) {
            id = new_id();
        }
        taken.insert(id.clone());
        if !draft.extra.is_empty() {
            extras.insert(id.clone(), Value::Object(draft.extra));
        }
        let arguments = draft.arguments.trim();
        let arguments = if arguments.is_empty() { "{}" } else { arguments };
        calls.push(ToolCall { id, name: draft.name, arguments: arguments.to_owned() });
    }
    (calls, extras)
}

fn call_ids(message: &Message) -> impl Iterator<Item = &str> {
    let calls: &[ToolCall] = match message {
        Message::Assistant { tool_calls, .. } => tool_calls,
        _ => &[],
    };
    calls.iter().map(|call| call.id.as_str())
}

fn new_id() -> String {
    (0..ID_LENGTH).map(|_| char::from(ID_LETTERS[rand::random_range(0..ID_LETTERS.len())])).collect()
}

/// Takes a field out of a value; nothing when it is not there, or the value has no fields.
pub(super) fn take(value: &mut Value, field: &str) -> Value {
    value.get_mut(field).map(Value::take).unwrap_or_default()
}

/// Adds a piece of an unknown field to what has come of it: texts go on, lists grow, by the
/// `index` of their elements if they have one, and all else is replaced.
pub(super) fn merge(known: &mut Value, piece: Value) {
    match (known, piece) {
        (_, Value::Null) => {}
        (Value::String(text), Value::String(more)) => text.push_str(&more),
        (Value::Object(fields), Value::Object(more)) => merge_fields(fields, more),
        (Value::Array(list), Value::Array(more)) => {
            for element in more {
                let index = element.get("index").cloned();
                let same =
                    index.and_then(|index| list.iter_mut().find(|known| known.get("index") == Some(&index)));
                match same {
                    Some(known) => merge(known, element),
                    None => list.push(element),
                }
            }
        }
        (known, piece) => *known = piece,
    }
}

/// Adds the fields of a piece to those that have come.
pub(super) fn merge_fields(fields: &mut Map<String, Value>, more: Map<String, Value>) {
    /// Texts that name something: told again, they do not go on.
    const NAMES: [&str; 4] = ["id", "type", "format", "role"];
    for (name, piece) in more {
        match fields.get_mut(&name) {
            _ if piece.is_null() => {}
            Some(known) if !NAMES.contains(&name.as_str()) => merge(known, piece),
            _ => {
                fields.insert(name, piece);
            }
        }
    }
}

/// What a model wrote as arguments, as the object that providers want to get back. What is not one is
/// wrapped, so that the model sees what it wrote beside the complaint about it.
pub(super) fn object(written: &str) -> Map<String, Value> {
    serde_json::from_str(written)
        .unwrap_or_else(|_| [("not_a_json_object".to_owned(), Value::from(written))].into_iter().collect())
}

/// The same as text: the model's own, if it is an object.
pub(super) fn object_text(written: &str) -> String {
    match serde_json::from_str::<Map<String, Value>>(written) {
        Ok(_) => written.to_owned(),
        Err(_) => Value::Object(object(written)).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request() -> Request {
        let call = ToolCall { id: "a".to_owned(), name: "t".to_owned(), arguments: "{}".to_owned() };
        Request {
            model: "m".to_owned(),
            system: String::new(),
            messages: vec![Message::Assistant { text: None, tool_calls: vec![call], extra: Map::new() }],
            tools: Vec::new(),
            temperature: None,
            max_tokens: None,
        }
    }

    fn call(id: &str, arguments: &str) -> DraftCall {
        DraftCall {
            id: id.to_owned(),
            name: "t".to_owned(),
            arguments: arguments.to_owned(),
            ..DraftCall::default()
        }
    }

    #[test]
    fn every_call_gets_an_id_that_no_other_call_of_the_conversation_has() {
        let calls = vec![call("", "{}"), call("b", ""), call("b", "{}"), call("a", "{}")];
        let answer = Draft { calls, finish: Some(Finish::Stop), ..Draft::default() }.answer(&request());
        let ids: HashSet<&str> = answer.tool_calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids.len(), 4, "{ids:?}");
        assert!(!ids.contains("a") && !ids.contains(""), "{ids:?}");
        assert_eq!(answer.tool_calls[1].id, "b");
        assert_eq!(answer.tool_calls[1].arguments, "{}");
        assert_eq!(answer.finish, Finish::ToolCalls);
    }

    #[test]
    fn a_call_that_the_length_cut_is_left_out() {
        let calls = vec![call("x", r#"{"a": 1}"#), call("y", r#"{"a": "#)];
        let answer = Draft { calls, finish: Some(Finish::Length), ..Draft::default() }.answer(&request());
        assert_eq!(answer.tool_calls.len(), 1);
        assert_eq!(answer.finish, Finish::Length);
    }

    #[test]
    fn an_end_without_a_reason_is_one_only_when_every_call_is_whole() {
        let draft = |arguments, ended| Draft { calls: vec![call("x", arguments)], ended, ..Draft::default() };
        assert!(draft("{}", true).is_whole());
        assert!(!draft(r#"{"a"#, true).is_whole());
        assert!(!draft("{}", false).is_whole());
    }

    #[test]
    fn unknown_fields_grow_by_their_pieces() {
        let mut known = json!({"reasoning": "a", "details": [{"index": 0, "type": "text", "text": "x"}], "n": 1});
        merge(
            &mut known,
            json!({"reasoning": "b", "details": [{"index": 0, "type": "text", "text": "y"}, {"index": 1}], "n": 2, "z": null}),
        );
        assert_eq!(
            known,
            json!({"reasoning": "ab", "details": [{"index": 0, "type": "text", "text": "xy"}, {"index": 1}], "n": 2})
        );
    }
}
