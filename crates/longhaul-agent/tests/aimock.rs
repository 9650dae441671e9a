//! Calls of models against aimock, a provider that others wrote: its form of both APIs, and its faults.

mod provider;

use std::path::PathBuf;
use std::process::Stdio;

use longhaul_agent::model::{Answer, Environment, Finish, Message, Model, ModelSettings, Provider, Request};
use provider::{PATIENCE, call, request, settings};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const BOTH: [Provider; 2] = [Provider::OpenAi, Provider::Anthropic];

/// A running aimock with these fixtures; ends with this value.
struct Aimock {
    url: String,
    _folder: tempfile::TempDir,
    _child: Child,
}

impl Aimock {
    /// None, with a line that says so, when there is no aimock here.
    async fn start(fixtures: Value) -> Option<Self> {
        let Some(program) = std::env::var_os("LONGHAUL_TEST_AIMOCK").map(PathBuf::from) else {
            eprintln!(
                "skipped: needs aimock (tests/node/package.json); set LONGHAUL_TEST_AIMOCK or use ./dev test"
            );
            return None;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("fixtures.json");
        std::fs::write(&file, json!({"fixtures": fixtures}).to_string()).expect("written");
        let mut child = Command::new(program)
            .args(["--port", "0", "--chunk-size", "4", "--validate-on-load", "--fixtures"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("aimock starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let listening = async {
            loop {
                let line = lines.next_line().await.expect("text").expect("aimock says where it listens");
                if let Some((_, url)) = line.split_once("listening on ") {
                    return url.trim().to_owned();
                }
            }
        };
        let url = tokio::time::timeout(PATIENCE, listening).await.expect("aimock listens in time");
        // What it says later must not fill the pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Some(Self { url, _folder: folder, _child: child })
    }

    fn model(&self, settings: &ModelSettings) -> Model {
        let url = self.url.clone();
        let environment = Environment::new(move |name| match name {
            "OPENAI_BASE_URL" => Some(format!("{url}/v1")),
            "ANTHROPIC_BASE_URL" => Some(url.clone()),
            _ => None,
        });
        Model::new(settings, environment).expect("a model")
    }

    /// The answer to these words, by each provider, streamed and not.
    async fn answers(&self, words: &str) -> Vec<Answer> {
        let mut answers = Vec::new();
        for provider in BOTH {
            for stream in [true, false] {
                let settings = ModelSettings { stream, ..settings(provider) };
                let (answer, heard) = call(&self.model(&settings), &asking(words)).await;
                let answer = answer.unwrap_or_else(|error| panic!("{words} by {provider:?}: {error}"));
                let last = heard.iter().map(|(attempt, _)| *attempt).max();
                let heard: String =
                    heard.into_iter().filter(|(it, _)| Some(*it) == last).map(|(_, text)| text).collect();
                assert_eq!(heard, answer.text.clone().unwrap_or_default());
                answers.push(answer);
            }
        }
        answers
    }
}

fn asking(words: &str) -> Request {
    Request { messages: vec![Message::User { text: words.to_owned() }], ..request() }
}

#[tokio::test]
async fn aimock_answers_with_text() {
    let fixtures =
        json!([{"match": {"userMessage": "disk"}, "response": {"content": "The disk is nearly full: 97 %."}}]);
    let Some(aimock) = Aimock::start(fixtures).await else { return };
    for answer in aimock.answers("How is the disk?").await {
        assert_eq!(answer.text.as_deref(), Some("The disk is nearly full: 97 %."));
        assert_eq!((answer.finish, answer.model.as_str()), (Finish::Stop, "m-1"));
    }
}

#[tokio::test]
async fn aimock_calls_tools_and_takes_their_results() {
    let calls = json!([
        {"id": "call_a", "name": "check_disk", "arguments": {"path": "/"}},
        {"id": "call_b", "name": "check_disk", "arguments": {"path": "/var"}},
    ]);
    let fixtures = json!([
        {"match": {"userMessage": "full", "hasToolResult": true, "toolCallId": "call_b"}, "response": {"content": "Done."}},
        {"match": {"userMessage": "full"}, "response": {"content": "I look.", "toolCalls": calls}},
    ]);
    let Some(aimock) = Aimock::start(fixtures).await else { return };
    for provider in BOTH {
        let model = aimock.model(&settings(provider));
        let mut request = asking("The disk is full.");
        let answer = call(&model, &request).await.0.expect("an answer");
        let found: Vec<(&str, Value)> = answer
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), serde_json::from_str(&call.arguments).expect("JSON")))
            .collect();
        assert_eq!(found, [("call_a", json!({"path": "/"})), ("call_b", json!({"path": "/var"}))]);
        assert_eq!((answer.text.as_deref(), &answer.finish), (Some("I look."), &Finish::ToolCalls));
        request.messages.push(answer.message());
        request.messages.extend(answer.tool_calls.iter().map(|call| Message::ToolResult {
            call_id: call.id.clone(),
            name: call.name.clone(),
            content: "97 %".to_owned(),
            failed: false,
        }));
        let answer = call(&model, &request).await.0.expect("an answer");
        assert_eq!((answer.text.as_deref(), answer.finish), (Some("Done."), Finish::Stop));
    }
}

