//! The clients of `examples/clients` against the real binary, a real browser among them, and webhooks as receivers see them.

mod node;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use node::{Node, PATIENCE, Store, python, repository};
use serde_json::{Value, json};

fn examples() -> PathBuf {
    repository().join("examples/clients")
}

/// Something that came to the [`Collector`].
#[derive(Clone, Debug)]
struct Came {
    path: String,
    headers: Vec<(String, String)>,
    body: String,
}

/// A server of the test's own: it keeps what is posted to it, and has the page for browsers.
struct Collector {
    url: String,
    kept: Arc<Mutex<Vec<Came>>>,
}

/// What was posted, and how many posts to `/fails` are still refused.
type Kept = (Arc<Mutex<Vec<Came>>>, Arc<Mutex<u32>>);

impl Collector {
    async fn start(failures: u32, page: String) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let kept = Arc::<Mutex<Vec<Came>>>::default();
        let state: Kept = (Arc::clone(&kept), Arc::new(Mutex::new(failures)));
        let app = Router::new()
            .route("/page.html", get(async move || Html(page)))
            .fallback(post(Self::keep))
            .with_state(state);
        tokio::spawn(async move { axum::serve(listener, app).await.expect("it serves") });
        Self { url, kept }
    }

    async fn keep(State((kept, failures)): State<Kept>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let headers = headers.iter().map(|(name, value)| (name.to_string(), text(value.as_bytes()))).collect();
        let came = Came { path: uri.path().to_owned(), headers, body: text(&body) };
        kept.lock().expect("sound").push(came);
        match uri.path() {
            "/redirects" => (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, "/target")]).into_response(),
            "/fails" => {
                let mut left = failures.lock().expect("sound");
                if *left == 0 {
                    return StatusCode::NO_CONTENT.into_response();
                }
                *left -= 1;
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
            _ => StatusCode::NO_CONTENT.into_response(),
        }
    }

    fn at(&self, path: &str) -> Vec<Came> {
        self.kept.lock().expect("sound").iter().filter(|came| came.path == path).cloned().collect()
    }

    /// Waits until what came to a path is as it should be.
    async fn until(&self, path: &str, what: &str, holds: impl Fn(&[Came]) -> bool) -> Vec<Came> {
        let asked = Instant::now();
        loop {
            let came = self.at(path);
            if holds(&came) {
                return came;
            }
            assert!(asked.elapsed() < PATIENCE, "{what} does not happen: {came:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn run(mut command: Command) -> Output {
    command.stdin(Stdio::null());
    tokio::task::spawn_blocking(move || command.output()).await.expect("it does not panic").expect("it starts")
}

/// A client has said every event from the first to the last, and that it ended well.
async fn told_everything(node: &Node, output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let mut lines = said.lines();
    let id = lines.next().and_then(|line| line.strip_prefix("submitted ")).expect("the id first").to_owned();
    let events: Vec<String> =
        lines.take_while(|line| line.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned).collect();
    assert_eq!(events, history(node, &id).await, "{said}");
    assert_eq!(node.get(&format!("/v1/tasks/{id}")).await["state"], "completed");
    id
}

/// The events of a task as they are kept: `1 task.submitted`, …
async fn history(node: &Node, id: &str) -> Vec<String> {
    let export = node.get(&format!("/v1/tasks/{id}/export")).await;
    let events = export["events"].as_array().expect("a list");
    events.iter().map(|event| format!("{} {}", event["seq"], event["type"].as_str().expect("a type"))).collect()
}

/// The libraries' word on each delivery.
async fn verified(python: &Path, secret: &str, came: &[Came]) -> Vec<Value> {
    const VERIFY: &str = "import json, sys\nfrom standardwebhooks.webhooks import Webhook\n\
        for secret, body, headers in json.loads(sys.argv[1]): print(json.dumps(Webhook(secret).verify(body, headers)))";
    let asked: Vec<Value> = came
        .iter()
        .map(|came| {
            let headers: serde_json::Map<String, Value> =
                came.headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
            json!([secret, came.body, headers])
        })
        .collect();
    let mut command = Command::new(python);
    command.args(["-c", VERIFY, &json!(asked).to_string()]);
    let output = run(command).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

async fn secret(node: &Node) -> String {
    node.get("/v1/webhooks/secret").await["secret"].as_str().expect("a secret").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_client_submits_follows_and_approves() {
    let store = Store::sqlite();
    let node = Node::start(&store, &examples()).await;
    let collector = Collector::start(0, String::new()).await;
    let mut command = Command::new(examples().join("client.sh"));
    command.args(["hello", &format!("{}/hook", collector.url)]).env("LONGHAUL_SERVER", &node.url);
    let output = run(command).await;
    let id = told_everything(&node, &output).await;
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("completed\n"));
    let came = collector.until("/hook", "the webhook", |came| !came.is_empty()).await;
    let body: Value = serde_json::from_str(&came[0].body).expect("JSON");
    assert_eq!((&body["type"], &body["data"]["id"]), (&json!("task.completed"), &json!(id)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_submits_follows_approves_and_verifies_its_webhook() {
    let Some(python) = python() else { return };
    let store = Store::sqlite();
    let node = Node::start(&store, &examples()).await;
    let mut command = Command::new(python);
    command.arg(examples().join("client.py")).arg("hello").env("LONGHAUL_SERVER", &node.url);
    command.env("LONGHAUL_WEBHOOK_SECRET", secret(&node).await).env("NO_PROXY", "127.0.0.1");
    let output = run(command).await;
    let id = told_everything(&node, &output).await;
    assert!(String::from_utf8_lossy(&output.stdout).ends_with(&format!("webhook task.completed {id}\n")));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_go_client_submits_follows_approves_and_verifies_its_webhook() {
    if Command::new("go").arg("version").output().is_err() {
        eprintln!("skipped: needs Go on the PATH");
        return;
    }
    let store = Store::sqlite();
    let node = Node::start(&store, &examples()).await;
    let mut command = Command::new("go");
    command.arg("run").arg(examples().join("client.go")).arg("hello").env("LONGHAUL_SERVER", &node.url);
    command.env("LONGHAUL_WEBHOOK_SECRET", secret(&node).await).env("NO_PROXY", "127.0.0.1");
    let output = run(command).await;
    let id = told_everything(&node, &output).await;
    assert!(String::from_utf8_lossy(&output.stdout).ends_with(&format!("webhook task.completed {id}\n")));
}

/// A headless browser that has a page open; ended when dropped.
struct Browser {
    child: Child,
    _profile: tempfile::TempDir,
}

impl Browser {
    fn open(chromium: &Path, url: &str) -> Self {
        let profile = tempfile::tempdir().expect("a temporary folder");
        let mut command = Command::new(chromium);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.args(["--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-port=0"]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg(url);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { child: command.spawn().expect("the browser starts"), _profile: profile }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What tells the test what the page saw, and starts it: the page itself stays as it is.
const REPORTER: &str = r#"<script>
const saw = {events: [], progress: []};
let posting = Promise.resolve();
const post = () => {
  const body = JSON.stringify({...saw, task: at("task").textContent});
  posting = posting.then(() => fetch(location.origin + "/saw", {method: "POST", body}));
};
addEventListener("happened", ({detail}) => { saw.events.push(`${detail.seq} ${detail.type}`); post(); });
addEventListener("progressed", ({detail}) => { saw.progress.push(detail.status); post(); });
at("form").requestSubmit();
</script>"#;

/// Follows a task in a real browser; with `kill`, the server is killed and started again meanwhile.
async fn browse(kill: bool) {
    let Some(chromium) = std::env::var_os("LONGHAUL_TEST_CHROMIUM").map(PathBuf::from) else {
        eprintln!("skipped: needs Chromium; set LONGHAUL_TEST_CHROMIUM or use ./dev test");
        return;
    };
    let page = std::fs::read_to_string(examples().join("page.html")).expect("the page");
    let collector = Collector::start(0, page.replace("</html>", &format!("{REPORTER}</html>"))).await;
    let store = Store::sqlite();
    let origin = [("LONGHAUL_CORS_ORIGINS", collector.url.as_str())];
    // One that is started again has to be found where it was.
    let address = if kill { Node::free_address() } else { "127.0.0.1:0".to_owned() };
    let mut node = Node::start_at(&store, &examples(), &address, &origin).await;
    let auto = if kill { "" } else { "&auto" };
    let browser = Browser::open(&chromium, &format!("{}/page.html?server={}{auto}", collector.url, node.url));
    let latest = |came: &[Came]| -> Value {
        came.last().map_or(Value::Null, |came| serde_json::from_str(&came.body).expect("JSON"))
    };
    let has = |value: &Value, list: &str, ending: &str| {
        value[list]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one.as_str().is_some_and(|one| one.ends_with(ending))))
    };
    if kill {
        let asks = |came: &[Came]| {
            let saw = latest(came);
            has(&saw, "events", "approval.requested") && has(&saw, "progress", "waiting")
        };
        let came = collector.until("/saw", "the page sees that it is asked", asks).await;
        let id = latest(&came)["task"].as_str().expect("an id").to_owned();
        node.kill();
        node = Node::start_at(&store, &examples(), &address, &origin).await;
        let approval = node.approval(&id).await;
        node.post(&format!("/v1/tasks/{id}/approvals/{approval}"), json!({"decision": "approve"})).await;
        node.ended(&id).await;
    }
    let ended = |came: &[Came]| {
        let saw = latest(came);
        has(&saw, "events", "task.completed") && has(&saw, "progress", "completed")
    };
    let came = collector.until("/saw", "the page sees the end", ended).await;
    let saw = latest(&came);
    let id = saw["task"].as_str().expect("an id");
    assert_eq!(saw["events"], json!(history(&node, id).await), "each event once and in order");
    let progress = saw["progress"].as_array().expect("a list");
    assert_eq!(progress.first(), Some(&json!("queued")), "{saw}");
    assert_eq!(progress.iter().filter(|status| **status == "completed").count(), 1, "{saw}");
    drop(browser);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_submits_follows_and_approves() {
    browse(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_misses_nothing_when_the_server_is_killed_and_started_again() {
    browse(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_fails_for_a_while_gets_every_event_with_signatures_that_the_library_accepts() {
    let Some(python) = python() else { return };
    let store = Store::sqlite();
    let node = Node::start(&store, &examples()).await;
    let collector = Collector::start(1, String::new()).await;
    // As people do it, for the end alone.
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
    command.args([
        "submit",
        "publish",
        r#"{"page": "hello"}"#,
        "--json",
        "--webhook",
        &format!("{}/hook", collector.url),
    ]);
    command.args(["--server", &node.url]).current_dir(store.folder()).env("HOME", store.folder());
    let output = run(command).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let submitted: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let plain = submitted["id"].as_str().expect("an id").to_owned();
    // And for every event, with a receiver that is down at first.
    let webhook = json!({"url": format!("{}/fails", collector.url), "events": ["*"]});
    let chatty = node.submit(json!({"handler": "publish", "input": {"page": "more"}, "webhook": webhook})).await;
    for id in [&plain, &chatty] {
        let approval = node.approval(id).await;
        node.post(&format!("/v1/tasks/{id}/approvals/{approval}"), json!({"decision": "approve"})).await;
        node.ended(id).await;
    }
    let secret = secret(&node).await;
    let came = collector.until("/hook", "the webhook", |came| !came.is_empty()).await;
    let messages = verified(&python, &secret, &came[..1]).await;
    assert_eq!((&messages[0]["type"], &messages[0]["data"]["id"]), (&json!("task.completed"), &json!(plain)));

    let types: Vec<String> = history(&node, &chatty)
        .await
        .iter()
        .map(|line| line.split_once(' ').expect("two words").1.to_owned())
        .collect();
    let came = collector.until("/fails", "every event", |came| came.len() > types.len()).await;
    let messages = verified(&python, &secret, &came).await;
    let told: Vec<&str> = messages.iter().map(|message| message["type"].as_str().expect("a type")).collect();
    assert_eq!(told[1..], types, "after the one that was refused, all of them in order");
    assert_eq!(told[0], told[1], "what was refused comes again");
    let id = |came: &Came| came.headers.iter().find(|(name, _)| name == "webhook-id").map(|(_, id)| id.clone());
    assert_eq!(id(&came[0]), id(&came[1]), "under the same id");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_not_followed() {
    let store = Store::sqlite();
    let node = Node::start(&store, &examples()).await;
    let collector = Collector::start(0, String::new()).await;
    let webhook = json!({"url": format!("{}/redirects", collector.url), "events": ["task.submitted"]});
    let id = node.submit(json!({"handler": "publish", "input": {"page": "hello"}, "webhook": webhook})).await;
    let path = format!("/v1/tasks/{id}/deliveries");
    let tried =
        |answer: &Value| answer["deliveries"][0]["attempts"].as_u64().is_some_and(|attempts| attempts >= 2);
    let answer = node.until(&path, |answer, _| tried(answer)).await;
    assert_eq!(answer["deliveries"][0]["http_status"], 307, "{answer}");
    assert_eq!(answer["deliveries"][0]["status"], "failed", "{answer}");
    assert!(collector.at("/redirects").len() >= 2);
    assert_eq!(collector.at("/target").len(), 0);
}
