//! Calls of models: what is sent, and what the answer is, whatever form it has.

mod provider;

use std::sync::Arc;

use longhaul_agent::model::{
    Answer, Environment, Finish, Message, Model, ModelSettings, Provider, Request, ToolCall, Usage,
};
use proptest::prelude::*;
use provider::{
    KEY, Part, Reply, Server, calls_stream, chunk, delta, events, json_reply, once, openai_end, request, settings,
    stream, stream_head, stream_then, text_stream, whole_answer,
};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

const BOTH: [Provider; 2] = [Provider::OpenAi, Provider::Anthropic];

async fn answer_of(provider: Provider, reply: Reply) -> Answer {
    let (answer, _) = Server::start([reply]).await.call(&once(provider)).await;
    answer.expect("an answer")
}

/// The answer to an OpenAI stream of these events, which has no end of its own.
async fn openai(all: &[Value]) -> Answer {
    answer_of(Provider::OpenAi, stream(&events(all))).await
}

fn ended(mut event: Value, reason: &str) -> Value {
    event["choices"][0]["finish_reason"] = reason.into();
    event
}

fn tool_call(id: &str, arguments: &str) -> ToolCall {
    ToolCall { id: id.to_owned(), name: "check_disk".to_owned(), arguments: arguments.to_owned() }
}

fn two_calls() -> Vec<ToolCall> {
    vec![tool_call("call_a", r#"{"path": "/ä"}"#), tool_call("call_b", r#"{"path":"/var"}"#)]
}

/// A conversation with everything in it.
fn long_request() -> Request {
    let assistant = |text: Option<&str>, tool_calls| Message::Assistant {
        text: text.map(str::to_owned),
        tool_calls,
        extra: Map::new(),
    };
    let result = |call_id: &str, content: &str, failed| Message::ToolResult {
        call_id: call_id.to_owned(),
        name: "check_disk".to_owned(),
        content: content.to_owned(),
        failed,
    };
    let mut request = request();
    request.max_tokens = Some(100);
    request.messages.extend([
        assistant(Some("I look."), vec![tool_call("1", r#"{"path": "/"}"#), tool_call("2", "{path")]),
        result("1", "97 %", false),
        result("2", "the arguments are not JSON", true),
        Message::User { text: "Quick!".to_owned() },
        assistant(None, vec![tool_call("3", "{}")]),
        result("3", "ok", false),
    ]);
    request
}

#[tokio::test]
async fn a_streamed_answer_is_heard_piece_by_piece_and_given_whole() {
    for provider in BOTH {
        let server = Server::start([stream(&text_stream(provider, &["Disk ", "is ", "full."]))]).await;
        let (answer, heard) = server.call(&settings(provider)).await;
        let expected = Answer {
            text: Some("Disk is full.".to_owned()),
            tool_calls: Vec::new(),
            finish: Finish::Stop,
            refusal: None,
            usage: Usage { input_tokens: 11, output_tokens: 3, estimated: false },
            model: "m-1-2026".to_owned(),
            extra: Map::new(),
        };
        assert_eq!(answer.expect("an answer"), expected);
        assert_eq!(heard, ["Disk ", "is ", "full."].map(|piece| (1, piece.to_owned())));
    }
}

#[tokio::test]
async fn parallel_tool_calls_are_put_together_from_their_pieces() {
    for provider in BOTH {
        let answer = answer_of(provider, stream(&calls_stream(provider))).await;
        assert_eq!(answer.tool_calls, two_calls());
        assert_eq!((answer.text, answer.finish), (None, Finish::ToolCalls));
    }
}

#[tokio::test]
async fn an_answer_in_one_piece_is_taken_whether_it_was_asked_for_or_not() {
    for provider in BOTH {
        for stream in [true, false] {
            let server = Server::start([json_reply(&whole_answer(provider, "Done."))]).await;
            let (answer, heard) = server.call(&ModelSettings { stream, ..once(provider) }).await;
            let answer = answer.expect("an answer");
            assert_eq!((answer.text.as_deref(), answer.finish), (Some("Done."), Finish::Stop));
            assert_eq!((answer.usage.input_tokens, answer.usage.output_tokens), (11, 3));
            assert_eq!(heard, [(1, "Done.".to_owned())]);
            let asked = server.only().body;
            assert_eq!(asked.get("stream"), stream.then_some(&json!(true)));
        }
    }
}

#[tokio::test]
async fn openai_gets_the_conversation_in_its_form() {
    let server = Server::start([stream(&text_stream(Provider::OpenAi, &["ok"]))]).await;
    let model = server.model(&once(Provider::OpenAi));
    provider::call(&model, &long_request()).await.0.expect("an answer");
    let asked = server.only();
    assert!(asked.head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{}", asked.head);
    assert_eq!(asked.header("authorization"), Some(format!("Bearer {KEY}").as_str()));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "check_disk", "arguments": arguments}});
    let result = |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "name": "check_disk", "content": content});
    let expected = json!({
        "model": "m-1",
        "stream": true,
        "stream_options": {"include_usage": true},
        "temperature": 0.5,
        "max_tokens": 100,
        "tools": [{"type": "function", "function": {
            "name": "check_disk",
            "description": "Check current disk usage",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        }}],
        "messages": [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "Fix it."},
            {"role": "assistant", "content": "I look.", "tool_calls": [
                call("1", r#"{"path": "/"}"#), call("2", r#"{"not_a_json_object":"{path"}"#),
            ]},
            result("1", "97 %"),
            result("2", "the arguments are not JSON"),
            {"role": "user", "content": "Quick!"},
            {"role": "assistant", "content": null, "tool_calls": [call("3", "{}")]},
            result("3", "ok"),
        ],
    });
    assert_eq!(asked.body, expected);
}

#[tokio::test]
async fn anthropic_gets_the_conversation_in_its_form() {
    let server = Server::start([stream(&text_stream(Provider::Anthropic, &["ok"]))]).await;
    let model = server.model(&once(Provider::Anthropic));
    provider::call(&model, &long_request()).await.0.expect("an answer");
    let asked = server.only();
    assert!(asked.head.starts_with("POST /v1/messages HTTP/1.1\r\n"), "{}", asked.head);
    assert_eq!(asked.header("x-api-key"), Some(KEY));
    assert_eq!(asked.header("anthropic-version"), Some("2023-06-01"));
    let call =
        |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "check_disk", "input": input});
    let expected = json!({
        "model": "m-1",
        "stream": true,
        "temperature": 0.5,
        "max_tokens": 100,
        "system": "You are an agent.",
        "tools": [{
            "name": "check_disk",
            "description": "Check current disk usage",
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        }],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I look."},
                call("1", json!({"path": "/"})),
                call("2", json!({"not_a_json_object": "{path"})),
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "97 %"},
                {"type": "tool_result", "tool_use_id": "2", "content": "the arguments are not JSON", "is_error": true},
                {"type": "text", "text": "Quick!"},
            ]},
            {"role": "assistant", "content": [call("3", json!({}))]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3", "content": "ok"}]},
        ],
    });
    assert_eq!(asked.body, expected);
}

