//! What a client should never send: refused with a 4xx before anything is stored, the same on both stores.

mod common;

use std::time::Duration;

use common::{PATIENCE, Server, Store};
use longhaul_server::ServerSettings;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

on_every_store!(
    hostile_bodies_are_refused_before_anything_is_stored,
    hostile_requests_are_refused_and_the_server_goes_on,
    a_body_beyond_the_bound_is_refused_without_being_read,
    slow_requests_are_cut_off,
    no_more_connections_are_served_than_allowed,
);

async fn serving(store: &Store) -> Server {
    let server = Server::start(store.open().await, ServerSettings::default()).await;
    server.client.announce(&["h"]).await.expect("announced");
    server
}

/// Sends bytes as they are, and gives the answer's status and body.
async fn raw(server: &Server, request: &[u8]) -> (u16, String) {
    exchange(server, request, false).await
}

/// As [`raw`], and says with `cut_off` that nothing more comes.
async fn exchange(server: &Server, request: &[u8], cut_off: bool) -> (u16, String) {
    let mut stream = TcpStream::connect(server.address).await.expect("a connection");
    // The server may answer and close before it has read all.
    let _ = stream.write_all(request).await;
    if cut_off {
        let _ = stream.shutdown().await;
    }
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("an answer");
    let text = String::from_utf8_lossy(&answer).into_owned();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, text)
}

fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

