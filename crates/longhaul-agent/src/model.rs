//! Calls of language models: one request, one answer, whoever the provider is.
//!
//! [`Model`] speaks the OpenAI chat completions that most providers offer and the Anthropic
//! Messages API. A call streams, waits, tries again and falls back by itself; what comes out is
//! either a whole [`Answer`] or a [`ModelError`] that says what to do. An answer that was cut is
//! never taken for a whole one, and a key is never shown.
//!
//! The types of this file are plain data: requests are digested, answers recorded, messages kept in
//! checkpoints. None of them has a key in it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::mask::Mask;

mod anthropic;
mod client;
mod draft;
mod environment;
mod error;
mod exchange;
mod openai;
mod pause;
mod protocol;
mod settings;
mod sse;

pub use client::Model;
pub use environment::Environment;
pub use error::{ModelError, ModelErrorKind};
pub use settings::{ModelSettings, Provider, Retries, Timeouts};

/// One call of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The model's name, as its provider knows it.
    pub model: String,
    /// What the model is told before everything else; empty: nothing.
    pub system: String,
    /// The conversation so far, oldest first.
    pub messages: Vec<Message>,
    /// What the model may call.
    pub tools: Vec<ToolSpec>,
    /// How much chance is in the answer; without it, the provider's default.
    pub temperature: Option<f64>,
    /// The most tokens of the answer; without it, the provider's default.
    pub max_tokens: Option<u32>,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Message {
    /// What a person, or the program for them, says.
    User {
        /// The words.
        text: String,
    },
    /// What the model answered.
    Assistant {
        /// The words, if there were any.
        text: Option<String>,
        /// What it wants called.
        #[serde(default)]
        tool_calls: Vec<ToolCall>,
        /// Fields of the provider's message that this program does not know; it gets them back.
        #[serde(default, skip_serializing_if = "Map::is_empty")]
        extra: Map<String, Value>,
    },
    /// What came of a tool call.
    ToolResult {
        /// The id of the call that this answers.
        call_id: String,
        /// The tool's name.
        name: String,
        /// What it gave, or why it failed.
        content: String,
        /// Whether it failed.
        #[serde(default)]
        failed: bool,
    },
}

/// A call of a tool that a model asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Names the call: never empty, and unique in its conversation.
    pub id: String,
    /// The tool's name, as the model wrote it: there may be no such tool.
    pub name: String,
    /// The arguments as the model wrote them: JSON if all is well. Never empty.
    pub arguments: String,
}

/// A tool as a model sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// Its name.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// The JSON schema of its arguments, of type `object`.
    pub parameters: Value,
}

/// A model's whole answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The words, if there were any.
    pub text: Option<String>,
    /// What the model wants called, each call whole.
    pub tool_calls: Vec<ToolCall>,
    /// Why the answer ends where it does.
    pub finish: Finish,
    /// Why the model refuses to answer, if it does.
    pub refusal: Option<String>,
    /// What the call cost.
    pub usage: Usage,
    /// The model that answered, as the provider names it.
    pub model: String,
    /// Fields of the provider's message that this program does not know, for
    /// [`Message::Assistant`].
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
}

impl Answer {
    /// The answer as a message of the conversation.
    pub fn message(&self) -> Message {
        Message::Assistant {
            text: self.text.clone(),
            tool_calls: self.tool_calls.clone(),
            extra: self.extra.clone(),
        }
    }
}

/// Why an answer ends where it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model has said everything.
    Stop,
    /// The model waits for the results of its tool calls.
    ToolCalls,
    /// The answer is as long as allowed and was cut there. A tool call that was cut with it is left out.
    Length,
    /// The model refused, or the provider's filter did.
    Refused,
    /// Something else, in the provider's words.
    Other(String),
}

/// Tokens of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the request, those that the provider had cached included.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Whether the provider did not say (all of) it, and the rest is [`estimate_tokens`]'s guess.
    #[serde(default)]
    pub estimated: bool,
}

/// A piece of text as it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard<'a> {
    /// The try it belongs to, from 1: with a new one, the text begins anew.
    pub attempt: u32,
    /// The piece.
    pub text: &'a str,
}

/// What a message costs beside its words.
const MESSAGE_TOKENS: u64 = 4;

