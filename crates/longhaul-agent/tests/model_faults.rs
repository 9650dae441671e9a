//! Calls of models that go wrong: what is tried again, what is not, what is said, and what never is.

mod provider;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longhaul::TaskError;
use longhaul_agent::model::{Environment, Model, ModelSettings, Provider, Retries, Timeouts};
use provider::{
    KEY, Part, Reply, Server, calls_stream, chunk, delta, events, json_reply, once, reply, request, settings,
    stream, stream_head, stream_then, text_stream, whole_answer,
};
use serde_json::{Value, json};

const BOTH: [Provider; 2] = [Provider::OpenAi, Provider::Anthropic];
/// A time that passes in a test.
const SHORT: Duration = Duration::from_millis(60);

fn good(provider: Provider) -> Reply {
    stream(&text_stream(provider, &["Go", "od"]))
}

/// The error of a call that is tried once.
async fn error_of(provider: Provider, reply: Reply) -> TaskError {
    Server::start([reply]).await.call(&once(provider)).await.0.expect_err("a failure")
}

/// Fails if the call does not go well at its second try.
async fn second_try_helps(provider: Provider, what: &str, first: Reply) {
    let server = Server::start([first, good(provider)]).await;
    let (answer, heard) = server.call(&settings(provider)).await;
    let answer = answer.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(answer.text.as_deref(), Some("Good"), "{what}");
    assert!(answer.tool_calls.is_empty(), "{what}");
    assert_eq!(server.asked().len(), 2, "{what}");
    let last: Vec<_> = heard.iter().filter(|(attempt, _)| *attempt == 2).map(|(_, text)| text.as_str()).collect();
    assert_eq!(last, ["Go", "od"], "{what}");
}

/// The first half of a streamed answer with words, up to the middle of an event.
fn half(provider: Provider) -> String {
    let text = text_stream(provider, &["Ba", "d"]);
    text[..text.find("\"d\"").expect("the second piece")].to_owned()
}

/// The same, up to the end of an event.
fn half_events(provider: Provider) -> String {
    let half = half(provider);
    half[..half.rfind("\n\n").expect("an event") + 2].to_owned()
}

#[tokio::test]
async fn what_may_pass_is_tried_again() {
    for provider in BOTH {
        for status in [
            "408 Request Timeout",
            "429 Too Many Requests",
            "500 Internal Server Error",
            "502 Bad Gateway",
            "503 Service Unavailable",
            "504 Gateway Timeout",
            "529 Overloaded",
        ] {
            second_try_helps(provider, status, reply(status, "", "later")).await;
        }
        let words = half(provider);
        second_try_helps(provider, "reset before the answer", vec![Part::Reset]).await;
        second_try_helps(provider, "closed before the answer", vec![Part::Close]).await;
        second_try_helps(provider, "reset in the middle", stream_then(&words, Part::Reset)).await;
        second_try_helps(provider, "closed in the middle", stream_then(&words, Part::Close)).await;
        second_try_helps(provider, "ended in the middle", stream(&words)).await;
        second_try_helps(provider, "an empty stream", stream("")).await;
        second_try_helps(provider, "malformed JSON", reply("200 OK", "", "{\"choices\": [")).await;
        second_try_helps(provider, "malformed event", stream("data: {\"choices\n\n")).await;
        second_try_helps(provider, "another JSON", json_reply(&json!({"hello": "world"}))).await;
        second_try_helps(provider, "a web page", reply("200 OK", "", "<html>Log in</html>")).await;
        second_try_helps(provider, "nothing", reply("200 OK", "", "")).await;
        let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
        second_try_helps(provider, "an error for an answer", json_reply(&error)).await;
        let broken_off = format!("{}{}", half_events(provider), events(&[error]));
        second_try_helps(provider, "an error in the stream", stream(&broken_off)).await;
    }
    let error = ended_with_error();
    second_try_helps(Provider::OpenAi, "an end by error", stream(&events(&[error]))).await;
}

fn ended_with_error() -> Value {
    let mut event = delta(json!({"content": ""}));
    event["choices"][0]["finish_reason"] = "error".into();
    event
}

