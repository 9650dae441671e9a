//! `longhaul up --bus`: a process of the real binary with a real broker, as another program on that broker sees it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longhaul_bus::{Bus, Consumer, Message, Outgoing, Subscription, To, Topic, connect};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(60);

/// The broker of the tests; `None`, with one line that says so, without one.
fn nats() -> Option<String> {
    let url = std::env::var("LONGHAUL_TEST_NATS").ok();
    if url.is_none() {
        eprintln!("skipped: needs NATS; set LONGHAUL_TEST_NATS or use ./dev test");
    }
    url
}

/// A server process with a saga of one step, on a folder of its own; killed with this value.
struct Server {
    child: Child,
    address: String,
    /// What it said, line by line.
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// `topics`: of events and of tasks.
    fn start(folder: &Path, bus: &str, topics: (&Topic, &Topic)) -> Self {
        Self::start_with(folder, &["--bus", bus], topics)
    }

    fn start_with(folder: &Path, more: &[&str], topics: (&Topic, &Topic)) -> Self {
        let manifests = folder.join("manifests");
        std::fs::create_dir_all(&manifests).expect("a folder");
        let saga = "[saga]\nname = \"greet\"\n\n[[step]]\nname = \"say\"\ncommand = [\"echo\", \"hello {{input.name}}\"]\n";
        std::fs::write(manifests.join("greet.toml"), saga).expect("a manifest");
        let (events, tasks) = topics;
        let settings =
            format!("[bus]\nevents = \"{events}\"\ntasks = \"{tasks}\"\nreplies = [\"{tasks}-replies\"]\n");
        std::fs::write(folder.join("longhaul.toml"), settings).expect("a configuration");
        let mut child = Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["up", "--listen", "127.0.0.1:0", "--store", "sqlite:bus.db", "--manifests", "manifests"])
            .args(more)
            .current_dir(folder)
            .env("LONGHAUL_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
        let address = lines.find_map(|line| line.strip_prefix("listening on ").map(str::to_owned));
        let log = Arc::new(Mutex::new(Vec::new()));
        let said = Arc::clone(&log);
        std::thread::spawn(move || lines.for_each(|line| said.lock().expect("no panic").push(line)));
        Self { child, address: address.expect("it says where it listens"), log }
    }