async fn hostile_bodies_are_refused_before_anything_is_stored(store: Store) {
    let server = serving(&store).await;
    let deep =
        |depth: usize| format!("{{\"handler\":\"h\",\"input\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    let long = "x".repeat(300);
    let mut bodies: Vec<Vec<u8>> = [
        "",
        "null",
        "[]",
        "1",
        "\"x\"",
        "{",
        "{}}",
        "{\"handler\":}",
        "nope",
        "NaN",
        "{\"handler\":\"h\",\"input\":NaN}",
        "{\"handler\":\"h\",\"input\":Infinity}",
        "{\"handler\":\"h\",\"input\":1e400}",
        "{\"handler\":\"h\",\"input\":01}",
        "{\"handler\":\"h\",\"input\":'x'}",
        "{\"handler\":\"h\",\"input\":1,}",
        "{\"handler\":\"h\",\"handler\":\"h\"}",
        "{\"handler\":\"h\",\"input\":{\"a\":1,\"a\":2}}",
        "{\"handler\":\"h\",\"input\":\"\\ud800\"}",
        "{\"handler\":\"h\",\"input\":\"\\ud800\\u0041\"}",
        "{\"handler\":\"h\",\"input\":\"\\u0000\"}",
        "{\"handler\":\"h\\u0000\"}",
        "{\"handler\":\"\"}",
        "{\"handler\":\"a b\"}",
        "{\"handler\":\"a/b\"}",
        "{\"handler\":7}",
        "{\"handler\":\"h\",\"queue\":\"\"}",
        "{\"handler\":\"h\",\"queue\":[]}",
        "{\"handler\":\"h\",\"priority\":-1}",
        "{\"handler\":\"h\",\"priority\":10}",
        "{\"handler\":\"h\",\"priority\":1.5}",
        "{\"handler\":\"h\",\"priority\":\"9\"}",
        "{\"handler\":\"h\",\"priority\":9223372036854775808}",
        "{\"handler\":\"h\",\"max_attempts\":0}",
        "{\"handler\":\"h\",\"max_attempts\":99999999999}",
        "{\"handler\":\"h\",\"run_at\":\"tomorrow\"}",
        "{\"handler\":\"h\",\"run_at\":1e300}",
        "{\"handler\":\"h\",\"deadline\":\"9999999-01-01T00:00:00Z\"}",
        "{\"handler\":\"h\",\"timeout\":\"-5s\"}",
        "{\"handler\":\"h\",\"timeout\":\"99999999999999h\"}",
        "{\"handler\":\"h\",\"timeout\":5}",
        "{\"handler\":\"h\",\"timeout\":\"5s\",\"deadline\":\"2099-01-01T00:00:00Z\"}",
        "{\"handler\":\"h\",\"tags\":{\"a\":1}}",
        "{\"handler\":\"h\",\"tags\":{\"\":\"x\"}}",
        "{\"handler\":\"h\",\"tags\":[]}",
        "{\"handler\":\"h\",\"concurrency_key\":\"\"}",
        "{\"handler\":\"h\",\"key\":\"\"}",
        "{\"handler\":\"h\",\"unknown\":1}",
        "{\"handler\":\"h\",\"webhook\":\"http://x\"}",
        "{\"handler\":\"h\",\"webhook\":{\"url\":\"ftp://example.com/x\"}}",
        "{\"handler\":\"h\",\"webhook\":{\"url\":\"not a url\"}}",
        "{\"handler\":\"h\",\"webhook\":{\"url\":\"http://example.com\",\"events\":[\"\"]}}",
        "{\"handler\":\"h\",\"dedupe_window\":\"x\"}",
        "{\"handler\":\"h\",\"input\":1,\"user_input\":\"x\"}",
        "\u{feff}{\"handler\":\"h\"}",
        "{\"handler\":\"h\"} trailing",
    ]
    .iter()
    .map(|body| body.as_bytes().to_vec())
    .collect();
    bodies.push(b"{\"handler\":\"h\",\"input\":\"\xff\xfe\"}".to_vec());
    bodies.push(b"\x1f\x8b\x08\x00\x00\x00\x00\x00".to_vec());
    bodies.push(deep(10_000).into_bytes());
    bodies.push(deep(65).into_bytes());
    bodies.push(format!("{{\"handler\":\"{long}\"}}").into_bytes());
    bodies.push(format!("{{\"handler\":\"h\",\"queue\":\"{long}\"}}").into_bytes());
    bodies.push(format!("{{\"handler\":\"h\",\"tags\":{{\"t\":\"{long}\"}}}}").into_bytes());
    let many: Value = (0..40).map(|tag| (format!("t{tag}"), json!("v"))).collect::<serde_json::Map<_, _>>().into();
    bodies.push(json!({"handler": "h", "tags": many}).to_string().into_bytes());
    for body in &bodies {
        let (status, text) = raw(&server, &post("/v1/tasks", "", body)).await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert!((400..500).contains(&status), "{shown}: {status}");
        assert!(text.contains("application/problem+json") && text.contains("\"code\""), "{shown}: {text}");
    }
    let (status, _) = raw(&server, &post("/v1/tasks", "", deep(60).as_bytes())).await;
    assert_eq!(status, 202, "what is only deep is taken");
    let stored = server.get("/v1/tasks").await.body["tasks"].as_array().expect("tasks").len();
    assert_eq!(stored, 1);
}

async fn hostile_requests_are_refused_and_the_server_goes_on(store: Store) {
    let server = serving(&store).await;
    let ok = b"{\"handler\":\"h\"}";
    let many_headers: String = (0..200).map(|n| format!("x-{n}: y\r\n")).collect();
    let requests: Vec<(Vec<u8>, std::ops::Range<u16>)> = vec![
        (post("/v1/tasks", "Content-Encoding: gzip\r\n", ok), 415..416),
        (post("/v1/tasks", "Idempotency-Key: \r\n", ok), 400..401),
        (post("/v1/tasks", &format!("Idempotency-Key: {}\r\n", "k".repeat(300)), ok), 400..401),
        (post("/v1/tasks", "Idempotency-Key: a\rb\r\n", ok), 400..401),
        (post("/v1/tasks", "Idempotency-Key: \u{e9}\r\n", ok), 400..401),
        (post("/v1/tasks", &many_headers, ok), 400..500),
        (post("/v1/tasks", &format!("X-Large: {}\r\n", "x".repeat(300_000)), ok), 400..500),
        (post("/v1/tasks?%00", "", b"x"), 400..500),
        (b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}".to_vec(), 415..416),
        // Cut off: the length says more than comes. Nobody waits for the answer, if there is one.
        (b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{\"handler\":\"h\"}".to_vec(), 0..500),
        (b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nf\r\n{\"handler\":\"h\"}\r\n".to_vec(), 0..500),
        (b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n{}\r\n0\r\n\r\n".to_vec(), 0..500),
        (b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\nConnection: close\r\n\r\n0\r\n\r\nGET /".to_vec(), 0..500),
        (b"GET /v1/tasks HTTP/9.9\r\n\r\n".to_vec(), 0..506),
        (b"\x16\x03\x01\x02\x00\x01\x00".to_vec(), 0..500),
        (b"GET /v1/tasks/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 404..405),
        (b"GET /v1/tasks// HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 404..405),
        (b"GET /v1/tasks/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 404..405),
        (b"GET /v1/tasks?limit=99999999999999999999 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 400..401),
        (b"GET /v1/tasks?q=%ff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 200..401),
        (b"GET /v1/tasks?q=%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 400..401),
        (b"GET /v1/tasks?handler=%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_vec(), 400..401),
    ];
    for (request, expected) in &requests {
        let (status, text) = exchange(&server, request, expected.start == 0).await;
        let shown = String::from_utf8_lossy(&request[..request.len().min(120)]).into_owned();
        assert!(expected.contains(&status), "{shown}: {status} {text}");
    }
    for path in
        ["/v1/queues/%00/pause", "/v1/queues/a%2Fb/pause", "/v1/tasks/%00/cancel", "/v1/schedules/%00/pause"]
    {
        let (status, text) = raw(&server, &post(path, "", b"{}")).await;
        assert!((400..500).contains(&status), "{path}: {text}");
    }
    assert_eq!(server.get("/v1/tasks").await.body["tasks"].as_array().expect("tasks").len(), 0);
    assert_eq!(server.get("/readyz").await.status, 200);
}

async fn a_body_beyond_the_bound_is_refused_without_being_read(store: Store) {
    let settings = ServerSettings { max_body: 10_000, ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    server.client.announce(&["h"]).await.expect("announced");
    let body = format!("{{\"handler\":\"h\",\"input\":\"{}\"}}", "x".repeat(20_000));
    server.post("/v1/tasks", serde_json::from_str(&body).expect("JSON")).await.is_problem(413, "too_large");
    // Nobody says how long it will be: it is cut off where the bound is.
    let head = b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    let chunk = [b"4e20\r\n".as_slice(), &[b' '; 20_000], b"\r\n"].concat();
    let (status, _) = raw(&server, &[head.as_slice(), &chunk, &chunk, b"0\r\n\r\n"].concat()).await;
    assert_eq!(status, 413);
    assert_eq!(server.get("/v1/tasks").await.body["tasks"].as_array().expect("tasks").len(), 0);
}

async fn slow_requests_are_cut_off(store: Store) {
    let settings = ServerSettings { request_timeout: Duration::from_millis(300), ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    for begun in [
        "GET /v1/tasks HTTP/1.1\r\nHost: loc",
        "POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{\"han",
    ] {
        let mut stream = TcpStream::connect(server.address).await.expect("a connection");
        stream.write_all(begun.as_bytes()).await.expect("sent");
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "the connection is ended by the server");
        let text = String::from_utf8_lossy(&answer).into_owned();
        assert!(text.is_empty() || text.contains(" 408 "), "{text}");
    }
}

async fn no_more_connections_are_served_than_allowed(store: Store) {
    let settings = ServerSettings { max_connections: 2, ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    let request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(server.address).await.expect("a connection");
        stream.write_all(request).await.expect("sent");
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.expect("an answer");
        held.push(stream);
    }
    let mut third = TcpStream::connect(server.address).await.expect("it waits in line");
    third.write_all(request).await.expect("sent");
    let mut answer = [0; 12];
    let early = tokio::time::timeout(Duration::from_millis(300), third.read_exact(&mut answer)).await;
    assert!(early.is_err(), "two are all that are served");
    held.clear();
    tokio::time::timeout(PATIENCE, third.read_exact(&mut answer))
        .await
        .expect("its turn comes")
        .expect("an answer");
}