#[tokio::test]
async fn an_answer_that_breaks_off_anywhere_is_whole_or_none() {
    for provider in BOTH {
        let text = calls_stream(provider);
        let (whole, _) = Server::start([stream(&text)]).await.call(&once(provider)).await;
        let whole = whole.expect("an answer").tool_calls;
        let mut given = 0;
        for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)).step_by(7) {
            let reply = if cut % 2 == 0 { stream(&text[..cut]) } else { stream_then(&text[..cut], Part::Close) };
            match Server::start([reply]).await.call(&once(provider)).await.0 {
                Ok(answer) => {
                    assert_eq!(answer.tool_calls, whole, "cut at {cut}");
                    given += 1;
                }
                Err(error) => {
                    assert!(error.retryable, "cut at {cut}: {error}");
                    let codes = ["model_unavailable", "model_bad_answer"];
                    assert!(codes.contains(&error.code.as_str()), "cut at {cut}: {error}");
                }
            }
        }
        assert!(given > 0, "the last cuts take nothing away");
    }
}

#[tokio::test]
async fn half_a_tool_call_before_a_proper_end_is_no_tool_call() {
    let text = calls_stream(Provider::OpenAi);
    let cut = text.find("\\\"/var\\\"}").and_then(|end| text[..end].rfind("data: ")).expect("the last piece");
    let error = error_of(Provider::OpenAi, stream(&format!("{}data: [DONE]\n\n", &text[..cut]))).await;
    assert_eq!((error.code.as_str(), error.retryable), ("model_unavailable", true));
}

#[tokio::test]
async fn tries_are_counted_and_end() {
    for provider in BOTH {
        let server = Server::start([reply("500 Internal Server Error", "", "boom")]).await;
        let error = server.call(&settings(provider)).await.0.expect_err("never well");
        assert_eq!(server.asked().len(), 4);
        assert_eq!((error.code.as_str(), error.retryable), ("model_unavailable", true));
        assert_eq!((&error.details["status"], &error.details["attempts"]), (&json!(500), &json!(4)));
        assert!(
            error.message.contains("m-1 at http://127.0.0.1:") && error.message.ends_with("answered 500: boom")
        );
    }
}

#[tokio::test]
async fn a_wait_that_the_provider_asks_for_is_kept_when_it_is_not_too_long() {
    // Without the header, the pause would be an hour.
    let mut settings = settings(Provider::OpenAi);
    settings.retries =
        Retries { pause: Duration::from_secs(3600), max_pause: Duration::from_secs(3600), ..settings.retries };
    for header in ["retry-after: 0\r\n", "retry-after-ms: 5\r\n", "retry-after: Tue, 17 Nov 2020 08:00:00 GMT\r\n"]
    {
        let limited = reply("429 Too Many Requests", header, "");
        let server = Server::start([limited, good(Provider::OpenAi)]).await;
        assert!(server.call(&settings).await.0.is_ok(), "{header}");
    }
    for (header, provider) in [
        ("retry-after: 61\r\n", Provider::OpenAi),
        ("retry-after: Fri, 17 Nov 2090 08:00:00 GMT\r\n", Provider::Anthropic),
    ] {
        let server = Server::start([reply("429 Too Many Requests", header, "{}"), good(provider)]).await;
        let error = server.call(&provider::settings(provider)).await.0.expect_err("too long");
        assert_eq!((error.code.as_str(), error.retryable), ("model_rate_limited", true));
        assert_eq!(server.asked().len(), 1);
        assert!(
            error.details["retry_after_ms"].as_u64().is_some_and(|wait| wait >= 61_000),
            "{:?}",
            error.details
        );
        assert!(error.message.contains("left alone for") && error.message.contains("60 s"), "{error}");
    }
}

