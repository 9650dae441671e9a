//! Live: streams of events and of progress, and the two-way channel.

mod common;

use std::time::Duration;

use common::{Answer, Frame, Frames, PATIENCE, Server, Store, worker};
use futures_util::{SinkExt, StreamExt};
use longhaul_server::{App, ServerSettings, serve};
use reqwest::Method;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

on_every_store!(
    a_stream_gives_every_event_once_and_ends_after_the_final_one,
    a_reader_that_comes_back_gets_exactly_the_rest,
    progress_is_told_as_the_browser_snippet_wants_it,
    the_channel_tells_events_and_does_what_it_is_asked,
    text_of_a_model_comes_live_between_the_events,
    a_stream_token_reads_one_stream_and_nothing_else,
    all_tasks_can_be_followed_by_type_and_from_a_cursor,
    what_one_server_accepts_another_one_shows_and_steers,
    readers_of_a_server_that_restarts_miss_nothing,
    a_reader_that_comes_while_the_server_starts_waits_for_it,
    a_reader_that_leaves_is_forgotten_at_once,
    how_far_a_subscriber_is_behind_is_shown_also_when_nobody_runs_it,
    a_reader_that_does_not_read_is_cut_off_and_can_resume,
);

async fn serving(store: &Store) -> Server {
    Server::start(store.open().await, ServerSettings::default()).await
}

fn numbers(frames: &[Frame]) -> Vec<u64> {
    frames.iter().map(|frame| frame.data["seq"].as_u64().expect("a number")).collect()
}

async fn a_stream_gives_every_event_once_and_ends_after_the_final_one(store: Store) {
    let server = serving(&store).await;
    let id = {
        server.client.announce(&["steps"]).await.expect("announced");
        server.submit(json!({"handler": "steps", "input": 20})).await
    };
    let stream = Frames::open(server.request(Method::GET, &format!("/v1/tasks/{id}/events"))).await;
    let _worker = server.worker().await;
    let frames = stream.all().await;
    let last = server.ended(&id).await["last_seq"].as_u64().expect("a number");
    assert_eq!(numbers(&frames), (1..=last).collect::<Vec<_>>());
    assert!(frames.iter().all(|frame| frame.id.parse::<u64>().ok() == frame.data["seq"].as_u64()));
    assert_eq!(frames.last().expect("some").data["type"], "task.completed");
    assert_eq!(frames.last().expect("some").data["data"]["result"], 20);
    let keys: Vec<_> = frames[0].data.as_object().expect("an object").keys().map(String::as_str).collect();
    let mut expected = ["seq", "task_id", "type", "time", "run", "step", "data"];
    expected.sort_unstable();
    assert_eq!(keys, expected);
}

async fn a_reader_that_comes_back_gets_exactly_the_rest(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "steps", "input": 5})).await;
    let path = format!("/v1/tasks/{id}/events");
    let all = Frames::open(server.request(Method::GET, &path)).await.all().await;
    let last = all.len() as u64;
    for after in 0..last {
        let by_header =
            server.request(Method::GET, &format!("{path}?after=1")).header("Last-Event-ID", after.to_string());
        let by_query = server.request(Method::GET, &format!("{path}?after={after}"));
        for request in [by_header, by_query] {
            assert_eq!(Frames::open(request).await.all().await, all[after as usize..]);
        }
    }
    for past in [last, last + 1, u64::MAX] {
        assert_eq!(server.get(&format!("{path}?after={past}")).await.status, 204);
    }
    server.get(&format!("{path}?after=-1")).await.is_problem(400, "invalid_parameter");
    let odd = Answer::of(server.request(Method::GET, &path).header("Last-Event-ID", "x")).await;
    odd.is_problem(400, "invalid_parameter");
}