impl Answer {
    /// The answer without these secrets: a provider may repeat what it was sent.
    fn without(self, mask: &Mask) -> Self {
        let text = |text: &String| mask.text(text);
        let call = |call: &ToolCall| ToolCall {
            name: text(&call.name),
            arguments: text(&call.arguments),
            ..call.clone()
        };
        Self {
            text: self.text.as_ref().map(text),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            refusal: self.refusal.as_ref().map(text),
            model: text(&self.model),
            extra: mask.fields(self.extra),
            ..self
        }
    }
}

/// A rough count of a request's tokens, for what must be known before the call: a quarter of the
/// ASCII bytes and a third of the others, which is near enough for most tokenizers.
pub fn estimate_tokens(request: &Request) -> u64 {
    let messages: u64 = request.messages.iter().map(message_tokens).sum();
    let tools: u64 = request.tools.iter().map(tool_tokens).sum();
    MESSAGE_TOKENS + text_tokens(&request.system) + messages + tools
}

pub(crate) fn message_tokens(message: &Message) -> u64 {
    MESSAGE_TOKENS
        + match message {
            Message::User { text } => text_tokens(text),
            Message::Assistant { text, tool_calls, extra } => {
                let extra = if extra.is_empty() { 0 } else { text_tokens(&json_text(extra)) };
                answer_tokens(text.as_deref(), tool_calls) + extra
            }
            Message::ToolResult { call_id, name, content, .. } => {
                text_tokens(call_id) + text_tokens(name) + text_tokens(content)
            }
        }
}

fn tool_tokens(tool: &ToolSpec) -> u64 {
    MESSAGE_TOKENS
        + text_tokens(&tool.name)
        + text_tokens(&tool.description)
        + text_tokens(&json_text(&tool.parameters))
}

fn answer_tokens(text: Option<&str>, tool_calls: &[ToolCall]) -> u64 {
    let calls: u64 = tool_calls
        .iter()
        .map(|call| MESSAGE_TOKENS + text_tokens(&call.name) + text_tokens(&call.arguments))
        .sum();
    text_tokens(text.unwrap_or_default()) + calls
}

pub(crate) fn text_tokens(text: &str) -> u64 {
    let ascii = text.bytes().filter(u8::is_ascii).count();
    let others = text.len() - ascii;
    (3 * ascii as u64 + 4 * others as u64).div_ceil(12)
}

/// JSON of what is always JSON.
fn json_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_are_stored_and_read_back_whole() {
        let messages = vec![
            Message::User { text: "Fix it.".to_owned() },
            Message::Assistant {
                text: None,
                tool_calls: vec![ToolCall {
                    id: "call_1".to_owned(),
                    name: "check_disk".to_owned(),
                    arguments: r#"{"path":"/"}"#.to_owned(),
                }],
                extra: [("reasoning_content".to_owned(), json!("hm"))].into_iter().collect(),
            },
            Message::ToolResult {
                call_id: "call_1".to_owned(),
                name: "check_disk".to_owned(),
                content: "97 %".to_owned(),
                failed: false,
            },
        ];
        let text = serde_json::to_string(&messages).expect("messages serialise");
        assert_eq!(serde_json::from_str::<Vec<Message>>(&text).expect("and parse"), messages);
    }

    #[test]
    fn a_guess_of_tokens_grows_with_everything_that_is_sent() {
        let mut request = Request {
            model: "m".to_owned(),
            system: String::new(),
            messages: Vec::new(),
            tools: Vec::new(),
            temperature: None,
            max_tokens: None,
        };
        let mut last = estimate_tokens(&request);
        let mut grows = |request: &Request| {
            let now = estimate_tokens(request);
            assert!(now > last, "{now} after {last}");
            last = now;
        };
        request.system = "You are an agent.".to_owned();
        grows(&request);
        request.messages.push(Message::User { text: "Привет, 世界".to_owned() });
        grows(&request);
        request.tools.push(ToolSpec {
            name: "t".to_owned(),
            description: "d".to_owned(),
            parameters: json!({"type": "object"}),
        });
        grows(&request);
    }

    #[test]
    fn a_guess_of_tokens_is_near_what_tokenizers_count() {
        // Nine words, nine tokens; Russian words have two or three each.
        let english = text_tokens("The quick brown fox jumps over the lazy dog");
        assert!((8..=16).contains(&english), "{english}");
        let russian = text_tokens("Съешь ещё этих мягких французских булок");
        assert!((10..=28).contains(&russian), "{russian}");
    }
}