#[tokio::test]
async fn what_waiting_cannot_mend_is_told_at_once_with_what_to_do() {
    for provider in BOTH {
        let (key, url) = match provider {
            Provider::OpenAi => ("OPENAI_API_KEY", "OPENAI_BASE_URL"),
            Provider::Anthropic => ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
        };
        for (status, said, code, remedy) in [
            ("400 Bad Request", "tools: bad", "model_bad_request", "tools: bad"),
            ("400 Bad Request", "stream_options: unknown", "model_bad_request", "stream = false"),
            ("400 Bad Request", "prompt is too long: 9 tokens > 8", "context_too_long", "context_window"),
            ("401 Unauthorized", "no", "model_refused_key", key),
            ("403 Forbidden", "no", "model_refused_key", key),
            ("404 Not Found", "no such model", "model_not_found", url),
            ("413 Payload Too Large", "large", "context_too_long", "context_window"),
            ("422 Unprocessable Entity", "x", "model_bad_request", "answered 422: x"),
            ("307 Temporary Redirect", "", "model_bad_request", url),
        ] {
            let body = json!({"error": {"type": "some_error", "message": said}}).to_string();
            let server = Server::start([reply(status, "location: /elsewhere\r\n", &body)]).await;
            let error = server.call(&settings(provider)).await.0.expect_err("a failure");
            assert_eq!((error.code.as_str(), error.retryable), (code, false), "{status}");
            assert!(error.message.contains(remedy), "{status}: {error}");
            assert_eq!(server.asked().len(), 1, "{status}");
        }
    }
    let quota = json!({"error": {"code": "insufficient_quota", "message": "You exceeded your quota"}}).to_string();
    let error = error_of(Provider::OpenAi, reply("429 Too Many Requests", "", &quota)).await;
    assert_eq!((error.code.as_str(), error.retryable), ("model_rate_limited", false));
    assert!(error.message.contains("no credit"), "{error}");
}

#[tokio::test]
async fn a_missing_key_is_told_before_anybody_is_called() {
    for (provider, variable) in [(Provider::OpenAi, "OPENAI_API_KEY"), (Provider::Anthropic, "ANTHROPIC_API_KEY")]
    {
        let model = Model::new(&settings(provider), Environment::new(|_| None)).expect("a key may still come");
        assert!(model.ready().await.is_err());
        let error = provider::call(&model, &request()).await.0.expect_err("no key");
        assert_eq!((error.code.as_str(), error.retryable), ("model_refused_key", false));
        assert!(error.message.contains(&format!("set {variable} or {variable}_FILE")), "{error}");
    }
}

