//! What the providers' APIs differ in. Everything else about a call is the same for all of them.

use reqwest::header::HeaderName;
use serde_json::Value;

use super::Request;
use super::draft::Draft;
use super::environment::Variables;

/// One provider's API.
pub(super) trait Protocol: Send + Sync {
    /// Where its key and its address come from.
    fn variables(&self) -> Variables;

    /// What is called below the base URL, whose path is given.
    fn path(&self, base_path: &str) -> &'static str;

    /// The header that carries the key.
    fn key_header(&self, key: &str) -> (HeaderName, String);

    /// The headers of every call.
    fn headers(&self) -> &'static [(&'static str, &'static str)];

    /// What is sent to this host.
    fn body(&self, request: &Request, stream: bool, host: &str) -> Value;

    /// Takes an answer that came in one piece; it is no complaint.
    fn whole(&self, answer: Value, draft: &mut Draft) -> Result<(), Broken>;

    /// Takes the next event of a streamed answer; it is no complaint.
    fn event(&self, event: Value, draft: &mut Draft) -> Result<(), Broken>;
}

/// What is wrong with an answer, as the rest of a sentence about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Broken(pub(super) String);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::anthropic::Anthropic;
    use super::super::openai::OpenAi;
    use super::*;

    /// Values of any form, with the fields that the protocols look for.
    fn values() -> impl Strategy<Value = Value> {
        const FIELDS: [&str; 24] = [
            "choices",
            "message",
            "delta",
            "content",
            "tool_calls",
            "function",
            "arguments",
            "name",
            "id",
            "index",
            "finish_reason",
            "usage",
            "prompt_tokens",
            "type",
            "text",
            "content_block",
            "input",
            "partial_json",
            "stop_reason",
            "refusal",
            "model",
            "reasoning",
            "output_tokens",
            "role",
        ];
        const TEXTS: [&str; 9] = [
            "",
            "{",
            "message_start",
            "content_block_start",
            "content_block_delta",
            "message_delta",
            "tool_use",
            "input_json_delta",
            "stop",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (0..3_u64).prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            prop::sample::select(&TEXTS).prop_map(Value::from),
        ];
        leaf.prop_recursive(6, 48, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((prop::sample::select(&FIELDS), inner), 0..8).prop_map(|fields| {
                    Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_answer_is_so_strange_that_it_cannot_be_judged(events in prop::collection::vec(values(), 0..6)) {
            let request = Request {
                model: "m".to_owned(),
                system: String::new(),
                messages: Vec::new(),
                tools: Vec::new(),
                temperature: None,
                max_tokens: None,
            };
            for protocol in [&OpenAi as &dyn Protocol, &Anthropic] {
                let mut draft = Draft::default();
                for event in &events {
                    let _ = protocol.event(event.clone(), &mut draft);
                    let _ = protocol.whole(event.clone(), &mut draft);
                }
                let answer = draft.answer(&request);
                prop_assert!(answer.tool_calls.iter().all(|call| !call.id.is_empty() && !call.arguments.is_empty()));
                let again = Request { messages: vec![answer.message()], ..request.clone() };
                protocol.body(&again, true, "localhost");
            }
        }
    }
}