    /// The lines with this in them.
    fn said(&self, what: &str) -> usize {
        self.log.lock().expect("no panic").iter().filter(|line| line.contains(what)).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Topics that nobody else has.
fn topics() -> (Topic, Topic) {
    let own = Uuid::now_v7().simple();
    (
        Topic::log(&format!("cli.events-{own}")).expect("a topic"),
        Topic::queue(&format!("cli.tasks-{own}")).expect("a topic"),
    )
}

async fn ask(bus: &Arc<dyn Bus>, tasks: &Topic, id: &str, body: &Value, reply_to: Option<&str>) {
    let message = Message {
        id: Some(id.to_owned()),
        reply_to: reply_to.map(str::to_owned),
        correlation_id: reply_to.map(|_| "42".to_owned()),
        body: body.to_string().into(),
        ..Message::default()
    };
    let to = To::Topic { topic: tasks.clone(), subject: String::new() };
    bus.publish(&[Outgoing { to, message }]).await.expect("published");
}

async fn consumer(bus: &Arc<dyn Bus>, topic: Topic) -> Box<dyn Consumer> {
    bus.consume(&Subscription::new(topic, "test")).await.expect("a consumer")
}

/// The next message, acknowledged, as JSON.
async fn next(consumer: &mut Box<dyn Consumer>) -> (Message, Value) {
    let delivery = tokio::time::timeout(PATIENCE, consumer.next()).await.expect("in time").expect("a message");
    let message = delivery.message.clone();
    delivery.ack().await.expect("acknowledged");
    let body = serde_json::from_slice(&message.body).expect("JSON");
    (message, body)
}

/// Events until one of this type.
async fn types_until(consumer: &mut Box<dyn Consumer>, last: &str) -> Vec<String> {
    let mut types = Vec::new();
    loop {
        let (_, event) = next(consumer).await;
        types.push(event["type"].as_str().expect("a type").to_owned());
        if types.last().is_some_and(|kind| kind == last) {
            return types;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_takes_tasks_from_the_bus_and_tells_it_what_became_of_them() {
    let Some(url) = nats() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (events, tasks) = topics();
    let bus = connect(&url).await.expect("the broker answers");
    let replies = Topic::queue(&format!("{tasks}-replies")).expect("a topic");
    let (mut told, mut answers) = (consumer(&bus, events.clone()).await, consumer(&bus, replies.clone()).await);
    let mut dead = consumer(&bus, tasks.dead_letters()).await;
    let server = Server::start(folder.path(), &url, (&events, &tasks));

    let body = json!({"handler": "greet", "input": {"name": "bus"}});
    ask(&bus, &tasks, "greet-1", &body, Some(&replies.to_string())).await;
    ask(&bus, &tasks, "greet-1", &body, Some(&replies.to_string())).await;
    ask(&bus, &tasks, "nonsense", &json!({"handler": "greet", "priority": 12}), None).await;

    let types = types_until(&mut told, "dev.longhaul.task.completed").await;
    assert_eq!(types.first().map(String::as_str), Some("dev.longhaul.task.submitted"));
    let (answer, event) = next(&mut answers).await;
    assert_eq!(answer.correlation_id.as_deref(), Some("42"));
    assert!(event["data"]["result"].to_string().contains("hello bus"), "{event}");
    let (letter, _) = next(&mut dead).await;
    assert_eq!(letter.id.as_deref(), Some("nonsense"));

    let listed: Value = get_json(&format!("{}/v1/tasks", server.address)).await;
    assert_eq!(listed["tasks"].as_array().map(Vec::len), Some(1), "one task of one id: {listed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_starts_without_its_broker_and_tells_everything_when_that_is_there() {
    let Some(url) = nats() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (events, tasks) = topics();
    let bus = connect(&url).await.expect("the broker answers");
    let mut told = consumer(&bus, events.clone()).await;

    // The way to the broker: first nobody answers there.
    let way = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("an address");
    let (before, host) = url.rsplit_once('@').expect("a user");
    let server = Server::start(folder.path(), &format!("{before}@{way}"), (&events, &tasks));
    let submitted = post_json(
        &format!("{}/v1/tasks", server.address),
        &json!({"handler": "greet", "input": {"name": "late"}}),
    )
    .await;
    let waited = get_json(&format!(
        "{}/v1/tasks/{}/wait?timeout=30s",
        server.address,
        submitted["id"].as_str().expect("an id")
    ))
    .await;
    assert_eq!(waited["state"], "completed", "{waited}");

    let listener = TcpListener::bind(way).await.expect("the port is free");
    let passing = pass(listener, host);
    let types = types_until(&mut told, "dev.longhaul.task.completed").await;
    assert_eq!(
        types.first().map(String::as_str),
        Some("dev.longhaul.task.submitted"),
        "from the first: {types:?}"
    );
    passing.abort();
}

/// Passes connections on to the broker, until it is aborted: then they all end.
fn pass(listener: TcpListener, host: &str) -> JoinHandle<()> {
    let host = host.to_owned();
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut one, _) = listener.accept().await.expect("a connection");
            let mut other = TcpStream::connect(&host).await.expect("the broker answers");
            connections.spawn(async move { tokio::io::copy_bidirectional(&mut one, &mut other).await });
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_goes_and_comes_back_is_told_in_a_few_lines() {
    const AWAY: Duration = Duration::from_secs(12);
    let Some(url) = nats() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (events, tasks) = topics();
    let bus = connect(&url).await.expect("the broker answers");
    let mut told = consumer(&bus, events.clone()).await;
    let (before, host) = url.rsplit_once('@').expect("a user");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let way = listener.local_addr().expect("an address");
    let passing = pass(listener, host);
    let server = Server::start(folder.path(), &format!("{before}@{way}"), (&events, &tasks));
    let greet = json!({"handler": "greet", "input": {"name": "first"}});
    post_json(&format!("{}/v1/tasks", server.address), &greet).await;
    types_until(&mut told, "dev.longhaul.task.completed").await;
    assert_eq!(server.said("WARN"), 0, "{:?}", server.log);

    passing.abort();
    let _ = passing.await;
    post_json(&format!("{}/v1/tasks", server.address), &greet).await;
    tokio::time::sleep(AWAY).await;
    let while_away = server.said("WARN");
    assert!((1..=4).contains(&while_away), "{while_away} lines: {:?}", server.log);
    assert_eq!(server.said("the connection was lost; connecting again"), 1, "{:?}", server.log);

    let passing = pass(TcpListener::bind(way).await.expect("the port is free"), host);
    types_until(&mut told, "dev.longhaul.task.completed").await;
    ask(&bus, &tasks, "again", &greet, None).await;
    types_until(&mut told, "dev.longhaul.task.completed").await;
    assert_eq!(server.said("connected again"), 1, "{:?}", server.log);
    assert!(server.said("WARN") <= while_away + 3, "{:?}", server.log);
    passing.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_could_not_be_sent_is_refused_at_submit() {
    let folder = tempfile::tempdir().expect("a folder");
    let (events, tasks) = topics();
    let to = |to: &str| json!({"handler": "greet", "input": {"name": "x"}, "reply": {"to": to}});
    let server = Server::start_with(folder.path(), &[], (&events, &tasks));
    let refused = post_json(&format!("{}/v1/tasks", server.address), &to("longhaul.replies.me")).await;
    assert!(refused.to_string().contains("start it with --bus URL"), "{refused}");
    drop(server);
    let Some(url) = nats() else { return };
    let server = Server::start(folder.path(), &url, (&events, &tasks));
    let refused = post_json(&format!("{}/v1/tasks", server.address), &to("orders")).await;
    assert!(refused.to_string().contains("not allowed; allowed are"), "{refused}");
    let refused = post_json(&format!("{}/v1/tasks", server.address), &to(&format!("{tasks}-replies.>"))).await;
    assert!(refused.to_string().contains("no address"), "{refused}");
    let taken = post_json(&format!("{}/v1/tasks", server.address), &to(&format!("{tasks}-replies"))).await;
    assert!(taken["id"].is_string(), "{taken}");
}

#[test]
fn doctor_says_what_to_do_about_a_wrong_password() {
    let Some(url) = nats() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (login, host) = url.rsplit_once('@').expect("a user");
    let (user, _) = login.rsplit_once(':').expect("a password");
    let doctor = |url: &str| {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_longhaul"));
        doctor.args(["doctor", "--json"]).current_dir(folder.path()).env("HOME", folder.path());
        let output = doctor.env("LONGHAUL_BUS", url).output().expect("it starts");
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(!text.contains("hunter2"), "{text}");
        let found: Value = serde_json::from_str(&text).expect("JSON");
        let checks = found["checks"].as_array().expect("checks").clone();
        checks.into_iter().find(|check| check["name"] == "bus").expect("the bus is checked")
    };
    let remedy = |check: &Value| check["remedy"].as_str().expect("a remedy").to_owned();
    let wrong = remedy(&doctor(&format!("{user}:hunter2@{host}")));
    assert!(wrong.contains("the password") && !wrong.contains("start it"), "{wrong}");
    assert!(remedy(&doctor("nats://u:hunter2@127.0.0.1:1")).contains("start it"));
    assert!(remedy(&doctor("u:hunter2@127.0.0.1:1")).contains("correct"));
}

async fn get_json(url: &str) -> Value {
    let answer = client().get(url).send().await.expect("an answer");
    serde_json::from_slice(&answer.bytes().await.expect("a body")).expect("JSON")
}

async fn post_json(url: &str, body: &Value) -> Value {
    let request = client().post(url).header("content-type", "application/json").body(body.to_string());
    let answer = request.send().await.expect("an answer");
    serde_json::from_slice(&answer.bytes().await.expect("a body")).expect("JSON")
}

fn client() -> reqwest::Client {
    // One provider of TLS for the program.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().expect("a client")
}