async fn progress_is_told_as_the_browser_snippet_wants_it(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    server.get("/api/progress").await.is_problem(400, "invalid_parameter");
    server.get("/api/progress?task_id=").await.is_problem(400, "invalid_parameter");
    server.get(&format!("/api/progress?task_id={}", longhaul::TaskId::new())).await.is_problem(404, "not_found");
    server.get("/api/progress?task_id=task-123").await.is_problem(404, "not_found");
    for (body, end) in
        [(json!({"handler": "steps", "input": 3}), "completed"), (json!({"handler": "fail"}), "error")]
    {
        let id = server.submit(body).await;
        let updates =
            Frames::open(server.request(Method::GET, &format!("/api/progress?task_id={id}"))).await.all().await;
        let finals: Vec<_> = updates
            .iter()
            .map(|update| update.data["status"].as_str().expect("a status"))
            .filter(|status| ["completed", "error"].contains(status))
            .collect();
        assert_eq!(finals, [end]);
        assert_eq!(updates.last().expect("some").data["status"], end);
        for update in &updates {
            assert_eq!(update.data["task_id"], id);
            assert!(update.data["message"].is_string() && update.data["total_step"].is_u64(), "{}", update.data);
        }
        let bar = updates.iter().any(|update| update.data["step"] == 3 && update.data["total_step"] == 3);
        assert_eq!(bar, end == "completed");
        let seen = &updates.last().expect("some").id;
        let again =
            server.request(Method::GET, &format!("/api/progress?task_id={id}")).header("Last-Event-ID", seen);
        assert_eq!(Answer::of(again).await.status, 204);
    }
}

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

async fn open_channel(server: &Server, id: &str, query: &str) -> Socket {
    let url = format!("ws://{}/v1/tasks/{id}/ws{query}", server.address);
    let (socket, _) = tokio_tungstenite::connect_async(url).await.expect("a channel");
    socket
}

/// The next message that is JSON; `None` at the end.
async fn heard(socket: &mut Socket) -> Option<Value> {
    loop {
        match tokio::time::timeout(PATIENCE, socket.next()).await.expect("something comes") {
            Some(Ok(Message::Text(text))) => return Some(serde_json::from_str(&text).expect("JSON")),
            Some(Ok(Message::Close(_)) | Err(_)) | None => return None,
            Some(Ok(_)) => {}
        }
    }
}

/// The acknowledgement of this reference, and the events before it.
async fn acknowledged(socket: &mut Socket, reference: &Value) -> (Value, Vec<Value>) {
    let mut events = Vec::new();
    loop {
        let message = heard(socket).await.expect("the channel is open");
        if message["type"] == "ack" && message["ref"] == *reference {
            return (message, events);
        }
        events.push(message);
    }
}

async fn text_of_a_model_comes_live_between_the_events(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "write"})).await;
    let mut stream = Frames::open(server.request(Method::GET, &format!("/v1/tasks/{id}/events"))).await;
    let mut socket = open_channel(&server, &id, "").await;
    server.post(&format!("/v1/tasks/{id}/signals/go"), json!({})).await;

    let (mut events, mut live): (Vec<Frame>, Vec<Frame>) = (Vec::new(), Vec::new());
    while live.len() < 3 {
        let frame = stream.next().await.expect("the stream goes on");
        if frame.data["type"] == "live" { live.push(frame) } else { events.push(frame) }
    }
    let told: Vec<_> = live.iter().map(|frame| (&frame.data["attempt"], &frame.data["text"])).collect();
    let (one, two) = (&json!(1), &json!(2));
    assert_eq!(told, [(one, &json!("Good ")), (two, &json!("Hello ")), (two, &json!("world"))]);
    for frame in &live {
        assert_eq!((frame.id.as_str(), &frame.data["step"]), ("", &json!("think")));
        assert!(frame.data["run"].as_u64() > Some(0) && frame.data["after"].as_u64() > Some(0), "{}", frame.data);
    }
    let mut spoken = String::new();
    let mut numbered = Vec::new();
    while !spoken.ends_with("world") {
        let message = heard(&mut socket).await.expect("the channel goes on");
        match message["type"].as_str() {
            Some("live") => spoken.push_str(message["text"].as_str().expect("text")),
            _ => numbered.push(message["event"]["seq"].as_u64().expect("a number")),
        }
    }
    assert_eq!(spoken, "Good Hello world");

    server.post(&format!("/v1/tasks/{id}/signals/end"), json!({})).await;
    events.extend(stream.all().await);
    while let Some(message) = heard(&mut socket).await {
        numbered.push(message["event"]["seq"].as_u64().expect("a number"));
    }
    let last = server.ended(&id).await["last_seq"].as_u64().expect("a number");
    assert_eq!(numbers(&events), (1..=last).collect::<Vec<_>>(), "no event is missing or out of order");
    assert_eq!(numbered, (1..=last).collect::<Vec<_>>());
}

