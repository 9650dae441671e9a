//! The dashboard in a real browser, against the real binary: what people see and do, live, across a restart, in the dark, on a phone and
//! with the keyboard alone. Each test is a scenario of `dashboard/scenarios.mjs`, which drives the browser.
//!
//! With `LONGHAUL_SCREENSHOTS=FOLDER` the pictures of the pages are written there; without, the tree stays as it is.

mod endpoint;
mod node;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use endpoint::{Conversation, Endpoint, Says};
use futures_util::{StreamExt, stream};
use longhaul::{Client, NewTask, NewToken, Role, Run, TaskError, Worker};
use node::{Node, PATIENCE, Store, repository};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

/// A scenario takes no longer than this.
const IN_TIME: Duration = Duration::from_secs(240);

/// What drives the browser, and the browser; `None`, with one line that says so, without them.
fn browser() -> Option<(PathBuf, PathBuf)> {
    let named = |name| std::env::var_os(name).map(PathBuf::from);
    let found = named("LONGHAUL_TEST_PLAYWRIGHT").zip(named("LONGHAUL_TEST_CHROMIUM"));
    if found.is_none() {
        eprintln!("skipped: needs Chromium and Playwright (tests/node/package.json); use ./dev test");
    }
    found
}

/// Plans, looks, cleans when it may, and says what came of it.
fn fixes_the_disk(so_far: &Conversation<'_>) -> Says {
    match so_far.turn() {
        0 => Says::Calls(vec![
            (
                "update_plan",
                json!({"plan": ["Check the disk", "Clean the logs", "Check again"], "current_step": "Check the disk"}),
            ),
            ("remember", json!({"key": "disk", "value": "the sandbox is nearly full"})),
            ("check_disk", json!({})),
        ]),
        1 => Says::Calls(vec![
            (
                "update_plan",
                json!({"plan": ["Check the disk", "Clean the logs", "Check again"], "current_step": "Clean the logs"}),
            ),
            ("clean_logs", json!({"days": 7})),
        ]),
        2 => Says::Calls(vec![("check_disk", json!({}))]),
        _ => Says::Text(format!("Done: old logs are gone. {}", so_far.result())),
    }
}

/// What the tests run beside the manifests of `longhaul init`.
const DEPLOY: &str = r#"
[saga]
name = "deploy"
timeout = "1h"

[[step]]
name = "create_dns"
command = ["sleep", "0.2"]
undo = ["sleep", "0.1"]

[[step]]
name = "create_cert"
command = ["sleep", "0.3"]
undo = ["sleep", "0.1"]

[[step]]
name = "start_container"
command = ["sh", "-c", "sleep 0.2; test {{input.ok}} = yes || { echo the image cannot be pulled >&2; exit 1; }"]
undo = ["sleep", "0.1"]
attempts = 2
"#;

/// One that takes its time.
const BACKUP: &str = r#"
[saga]
name = "backup"
timeout = "1h"

[[step]]
name = "dump"
command = ["sleep", "0.4"]

[[step]]
name = "copy"
command = ["sleep", "600"]
timeout = "20m"

[[step]]
name = "verify"
command = ["sleep", "0.1"]
"#;

/// The binary with everything a scenario needs, and what it needs itself.
struct Stage {
    node: Option<Node>,
    store: Store,
    agents: PathBuf,
    address: String,
    env: Vec<(String, String)>,
}