/// A fault at the first request with these words, and an answer at each later one.
fn at_first(words: &str, fault: Value) -> Vec<Value> {
    let mut first = fault;
    first["match"] = json!({"userMessage": words, "sequenceIndex": 0});
    vec![first, json!({"match": {"userMessage": words}, "response": {"content": "All is well again."}})]
}

#[tokio::test]
async fn faults_of_aimock_that_may_pass_are_overcome() {
    let long = "This answer does not come to its end.";
    let limited =
        json!({"error": {"message": "Rate limited", "type": "rate_limit_error"}, "status": 429, "retryAfter": 0});
    let overloaded = json!({"error": {"message": "Overloaded", "type": "overloaded_error"}, "status": 529});
    let calls = json!([{"name": "check_disk", "arguments": {"path": "/a/long/path/that/comes/in/pieces"}}]);
    let faults = [
        ("limited", json!({"response": limited})),
        ("overloaded", json!({"response": overloaded})),
        ("cut", json!({"response": {"content": long}, "truncateAfterChunks": 3})),
        ("half a call", json!({"response": {"toolCalls": calls}, "truncateAfterChunks": 3})),
        ("dropped", json!({"response": {"content": long}, "chaos": {"dropRate": 1}})),
        ("malformed", json!({"response": {"content": long}, "chaos": {"malformedRate": 1}})),
        ("disconnected", json!({"response": {"content": long}, "chaos": {"disconnectRate": 1}})),
    ];
    let fixtures: Vec<Value> = faults.iter().flat_map(|(words, fault)| at_first(words, fault.clone())).collect();
    for provider in BOTH {
        let Some(aimock) = Aimock::start(json!(fixtures)).await else { return };
        for (words, _) in &faults {
            let (answer, heard) = call(&aimock.model(&settings(provider)), &asking(words)).await;
            assert!(heard.last().is_some_and(|(attempt, _)| *attempt >= 2), "{words}: there was no fault");
            let answer = answer.unwrap_or_else(|error| panic!("{words}: {error}"));
            assert_eq!(answer.text.as_deref(), Some("All is well again."), "{words}");
            assert_eq!(answer.tool_calls, [], "{words}");
        }
    }
}

#[tokio::test]
async fn faults_of_aimock_that_stay_are_told_as_what_they_are() {
    let error = |message: &str, kind: &str, status: u16| json!({"error": {"message": message, "type": kind}, "status": status});
    let too_long = "This model's maximum context length is 8192 tokens.";
    let fixtures = json!([
        {"match": {"userMessage": "key"}, "response": error("Incorrect API key", "authentication_error", 401)},
        {"match": {"userMessage": "model"}, "response": error("No such model", "not_found_error", 404)},
        {"match": {"userMessage": "long"}, "response": error(too_long, "invalid_request_error", 400)},
        {"match": {"userMessage": "never"}, "response": {"content": "x"}, "chaos": {"malformedRate": 1}},
        {"match": {"userMessage": "gone"}, "response": {"content": "x"}, "chaos": {"disconnectRate": 1}},
        {"match": {"userMessage": "down"}, "response": {"content": "x"}, "chaos": {"dropRate": 1}},
    ]);
    let Some(aimock) = Aimock::start(fixtures).await else { return };
    for provider in BOTH {
        for (words, code, retryable) in [
            ("key", "model_refused_key", false),
            ("model", "model_not_found", false),
            ("long", "context_too_long", false),
            ("never", "model_bad_answer", true),
            ("gone", "model_unavailable", true),
            ("down", "model_unavailable", true),
        ] {
            let error = call(&aimock.model(&settings(provider)), &asking(words)).await.0.expect_err("a failure");
            assert_eq!((error.code.as_str(), error.retryable), (code, retryable), "{words}: {error}");
        }
    }
}