async fn the_channel_tells_events_and_does_what_it_is_asked(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "approve", "input": "Go?"})).await;
    server.until("/v1/approvals", |body| body["approvals"][0].is_object()).await;
    let mut socket = open_channel(&server, &id, "").await;
    for (up, code) in [
        (json!({"type": "dance", "ref": 1}), Some("invalid_field")),
        (json!({"type": "priority", "ref": 2, "priority": 12}), Some("invalid_field")),
        (json!({"type": "priority", "ref": 3, "priority": 9}), None),
        (json!({"type": "answer", "ref": 4, "answer": "x"}), Some("wrong_state")),
        (json!({"type": "patch", "ref": 5, "patch": {"set_goal": "x"}}), Some("not_found")),
        (json!({"type": "message", "ref": "six", "text": "hurry"}), None),
    ] {
        socket.send(Message::Text(up.to_string().into())).await.expect("sent");
        let (ack, _) = acknowledged(&mut socket, &up["ref"]).await;
        assert_eq!((ack["ok"].as_bool(), ack["error"]["code"].as_str()), (Some(code.is_none()), code), "{up}");
    }
    socket.send(Message::Text("not json".into())).await.expect("sent");
    assert_eq!(acknowledged(&mut socket, &Value::Null).await.0["ok"], false);
    socket
        .send(Message::Text(json!({"type": "approve", "ref": 7, "reason": "ok"}).to_string().into()))
        .await
        .expect("sent");
    let (ack, mut events) = acknowledged(&mut socket, &json!(7)).await;
    assert_eq!(ack["ok"], true, "{ack}");
    while let Some(message) = heard(&mut socket).await {
        events.push(message);
    }
    let last = &events.last().expect("some")["event"];
    assert_eq!((&last["type"], &last["data"]["result"]), (&json!("task.completed"), &json!("approved")));
    let total = server.ended(&id).await["last_seq"].as_u64().expect("a number");
    let mut again = open_channel(&server, &id, &format!("?after={}", total - 1)).await;
    assert_eq!(heard(&mut again).await.expect("the last event")["event"]["seq"], total);
    assert_eq!(heard(&mut again).await, None);

    let id = server.submit(json!({"handler": "signal", "input": "never"})).await;
    let mut socket = open_channel(&server, &id, "").await;
    socket
        .send(Message::Text(json!({"type": "cancel", "ref": 1, "reason": "enough"}).to_string().into()))
        .await
        .expect("sent");
    acknowledged(&mut socket, &json!(1)).await;
    let ended = server.ended(&id).await;
    assert_eq!(ended["state"], "cancelled");

    let mut foreign =
        format!("ws://{}/v1/tasks/{id}/ws", server.address).into_client_request().expect("a request");
    foreign.headers_mut().insert("Origin", "https://evil.example".parse().expect("a header"));
    assert!(tokio_tungstenite::connect_async(foreign).await.is_err(), "a page of another origin is refused");
}

async fn a_stream_token_reads_one_stream_and_nothing_else(store: Store) {
    let mut server = Server::guarded(store.open().await, ServerSettings::default()).await;
    let admin = longhaul::NewToken {
        name: "ops".into(),
        tenant: "default".into(),
        role: longhaul::Role::Admin,
        expires_after: None,
    };
    let (_, secret) = server.client.create_token(admin).await.expect("a token");
    server.token = Some(secret);
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "steps", "input": 1})).await;
    let other = server.submit(json!({"handler": "steps", "input": 1})).await;
    let answer = server.post(&format!("/v1/tasks/{id}/stream-token"), json!({})).await;
    let token = answer.body["token"].as_str().expect("a token").to_owned();
    server.token = None;
    let frames = Frames::open(server.request(Method::GET, &format!("/v1/tasks/{id}/events?access_token={token}")))
        .await
        .all()
        .await;
    assert_eq!(frames.last().expect("some").data["type"], "task.completed");
    Frames::open(server.request(Method::GET, &format!("/api/progress?task_id={id}&access_token={token}")))
        .await
        .all()
        .await;
    let at = |path: &str| format!("{path}?access_token={token}");
    server.get(&at(&format!("/v1/tasks/{other}/events"))).await.is_problem(404, "not_found");
    server.get(&at(&format!("/v1/tasks/{id}"))).await.is_problem(403, "forbidden");
    server.get(&at("/v1/tasks")).await.is_problem(403, "forbidden");
    server.get(&format!("/v1/tasks/{id}/events?access_token=a.b")).await.is_problem(401, "unauthorized");
    server.client.clock().advance(Duration::from_secs(600));
    server.get(&at(&format!("/v1/tasks/{id}/events"))).await.is_problem(401, "unauthorized");
}

