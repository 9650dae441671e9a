//! HTTP calls: what is sent, what an answer means, and what no answer means.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Folder, PATIENCE, Server, TRACEPARENT, call};
use longhaul::TaskError;
use longhaul_agent::{Artifacts, Output, Tool};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn http(method: &str, url: &str, more: &str) -> Tool {
    let lines = format!("env = [\"CARGO_PKG_NAME\"]\nhttp = {{ method = \"{method}\", url = \"{url}\"{more} }}");
    Folder::new().tool(&lines)
}

async fn failing(status: &str, body: &str) -> TaskError {
    let server = Server::answering(status, body).await;
    http("POST", &server.url, "").run(&call(Value::Null)).await.expect_err("a failure")
}

#[tokio::test]
async fn a_request_carries_the_input_and_names_the_call() {
    let server = Server::answering("200 OK", r#"{"id": 7}"#).await;
    let tool = http("POST", &format!("{}/live", server.url), "");
    assert_eq!(tool.run(&call(json!({"app": "shop"}))).await.expect("200"), json!({"id": 7}));
    let asked = server.only();
    assert!(asked.head.starts_with("POST /live HTTP/1.1\r\n"), "{}", asked.head);
    assert_eq!(
        serde_json::from_str::<Value>(&asked.body).expect("JSON"),
        json!({"input": {"app": "shop"}, "steps": {}})
    );
    let id = "0198f000-0000-7000-8000-000000000001";
    assert_eq!(asked.header("content-type"), Some("application/json"));
    assert_eq!(asked.header("longhaul-task-id"), Some(id));
    assert_eq!(asked.header("longhaul-step"), Some("one"));
    assert_eq!(asked.header("idempotency-key"), Some(format!("{id}/one").as_str()));
    assert_eq!(asked.header("longhaul-fence"), Some("7"));
    assert_eq!(asked.header("traceparent"), Some(TRACEPARENT));
}

#[tokio::test]
async fn get_has_no_body_and_an_empty_answer_is_null() {
    let server = Server::answering("204 No Content", "").await;
    assert_eq!(http("GET", &server.url, "").run(&call(json!(1))).await.expect("204"), Value::Null);
    assert_eq!((server.only().body.as_str(), server.only().header("content-length")), ("", None));
}

#[tokio::test]
async fn values_are_encoded_in_a_url_and_cannot_leave_their_place() {
    let server = Server::answering("200 OK", "ok").await;
    let tool = http("GET", &format!("{}/apps/{{{{input.app}}}}/log?since={{{{input.since}}}}", server.url), "");
    let run = |app: &str, since: &str| {
        let call = call(json!({"app": app, "since": since}));
        let tool = tool.clone();
        async move { tool.run(&call).await }
    };
    run("a/b?c=d#e&f %2F ü", "1&admin=1").await.expect("200");
    let first = server.only().head;
    let line = first.lines().next().expect("a request line");
    assert_eq!(line, "GET /apps/a%2Fb%3Fc%3Dd%23e%26f%20%252F%20%C3%BC/log?since=1%26admin%3D1 HTTP/1.1");
    run("x", "").await.expect("an empty query value is fine");
    for app in ["..", ".", ""] {
        let error = run(app, "1").await.expect_err("it would be another path");
        assert_eq!(
            (error.code.as_str(), error.retryable, error.is_in_doubt()),
            ("bad_url", false, false),
            "{app}"
        );
    }
    assert_eq!(server.asked().len(), 2, "nothing else was sent");
}

#[tokio::test]
async fn headers_and_body_of_its_own_are_filled_and_secrets_come_from_the_environment() {
    let server = Server::answering("200 OK", "").await;
    let tool = http(
        "PUT",
        &server.url,
        r#", headers = { Authorization = "Bearer {{env.CARGO_PKG_NAME}}", X-App = "{{input.app}}" },
             body = { app = "{{input.app}}", all = "{{input}}", replicas = 3 }"#,
    );
    tool.run(&call(json!({"app": "a\"b"}))).await.expect("200");
    let asked = server.only();
    assert_eq!(asked.header("authorization"), Some("Bearer longhaul-agent"));
    assert_eq!(asked.header("x-app"), Some("a\"b"));
    let body: Value = serde_json::from_str(&asked.body).expect("JSON");
    assert_eq!(body, json!({"app": "a\"b", "all": {"app": "a\"b"}, "replicas": 3}));

    let error = tool.run(&call(json!({"app": "x\r\nadmin: yes"}))).await.expect_err("a line break");
    assert_eq!((error.code.as_str(), error.retryable), ("bad_header", false));
    assert_eq!(server.asked().len(), 1);
}

#[tokio::test]
async fn a_client_error_is_a_known_failure_with_what_was_said() {
    let error = failing("409 Conflict", " the name is taken\n").await;
    assert!(error.message.ends_with(" answered 409 Conflict: the name is taken"), "{}", error.message);
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("http_status", true, false));
    assert_eq!(error.details["status"], 409);
    for status in ["408 Request Timeout", "425 Too Early", "429 Too Many Requests", "404 Not Found"] {
        let error = failing(status, "").await;
        assert_eq!((error.retryable, error.is_in_doubt()), (true, false), "{status}");
    }
}