/// A model that writes a few words, and the rest only when it is told to by a POST to `/go`.
async fn slow_model() -> String {
    let may_go = Arc::new(tokio::sync::Notify::new());
    let go = Arc::clone(&may_go);
    let chunk = |delta: Value, finish: Value| {
        let chunk = json!({"id": "c", "object": "chat.completion.chunk", "model": "scripted",
                           "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
        format!("data: {chunk}\n\n")
    };
    let writes = async move || {
        let first = chunk(json!({"role": "assistant", "content": "The disk is "}), Value::Null);
        let rest = chunk(json!({"content": "half empty."}), Value::Null) + &chunk(json!({}), json!("stop"));
        let pieces = stream::iter([first]).chain(stream::once(async move {
            may_go.notified().await;
            rest + "data: [DONE]\n\n"
        }));
        let body = Body::from_stream(pieces.map(Ok::<_, std::convert::Infallible>));
        ([("content-type", "text/event-stream")], body)
    };
    let app = Router::new()
        .route("/v1/chat/completions", post(writes))
        .route("/go", post(async move || go.notify_one()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, app).await.expect("it serves") });
    url
}

impl Stage {
    async fn new() -> Self {
        let endpoint = Endpoint::start(fixes_the_disk).await;
        Self::with_model(&endpoint.url).await
    }

    async fn with_model(url: &str) -> Self {
        let store = Store::sqlite();
        let agents = store.folder().join("agents");
        let made =
            Command::new(env!("CARGO_BIN_EXE_longhaul")).arg("init").arg(&agents).output().expect("it runs");
        assert!(made.status.success(), "{made:?}");
        std::fs::write(agents.join("deploy.toml"), DEPLOY).expect("written");
        std::fs::write(agents.join("backup.toml"), BACKUP).expect("written");
        std::fs::copy(repository().join("examples/clients/publish.toml"), agents.join("publish.toml"))
            .expect("copied");
        let env = vec![("OPENAI_BASE_URL".to_owned(), url.to_owned())];
        let mut stage = Self { node: None, store, agents, address: Node::free_address(), env };
        stage.start().await;
        stage
    }

    async fn start(&mut self) {
        let env: Vec<(&str, &str)> =
            self.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        self.node = Some(Node::start_at(&self.store, &self.agents, &self.address, &env).await);
    }

    /// `kill -9`, and once more at the same address.
    async fn restart(&mut self) {
        if let Some(node) = self.node.take() {
            node.kill();
        }
        self.start().await;
    }

    /// Plays a scenario; what it asks for by a line on its standard output is done here.
    async fn play(mut self, scenario: &str, more: &[(&str, &str)]) {
        let Some((playwright, chromium)) = browser() else { return };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dashboard/scenarios.mjs");
        let mut command = tokio::process::Command::new("node");
        command.arg(script).arg(scenario).env("SERVER", format!("http://{}", self.address));
        command.env("PLAYWRIGHT", playwright).env("CHROMIUM", chromium).envs(more.iter().copied());
        if let Some(folder) = std::env::var_os("LONGHAUL_SCREENSHOTS") {
            // Relative to the top folder, wherever cargo runs the test.
            command.env("SCREENSHOTS", repository().join(folder));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("node starts");
        let mut asks = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut tell = child.stdin.take().expect("piped");
        let mut said = child.stderr.take().expect("piped");
        let said = tokio::spawn(async move {
            let mut text = String::new();
            let _ = tokio::io::AsyncReadExt::read_to_string(&mut said, &mut text).await;
            text
        });
        let played = async {
            while let Ok(Some(line)) = asks.next_line().await {
                match line.as_str() {
                    "restart" => self.restart().await,
                    line => eprintln!("{scenario}: {line}"),
                }
                tell.write_all(b"done\n").await.expect("it listens");
            }
            child.wait().await.expect("it ends")
        };
        let status = tokio::time::timeout(IN_TIME, played).await.expect("in time");
        assert!(status.success(), "{scenario}: {}", said.await.expect("text"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_watched_to_its_end_while_the_server_is_killed_and_started_again() {
    Stage::new().await.play("watch", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_model_writes_is_seen_while_it_writes() {
    let model = slow_model().await;
    Stage::with_model(&format!("{model}/v1")).await.play("writing", &[("MODEL", &model)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_is_approved_in_the_inbox_with_the_keyboard_alone() {
    Stage::new().await.play("keyboard", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_task_is_forked_with_edited_input() {
    Stage::new().await.play("fork", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_tasks_of_a_list_are_cancelled_at_once() {
    Stage::new().await.play("bulk", &[]).await;
}

/// Says very much.
async fn chatty(run: Run, rounds: u32) -> Result<u32, TaskError> {
    for round in 1..=rounds {
        for line in 1..=1_000 {
            run.progress("thinking", round, rounds, &format!("line {line} of round {round}"));
        }
        run.step(format!("round {round}"), async || Ok::<_, TaskError>(round)).await?;
    }
    Ok(rounds)
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_events_scroll_smoothly() {
    let stage = Stage::new().await;
    let client = Client::open(&stage.store.url).await.expect("the store opens");
    let worker =
        Worker::new(&client).handler("chatty", chatty).queues(["chatty"]).start().await.expect("a worker");
    let mut task = NewTask::new("chatty", &20);
    task.queue = "chatty".to_owned();
    let id = client.submit(task).await.expect("accepted").id;
    let task = client.wait(id, PATIENCE).await.expect("it ends");
    assert!(task.last_seq > 20_000, "{}", task.last_seq);
    worker.stop().await;
    stage.play("events", &[("TASK", &id.to_string()), ("LAST", &task.last_seq.to_string())]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_accessible_in_light_and_dark_and_on_a_phone() {
    Stage::new().await.play("looks", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_a_token_signs_in_and_does_what_its_role_allows() {
    let mut stage = Stage::new().await;
    let client = Client::open(&stage.store.url).await.expect("the store opens");
    let mut secrets = Vec::new();
    for role in [Role::Viewer, Role::Operator] {
        let new = NewToken { name: format!("the {role}"), tenant: "default".into(), role, expires_after: None };
        secrets.push(client.create_token(new).await.expect("a token").1);
    }
    // From its next start on, a server that has tokens wants one.
    stage.env.push(("LONGHAUL_TOKEN".to_owned(), secrets[1].clone()));
    stage.restart().await;
    stage.play("roles", &[("VIEWER", &secrets[0]), ("OPERATOR", &secrets[1])]).await;
}