async fn all_tasks_can_be_followed_by_type_and_from_a_cursor(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let mut stream =
        Frames::open(server.request(Method::GET, "/v1/events?type=task.completed,step.*&cursor=0")).await;
    let ids = [
        server.submit(json!({"handler": "steps", "input": 2})).await,
        server.submit(json!({"handler": "echo"})).await,
    ];
    let mut told: Vec<Frame> = Vec::new();
    while told.iter().filter(|frame| frame.data["type"] == "task.completed").count() < 2 {
        told.push(stream.next().await.expect("the stream goes on"));
    }
    for id in &ids {
        let of_task: Vec<u64> = told
            .iter()
            .filter(|frame| frame.data["task_id"] == *id)
            .map(|frame| frame.data["seq"].as_u64().expect("a number"))
            .collect();
        assert!(of_task.is_sorted() && !of_task.is_empty(), "{of_task:?}");
    }
    assert!(told.iter().all(|frame| frame.data["type"] == "task.completed"
        || frame.data["type"].as_str().expect("a type").starts_with("step.")));
    // From every cursor the rest comes, at least once.
    for (index, frame) in told.iter().enumerate() {
        let request = server
            .request(Method::GET, "/v1/events?type=task.completed,step.*")
            .header("Last-Event-ID", &frame.id);
        let mut rest = Frames::open(request).await;
        let mut missing: Vec<&Value> = told[index + 1..].iter().map(|frame| &frame.data).collect();
        while !missing.is_empty() {
            let next = rest.next().await.expect("the stream goes on");
            missing.retain(|data| **data != next.data);
        }
    }
    server.get("/v1/events?cursor=odd").await.is_problem(400, "invalid_parameter");
}

async fn what_one_server_accepts_another_one_shows_and_steers(store: Store) {
    let (one, other) = (serving(&store).await, serving(&store).await);
    let (_first, _second) = (worker(&store.open().await).await, worker(&store.open().await).await);
    let id = one.submit(json!({"handler": "steps", "input": 5})).await;
    let frames = Frames::open(other.request(Method::GET, &format!("/v1/tasks/{id}/events"))).await.all().await;
    let last = one.ended(&id).await["last_seq"].as_u64().expect("a number");
    assert_eq!(numbers(&frames), (1..=last).collect::<Vec<_>>());

    for (here, there) in [(&one, &other), (&other, &one)] {
        let id = here.submit(json!({"handler": "signal", "input": "never"})).await;
        let stream = Frames::open(here.request(Method::GET, &format!("/v1/tasks/{id}/events"))).await;
        let mut socket = open_channel(there, &id, "").await;
        socket.send(Message::Text(json!({"type": "cancel", "ref": 1}).to_string().into())).await.expect("sent");
        assert_eq!(acknowledged(&mut socket, &json!(1)).await.0["ok"], true);
        assert_eq!(stream.all().await.last().expect("some").data["type"], "task.cancelled");
    }
}

async fn readers_of_a_server_that_restarts_miss_nothing(store: Store) {
    let worker = worker(&store.open().await).await;
    let server = serving(&store).await;
    let address = server.address.to_string();
    let id = server.submit(json!({"handler": "signal", "input": "go"})).await;
    let path = format!("/v1/tasks/{id}/events");
    let mut stream = Frames::open(server.request(Method::GET, &path)).await;
    let mut seen = vec![stream.next().await.expect("the first event")];
    server.stop().await;
    while let Some(frame) = stream.next().await {
        seen.push(frame);
    }
    let server = Server::start_at(store.open().await, false, ServerSettings::default(), &address).await;
    server.post(&format!("/v1/tasks/{id}/signals/go"), json!("now")).await;
    let resume = server.request(Method::GET, &path).header("Last-Event-ID", &seen.last().expect("some").id);
    seen.extend(Frames::open(resume).await.all().await);
    let last = server.ended(&id).await["last_seq"].as_u64().expect("a number");
    assert_eq!(numbers(&seen), (1..=last).collect::<Vec<_>>());
    worker.stop().await;
}