#[tokio::test]
async fn a_server_error_leaves_the_outcome_in_doubt() {
    for status in ["500 Internal Server Error", "503 Service Unavailable", "504 Gateway Timeout"] {
        let error = failing(status, &"x".repeat(100_000)).await;
        assert_eq!((error.code.as_str(), error.is_in_doubt()), ("http_status", true), "{status}");
        assert!(error.message.len() < 5_000 && error.message.ends_with("x …"), "{} bytes", error.message.len());
    }
}

#[tokio::test]
async fn a_connection_lost_after_sending_leaves_the_outcome_in_doubt() {
    for cut in ["", "HTTP/1.1 200 OK\r\ncontent-le", "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"] {
        let server = Server::start(cut).await;
        let tool = http("POST", &format!("{}/live?token=secret", server.url), "");
        let error = tool.run(&call(Value::Null)).await.expect_err("cut off");
        assert!(error.is_in_doubt(), "{cut:?}: {error}");
        assert!(!error.message.contains("secret"), "{}", error.message);
        assert_eq!(server.asked().len(), 1, "sent once");
    }
}

#[tokio::test]
async fn a_refused_connection_is_a_known_failure() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/x", listener.local_addr().expect("bound"));
    drop(listener);
    let error = http("POST", &url, "").run(&call(Value::Null)).await.expect_err("nobody listens");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("not_connected", true, false));
    assert!(error.message.contains("refused"), "{}", error.message);
    let error =
        http("POST", "http://no-such-host.invalid/", "").run(&call(Value::Null)).await.expect_err("no host");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("not_connected", true, false));
}

#[tokio::test]
async fn a_server_that_does_not_speak_tls_is_a_known_failure() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("https://{}/x", listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let error = http("POST", &url, "").run(&call(Value::Null)).await;
    let error = error.expect_err("no TLS there");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("not_connected", true, false));
}

#[tokio::test]
async fn every_call_has_a_connection_of_its_own() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/x", listener.local_addr().expect("bound"));
    let connections = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&connections);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            // Keeps the connection open for more, should anyone want to send more.
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(1..) = stream.read(&mut buffer).await {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
                }
            });
        }
    });
    for _ in 0..3 {
        http("GET", &url, "").run(&call(Value::Null)).await.expect("200");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_redirect_is_followed_for_reading_only() {
    let target = Server::answering("200 OK", "there").await;
    let server =
        Server::start(format!("HTTP/1.1 302 Found\r\nlocation: {}\r\ncontent-length: 0\r\n\r\n", target.url))
            .await;
    assert_eq!(http("GET", &server.url, "").run(&call(Value::Null)).await.expect("followed"), json!("there"));
    let error = http("POST", &server.url, "").run(&call(Value::Null)).await.expect_err("not followed");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("http_redirect", false, false));
    assert!(error.message.contains(&target.url), "{}", error.message);
    assert_eq!(target.asked().len(), 1);
}

#[tokio::test]
async fn an_answer_that_is_too_large_is_not_kept() {
    let server = Server::answering("200 OK", &"x".repeat(1024 * 1024 + 1)).await;
    let run = http("POST", &server.url, "");
    let error = tokio::time::timeout(PATIENCE, run.run(&call(Value::Null)))
        .await
        .expect("in time")
        .expect_err("too large");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("output_too_large", false, true));
    let server = Server::answering("200 OK", &"x".repeat(1024 * 1024)).await;
    let result = http("POST", &server.url, "").run(&call(Value::Null)).await.expect("exactly the limit");
    assert_eq!(result.as_str().map(str::len), Some(1024 * 1024));
}

#[tokio::test]
async fn a_missing_value_is_told_before_anything_is_sent() {
    let server = Server::answering("200 OK", "").await;
    let tool = http("POST", &format!("{}/{{{{input.app}}}}", server.url), "");
    let error = tool.run(&call(json!({"name": 1}))).await.expect_err("no app");
    assert_eq!(error.code, "placeholder_missing");
    assert_eq!(error.message, "{{input.app}} has no value: input has only name");
    assert!(server.asked().is_empty());
}

#[tokio::test]
async fn a_long_answer_goes_to_storage_while_it_comes() {
    let server = Server::answering("200 OK", &"a line of the answer\n".repeat(200_000)).await;
    let artifacts = Artifacts::open("memory:").expect("in memory");
    let tool = http("GET", &server.url, "");
    let output = tool.run_long(&call(Value::Null), 16_384, &artifacts, "t").await.expect("200");
    assert!(matches!(output, Output::Stored(stored) if stored.bytes == 4_200_000 && stored.lines == 200_000));
    let error = tool.run(&call(Value::Null)).await.expect_err("too much for memory");
    assert_eq!((error.code.as_str(), error.is_in_doubt()), ("output_too_large", true));
}