#[tokio::test]
async fn anthropic_is_always_told_the_most_tokens() {
    let server = Server::start([json_reply(&whole_answer(Provider::Anthropic, "ok"))]).await;
    server.call(&once(Provider::Anthropic)).await.0.expect("an answer");
    assert_eq!(server.only().body["max_tokens"], 8192);
}

#[tokio::test]
async fn what_a_provider_leaves_out_or_writes_differently_is_made_good() {
    // No ids, no count, no usage, arguments as they are, "stop" although there are calls.
    let call = |arguments: Value| json!({"function": {"name": "check_disk", "arguments": arguments}});
    let calls = [call(json!({"path": "/"})), call(Value::Null)];
    let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
    let plain = json!({"choices": [{"message": message, "finish_reason": "stop"}]});
    let streamed = [ended(delta(json!({"tool_calls": calls})), "stop")];
    for answer in [answer_of(Provider::OpenAi, json_reply(&plain)).await, openai(&streamed).await] {
        let [first, second] = answer.tool_calls.as_slice() else { panic!("two calls: {answer:?}") };
        assert!(!first.id.is_empty() && first.id != second.id, "{answer:?}");
        assert_eq!((first.arguments.as_str(), second.arguments.as_str()), (r#"{"path":"/"}"#, "{}"));
        assert_eq!(answer.finish, Finish::ToolCalls);
        assert!(answer.usage.estimated && answer.usage.input_tokens > 0 && answer.usage.output_tokens > 0);
    }
}

#[tokio::test]
async fn calls_with_the_same_number_are_told_apart_by_their_ids() {
    let call = |id: &str| {
        let function = json!({"name": "check_disk", "arguments": "{}"});
        delta(json!({"tool_calls": [{"index": 0, "id": id, "function": function}]}))
    };
    let answer = openai(&[call("x"), call("y"), ended(delta(json!({})), "tool_calls")]).await;
    assert_eq!(answer.tool_calls, [tool_call("x", "{}"), tool_call("y", "{}")]);
}

#[tokio::test]
async fn a_stream_may_end_without_a_reason_or_without_a_last_line() {
    let words = events(&[delta(json!({"content": "Hi"}))]);
    let with_reason = events(&[ended(delta(json!({"content": "Hi"})), "stop")]);
    for text in [format!("{words}data: [DONE]\n\n"), format!("{words}data: [DONE]"), with_reason.clone()] {
        let answer = answer_of(Provider::OpenAi, stream(&text)).await;
        assert_eq!((answer.text.as_deref(), answer.finish), (Some("Hi"), Finish::Stop), "{text}");
    }
    // The reason has come, so nothing is missing but the usage.
    for end in [Part::Close, Part::Reset] {
        let answer = answer_of(Provider::OpenAi, stream_then(&with_reason, end)).await;
        assert!(answer.usage.estimated);
        assert_eq!(answer.text.as_deref(), Some("Hi"));
    }
}

#[tokio::test]
async fn unknown_fields_of_an_openai_message_come_back_to_it() {
    let call = json!({
        "index": 0, "id": "x", "function": {"name": "check_disk", "arguments": "{}"},
        "extra_content": {"google": {"thought_signature": "s1"}},
    });
    let all = [
        delta(json!({"role": "assistant", "reasoning_content": "I th"})),
        delta(json!({"reasoning_content": "ink", "audio": null})),
        ended(delta(json!({"tool_calls": [call]})), "tool_calls"),
    ];
    let server = Server::start([stream(&events(&all))]).await;
    let model = server.model(&once(Provider::OpenAi));
    let first = provider::call(&model, &request()).await.0.expect("an answer");
    let stored = serde_json::to_string(&first.message()).expect("messages serialise");
    let mut second = request();
    second.messages.push(serde_json::from_str(&stored).expect("and parse"));
    provider::call(&model, &second).await.0.expect("an answer");
    let sent = &server.asked()[1].body["messages"][2];
    assert_eq!(sent["reasoning_content"], "I think");
    assert_eq!(sent["tool_calls"][0]["extra_content"], json!({"google": {"thought_signature": "s1"}}));
    assert_eq!(sent.get("audio"), None);
}

#[tokio::test]
async fn unknown_blocks_of_an_anthropic_message_come_back_to_it_first() {
    let all = [
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "I th"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "ink"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s1"}}),
        json!({"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "Hi"}}),
        json!({"type": "a_new_event", "of": "a later version"}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
        json!({"type": "message_stop"}),
    ];
    let server = Server::start([stream(&events(&all))]).await;
    let model = server.model(&once(Provider::Anthropic));
    let first = provider::call(&model, &request()).await.0.expect("an answer");
    assert_eq!(first.text.as_deref(), Some("Hi"));
    let mut second = request();
    second.messages.push(first.message());
    provider::call(&model, &second).await.0.expect("an answer");
    let expected = json!([
        {"type": "thinking", "thinking": "I think", "signature": "s1"},
        {"type": "text", "text": "Hi"},
    ]);
    assert_eq!(server.asked()[1].body["messages"][1]["content"], expected);
}

#[tokio::test]
async fn the_reason_of_the_end_is_told() {
    for (reason, finish) in [
        ("stop", Finish::Stop),
        ("tool_calls", Finish::ToolCalls),
        ("length", Finish::Length),
        ("content_filter", Finish::Refused),
        ("eos", Finish::Other("eos".to_owned())),
    ] {
        assert_eq!(openai(&[ended(delta(json!({"content": "x"})), reason)]).await.finish, finish);
    }
    for (reason, finish) in [
        ("end_turn", Finish::Stop),
        ("stop_sequence", Finish::Stop),
        ("tool_use", Finish::ToolCalls),
        ("max_tokens", Finish::Length),
        ("refusal", Finish::Refused),
        ("pause_turn", Finish::Other("pause_turn".to_owned())),
    ] {
        let mut answer = whole_answer(Provider::Anthropic, "x");
        answer["stop_reason"] = reason.into();
        assert_eq!(answer_of(Provider::Anthropic, json_reply(&answer)).await.finish, finish);
    }
}

#[tokio::test]
async fn a_refusal_is_told_apart_from_an_answer() {
    let all = [delta(json!({"refusal": "I "})), ended(delta(json!({"refusal": "won't."})), "stop")];
    let answer = openai(&all).await;
    assert_eq!((answer.refusal.as_deref(), answer.finish), (Some("I won't."), Finish::Refused));
    assert_eq!(answer.text, None);
    let mut whole = whole_answer(Provider::Anthropic, "No.");
    whole["stop_reason"] = "refusal".into();
    let answer = answer_of(Provider::Anthropic, json_reply(&whole)).await;
    assert!(answer.refusal.is_some() && answer.finish == Finish::Refused);
}

#[tokio::test]
async fn a_tool_call_that_the_length_cut_is_not_given() {
    let text = calls_stream(Provider::OpenAi);
    let half = text.find("\\\"/var\\\"}").expect("the second call's end");
    let cut = text[..half].rfind("data: ").expect("an event");
    let answer = answer_of(Provider::OpenAi, stream(&format!("{}{}", &text[..cut], openai_end("length")))).await;
    assert_eq!(answer.tool_calls, two_calls()[..1]);
    assert_eq!(answer.finish, Finish::Length);
}

#[tokio::test]
async fn connections_are_used_again_although_an_answer_is_given_before_its_stream_ends() {
    for provider in BOTH {
        let given = Arc::new(Semaphore::new(0));
        let words = [stream_head(), chunk(text_stream(provider, &["ok"]).as_bytes())].concat();
        let reply = vec![Part::Bytes(words), Part::Wait(Arc::clone(&given)), Part::Bytes(b"0\r\n\r\n".to_vec())];
        let server = Server::start([reply]).await;
        let model = server.model(&once(provider));
        // The end comes while the next call begins, so it may take a few.
        let mut calls = 0;
        while server.connections() == calls {
            assert!(calls < 100, "a connection for each call");
            provider::call(&model, &request()).await.0.expect("an answer");
            given.add_permits(1);
            calls += 1;
        }
    }
}

#[tokio::test]
async fn base_urls_may_have_a_path_and_a_query() {
    let server = Server::start([json_reply(&whole_answer(Provider::OpenAi, "ok"))]).await;
    let url = format!("{}/deep/v1/?api-version=7", server.url);
    let environment = Environment::new(move |name| (name == "OPENAI_BASE_URL").then(|| url.clone()));
    let model = Model::new(&once(Provider::OpenAi), environment).expect("a model");
    provider::call(&model, &request()).await.0.expect("an answer without a key");
    let asked = server.only();
    assert!(asked.head.starts_with("POST /deep/v1/chat/completions?api-version=7 HTTP/1.1\r\n"), "{}", asked.head);
    assert_eq!(asked.header("authorization"), None);
}

/// The bytes of a reply, cut at these places, each piece sent on its own.
fn trickled(provider: Provider, text: &str, cuts: &[prop::sample::Index]) -> Reply {
    let line_ends = if provider == Provider::OpenAi { "\n" } else { "\r\n" };
    let text = text.replace('\n', line_ends);
    let bytes = text.as_bytes();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
    cuts.extend([0, bytes.len()]);
    cuts.sort_unstable();
    cuts.dedup();
    let pieces = cuts.windows(2).map(|pair| Part::Bytes(chunk(&bytes[pair[0]..pair[1]])));
    std::iter::once(Part::Bytes(stream_head())).chain(pieces).chain([Part::Bytes(b"0\r\n\r\n".to_vec())]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn however_a_stream_is_cut_into_pieces_the_answer_is_the_same(
        anthropic: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let provider = BOTH[usize::from(anthropic)];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let answer = runtime.block_on(answer_of(provider, trickled(provider, &calls_stream(provider), &cuts)));
        prop_assert_eq!(answer.tool_calls, two_calls());
        prop_assert_eq!(answer.usage, Usage { input_tokens: 11, output_tokens: 3, estimated: false });
        let words = ["Größe ", "der Platte: ", "97 % \u{1f525}"];
        let text = text_stream(provider, &words);
        let answer = runtime.block_on(answer_of(provider, trickled(provider, &text, &cuts)));
        prop_assert_eq!(answer.text, Some(words.concat()));
    }
}