#[tokio::test]
async fn a_key_that_is_rotated_in_its_file_is_used_from_the_next_call_on() {
    let server = Server::start([good(Provider::OpenAi)]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("key").to_str().expect("text").to_owned();
    let (url, path) = (server.url.clone(), file.clone());
    let environment = Environment::new(move |name| match name {
        "OPENAI_BASE_URL" => Some(url.clone()),
        "OPENAI_API_KEY_FILE" => Some(path.clone()),
        _ => None,
    });
    let model = Model::new(&once(Provider::OpenAi), environment).expect("a model");
    for key in ["first", "second"] {
        std::fs::write(&file, format!("{key}\n")).expect("written");
        assert!(model.ready().await.is_ok());
        provider::call(&model, &request()).await.0.expect("an answer");
        let asked = server.asked().pop().expect("asked");
        assert_eq!(asked.header("authorization"), Some(format!("Bearer {key}").as_str()));
    }
}

fn timeouts(set: impl FnOnce(&mut Timeouts)) -> ModelSettings {
    let mut settings = once(Provider::OpenAi);
    set(&mut settings.timeouts);
    settings
}

#[tokio::test]
async fn silence_before_the_first_token_ends_a_try() {
    let settings = timeouts(|timeouts| timeouts.first_token = SHORT);
    let role = events(&[json!({"choices": []})]);
    // Nothing at all, only a head, and signs of life that are no tokens.
    for reply in
        [vec![Part::Stall], stream_then("", Part::Stall), stream_then(&format!(": wait\n\n{role}"), Part::Stall)]
    {
        let error = Server::start([reply]).await.call(&settings).await.0.expect_err("silence");
        assert_eq!((error.code.as_str(), error.retryable), ("model_timeout", true), "{error}");
        assert!(error.message.contains("for 60ms"), "{error}");
    }
}

#[tokio::test]
async fn silence_between_tokens_ends_a_try_and_the_next_may_go_well() {
    for provider in BOTH {
        let mut settings = settings(provider);
        settings.timeouts.silence = SHORT;
        let first = stream_then(&half_events(provider), Part::Stall);
        let server = Server::start([first, good(provider)]).await;
        let (answer, heard) = server.call(&settings).await;
        assert_eq!(answer.expect("an answer").text.as_deref(), Some("Good"));
        assert_eq!(heard, [(1, "Ba".to_owned()), (2, "Go".to_owned()), (2, "od".to_owned())]);
    }
    let settings = timeouts(|timeouts| timeouts.silence = SHORT);
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"choices\"".to_vec();
    let error = Server::start([vec![Part::Bytes(head), Part::Stall]]).await.call(&settings).await.0;
    assert_eq!(error.expect_err("silence").code, "model_timeout");
}

#[tokio::test]
async fn a_whole_answer_may_take_longer_than_a_first_token() {
    // With stream = false the first-token limit is not kept: only the whole call ends it.
    let mut settings = timeouts(|timeouts| {
        timeouts.first_token = Duration::ZERO;
        timeouts.whole_call = SHORT;
    });
    settings.stream = false;
    let error = Server::start([vec![Part::Stall]]).await.call(&settings).await.0.expect_err("never");
    assert!(error.message.contains("whole call"), "{error}");
    settings.timeouts.whole_call = provider::PATIENCE;
    let server = Server::start([json_reply(&whole_answer(Provider::OpenAi, "ok"))]).await;
    assert!(server.call(&settings).await.0.is_ok());
}

#[tokio::test]
async fn the_whole_call_has_an_end_whatever_the_tries_do() {
    let mut settings = settings(Provider::OpenAi);
    settings.fallback_model = Some("m-2".to_owned());
    settings.timeouts.whole_call = SHORT;
    // Tokens without an end.
    let word = chunk(events(&[delta(json!({"content": "x"}))]).as_bytes());
    let mut endless = vec![Part::Bytes(stream_head())];
    endless.extend(std::iter::repeat_n(Part::Bytes(word), 3));
    endless.push(Part::Stall);
    let server = Server::start([endless]).await;
    let error = server.call(&settings).await.0.expect_err("never whole");
    assert_eq!((error.code.as_str(), error.retryable), ("model_timeout", true));
    assert!(error.message.contains("whole call"), "{error}");
    assert_eq!(server.asked().len(), 1, "there is no time for another try");
    // A pause that would last longer than the call is not begun.
    settings.timeouts.whole_call = Duration::from_secs(50);
    settings.fallback_model = None;
    let server = Server::start([reply("503 Service Unavailable", "retry-after: 59\r\n", "")]).await;
    let error = server.call(&settings).await.0.expect_err("unavailable");
    assert_eq!((error.code.as_str(), server.asked().len()), ("model_unavailable", 1));
}

#[tokio::test]
async fn a_connection_that_does_not_come_ends_a_try() {
    // Nobody accepts, and once the backlog is full the kernel does not answer either.
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let listener = socket.listen(1).expect("listening");
    let address = listener.local_addr().expect("bound");
    let mut held = Vec::new();
    while let Ok(Ok(stream)) = tokio::time::timeout(SHORT, tokio::net::TcpStream::connect(address)).await {
        held.push(stream);
    }
    let environment =
        Environment::new(move |name| (name == "OPENAI_BASE_URL").then(|| format!("http://{address}")));
    let settings = timeouts(|timeouts| timeouts.connect = SHORT);
    let model = Model::new(&settings, environment).expect("a model");
    let error = provider::call(&model, &request()).await.0.expect_err("no connection");
    assert_eq!((error.code.as_str(), error.retryable), ("model_timeout", true), "{error}");
    assert!(error.message.contains("connected to within 60ms"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_told_with_the_variable_that_names_it() {
    let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.and_then(|it| it.local_addr()).expect("a port");
    let environment =
        Environment::new(move |name| (name == "OPENAI_BASE_URL").then(|| format!("http://{port}/v1")));
    let model = Model::new(&settings(Provider::OpenAi), environment).expect("a model");
    let error = provider::call(&model, &request()).await.0.expect_err("nobody there");
    assert_eq!((error.code.as_str(), error.retryable), ("model_unavailable", true));
    assert!(error.message.contains("check OPENAI_BASE_URL") && error.details["attempts"] == 4, "{error}");
}

#[tokio::test]
async fn the_fallback_model_is_asked_when_the_first_cannot_be_had() {
    for provider in BOTH {
        let settings = ModelSettings { fallback_model: Some("m-2".to_owned()), ..settings(provider) };
        let down = reply("503 Service Unavailable", "", "");
        let server = Server::start([down.clone(), down.clone(), down.clone(), down.clone(), good(provider)]).await;
        let (answer, heard) = server.call(&settings).await;
        assert_eq!(answer.expect("an answer").text.as_deref(), Some("Good"));
        assert_eq!(heard, [(5, "Go".to_owned()), (5, "od".to_owned())]);
        let models: Vec<Value> = server.asked().iter().map(|asked| asked.body["model"].clone()).collect();
        assert_eq!(models, ["m-1", "m-1", "m-1", "m-1", "m-2"]);

        let server = Server::start([reply("404 Not Found", "", "gone"), good(provider)]).await;
        assert!(server.call(&settings).await.0.is_ok(), "another model may exist");

        let server = Server::start([down]).await;
        let error = server.call(&settings).await.0.expect_err("both are down");
        assert_eq!(server.asked().len(), 8);
        assert!(error.message.starts_with("m-2 at ") && error.details["attempts"] == 4, "{error}");
        assert!(error.cause.is_some_and(|first| first.message.starts_with("m-1 at ")));

        let server = Server::start([reply("401 Unauthorized", "", "no"), good(provider)]).await;
        assert!(server.call(&settings).await.0.is_err(), "the key is the same for both");
        assert_eq!(server.asked().len(), 1);
    }
}

#[tokio::test]
async fn an_answer_has_a_bound() {
    let word = chunk(&[b'x'; 1024 * 1024]);
    let mut endless = vec![Part::Bytes([stream_head(), chunk(b"data: ")].concat())];
    endless.extend(std::iter::repeat_n(Part::Bytes(word), 17));
    endless.push(Part::Stall);
    let error = error_of(Provider::OpenAi, endless).await;
    assert_eq!((error.code.as_str(), error.retryable), ("model_bad_answer", false));
    assert!(error.message.contains("more than 16777216 bytes"), "{error}");
}

/// Everything that is logged, spans with their fields included.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Logs everything of this thread, until the guard goes.
    fn begin(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .with_max_level(tracing::Level::TRACE)
            .with_span_events(tracing_subscriber::fmt::format::FmtSpan::FULL)
            .with_writer(move || log.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no panic").clone()).expect("text")
    }
}

#[tokio::test]
async fn a_key_is_in_no_error_no_log_and_no_debug_output() {
    for provider in BOTH {
        let log = Log::default();
        let guard = log.begin();
        let long = format!("{} {KEY}", "x".repeat(995));
        let echo = |said: &str| json!({"error": {"message": said, "type": "t", "code": said}}).to_string();
        let mut shown = String::new();
        for said in [format!("wrong key: {KEY}!"), long, format!("{KEY}{KEY}")] {
            let in_stream = events(&[json!({"type": "error", "error": {"message": said}})]);
            for reply in [
                reply("401 Unauthorized", &format!("x-key: {KEY}\r\n"), &echo(&said)),
                reply("500 Internal Server Error", "", &said),
                reply("302 Found", &format!("location: http://x/?key={KEY}\r\n"), ""),
                json_reply(&json!({"error": said})),
                stream(&in_stream),
                reply("200 OK", "", &format!("{{{KEY}")),
            ] {
                let server = Server::start([reply]).await;
                let model = server.model(&settings(provider));
                let (answer, _) = provider::call(&model, &request()).await;
                let error = answer.expect_err("a failure");
                assert!(server.asked().iter().all(|asked| asked.head.contains(KEY)), "the key was sent");
                let stored = serde_json::to_string(&error).expect("errors serialise");
                shown.push_str(&format!("{model:?} {error:?} {error} {stored} {:?}\n", model.ready().await));
            }
        }
        drop(guard);
        let logged = log.text();
        assert!(shown.contains("[key]") && logged.contains("model_unavailable"), "the test sees what is shown");
        // Half a key is too much, too.
        let half = &KEY[..KEY.len() / 2];
        for text in [shown, logged] {
            let line = text.lines().find(|line| line.contains(half));
            assert_eq!(line, None);
        }
    }
}

#[tokio::test]
async fn each_try_has_a_span_with_the_names_of_opentelemetry_and_without_words() {
    for provider in BOTH {
        let log = Log::default();
        let guard = log.begin();
        let server = Server::start([reply("500 Internal Server Error", "", "boom"), good(provider)]).await;
        server.call(&settings(provider)).await.0.expect("an answer");
        drop(guard);
        let lines: Vec<Value> = log.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let ended = |line: &&Value| line["fields"]["message"] == "close" && line["span"]["name"] == "chat";
        let spans: Vec<&Value> = lines.iter().filter(ended).map(|line| &line["span"]).collect();
        let [first, second] = spans.as_slice() else { panic!("two tries: {spans:?}") };
        let expected = json!({
            "otel.name": "chat m-1",
            "otel.kind": "client",
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": provider.name(),
            "gen_ai.request.model": "m-1",
            "gen_ai.request.temperature": 0.5,
            "server.address": "127.0.0.1",
        });
        for span in [first, second] {
            for (name, value) in expected.as_object().expect("an object") {
                assert_eq!(&span[name], value, "{name}");
            }
        }
        assert_eq!((&first["error.type"], &first["attempt"]), (&json!("model_unavailable"), &json!(1)));
        assert_eq!((&second["error.type"], &second["attempt"]), (&Value::Null, &json!(2)));
        assert_eq!(second["gen_ai.response.model"], "m-1-2026");
        assert_eq!(second["gen_ai.response.finish_reasons"], "[\"stop\"]");
        assert_eq!(
            (&second["gen_ai.usage.input_tokens"], &second["gen_ai.usage.output_tokens"]),
            (&json!(11), &json!(3))
        );
        for word in ["Fix it.", "You are an agent.", "Good", "disk usage"] {
            assert!(!log.text().contains(word), "{word} is content");
        }
    }
}

/// In this process there is a proxy; set for a child by the test below.
const PROXIED: &str = "LONGHAUL_TEST_PROXIED";

#[tokio::test]
async fn this_very_machine_is_never_asked_through_a_proxy() {
    let server = Server::start([good(Provider::OpenAi)]).await;
    if std::env::var_os(PROXIED).is_some() {
        server.call(&once(Provider::OpenAi)).await.0.expect("an answer without the proxy");
        assert_eq!(server.asked().len(), 1);
        let environment =
            Environment::new(|name| (name == "OPENAI_BASE_URL").then(|| "http://model.test/v1".to_owned()));
        let model = Model::new(&once(Provider::OpenAi), environment).expect("a model");
        let answer = provider::call(&model, &request()).await.0.expect("an answer by the proxy");
        assert_eq!(answer.text.as_deref(), Some("Proxied"));
        return;
    }
    // The environment is the process's, and other tests run in this one.
    let proxy = Server::start([stream(&text_stream(Provider::OpenAi, &["Proxied"]))]).await;
    let child = tokio::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "this_very_machine_is_never_asked_through_a_proxy"])
        .env(PROXIED, "1")
        .env_remove("NO_PROXY")
        .env_remove("no_proxy")
        .env("HTTP_PROXY", &proxy.url)
        .env("http_proxy", &proxy.url)
        .output();
    let output = child.await.expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(proxy.asked().len(), 1);
}