/// How many readers the server says it has.
async fn readers(server: &Server) -> String {
    let answer = server.get("/metrics").await;
    let text = answer.body.as_str().expect("text").to_owned();
    text.lines().find(|line| line.starts_with("longhaul_sse_clients ")).expect("the gauge").to_owned()
}

async fn how_far_a_subscriber_is_behind_is_shown_also_when_nobody_runs_it(store: Store) {
    let server = serving(&store).await;
    server.client.announce(&["steps"]).await.expect("announced");
    let subscriber = server.client.subscriber("late").start_batches(async |_| Ok(())).await.expect("it starts");
    subscriber.stop().await;
    server.submit(json!({"handler": "steps", "input": 1})).await;
    let answer = server.get("/metrics").await;
    let text = answer.body.as_str().expect("text");
    let value = |name: &str| {
        let line =
            text.lines().find_map(|line| line.strip_prefix(&format!("longhaul_{name}{{subscriber=\"late\"}} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse::<f64>().expect("a number")
    };
    assert!(value("subscriber_rows_behind") >= 1.0 && value("subscriber_oldest_age_seconds") >= 0.0);
    assert_eq!(value("subscriber_held"), 0.0);
}

async fn until_no_readers(server: &Server) {
    let asked = std::time::Instant::now();
    while readers(server).await != "longhaul_sse_clients 0" {
        assert!(asked.elapsed() < PATIENCE, "a reader is still counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn a_reader_that_leaves_is_forgotten_at_once(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "signal", "input": "never"})).await;
    let mut stream = Frames::open(server.request(Method::GET, &format!("/v1/tasks/{id}/events"))).await;
    stream.next().await.expect("an event");
    assert_eq!(readers(&server).await, "longhaul_sse_clients 1");
    drop(stream);
    until_no_readers(&server).await;
}

async fn a_reader_that_does_not_read_is_cut_off_and_can_resume(store: Store) {
    let settings = ServerSettings { request_timeout: Duration::from_secs(3), ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    let _worker = server.worker().await;
    // More than all buffers between the two hold.
    let id = server.submit(json!({"handler": "state", "input": "much"})).await;
    let path = format!("/v1/tasks/{id}/state");
    server.until(&path, |body| body["version"].is_u64()).await;
    let much = "x".repeat(900_000);
    for _ in 0..20 {
        let patch = json!({"add_facts": [{"key": "k", "value": much}]});
        let answer = Answer::of(server.request(Method::PATCH, &path).json(&patch)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let events = format!("/v1/tasks/{id}/events");
    let response = server.request(Method::GET, &events).send().await.expect("an answer");
    until_no_readers(&server).await;
    let mut seen = Frames::of(response).all().await;
    server.post(&format!("/v1/tasks/{id}/signals/end"), json!(null)).await;
    let last = server.ended(&id).await["last_seq"].as_u64().expect("a number");
    assert!((seen.len() as u64) < last, "it was cut off");
    let resume = server.request(Method::GET, &format!("{events}?after={}", seen.len()));
    seen.extend(Frames::open(resume).await.all().await);
    assert_eq!(numbers(&seen), (1..=last).collect::<Vec<_>>());
}

/// A browser's EventSource gives up at the first refusal.
async fn a_reader_that_comes_while_the_server_starts_waits_for_it(store: Store) {
    // Another may have installed it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = store.open().await;
    let _worker = worker(&client).await;
    let id = client.submit(longhaul::NewTask::new("echo", &1)).await.expect("accepted").id;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/v1/tasks/{id}/events", listener.local_addr().expect("bound"));
    let app = App::starting(ServerSettings::default());
    let served = tokio::spawn(serve(listener, app.clone(), std::future::pending()));
    let http = reqwest::Client::builder().no_proxy().build().expect("a client");
    Answer::of(http.get(&url)).await.is_problem(503, "starting");
    let mut reading = tokio::spawn(http.get(&url).header("accept", "text/event-stream").send());
    assert!(
        tokio::time::timeout(Duration::from_millis(200), &mut reading).await.is_err(),
        "it is answered too early"
    );
    app.open(client, false);
    let answer =
        tokio::time::timeout(PATIENCE, reading).await.expect("in time").expect("no panic").expect("an answer");
    assert_eq!(answer.status(), 200);
    let frames = Frames::of(answer).all().await;
    assert_eq!(frames.last().expect("some").data["type"], "task.completed");
    served.abort();
}
