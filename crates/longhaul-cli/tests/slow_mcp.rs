//! Agents that share a state by MCP, each a process of its own: A works on the task, B watches and advises with the official Python
//! SDK, and a server of the real binary is between them, over HTTP and over `longhaul mcp` on stdio.

mod node;

use std::path::Path;
use std::process::Stdio;

use longhaul::state::{AgentState, StatePatch};
use longhaul::{Client, NewTask, Run, State, TaskError, TaskId, Worker};
use node::{Node, PATIENCE, Store, python, repository};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// How often A changes its state while B watches.
const CHANGES: u64 = 20;

/// Agent A: begins its state, works when told to, and takes what others have added into its result.
async fn analyse(run: Run, goal: String) -> Result<Value, TaskError> {
    run.begin_state(AgentState { goal, ..AgentState::default() }).await?;
    let _: Value = run.signal("go").await?;
    for number in 1..=CHANGES {
        let fact = json!({"add_facts": [{"key": format!("fact {number}"), "value": number, "source": "agent A"}]});
        run.patch(serde_json::from_value::<StatePatch>(fact).expect("a patch")).await?;
    }
    run.signal("advised").await
}

async fn until_it_waits(client: &Client, task: TaskId, signal: &str) {
    let waits = async {
        loop {
            let now = client.task(task).await.expect("there");
            if now.waiting_for.is_some_and(|waiting| waiting.id == signal) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waits).await.expect("it waits in time");
}

async fn line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("text");
    line.expect("another line")
}

async fn two_agents_share_a_state(store: Store) {
    let Some(python) = python() else { return };
    let node = Node::start(&store, &repository().join("examples/sagas")).await;
    let client = Client::open(&store.url).await.expect("the store opens");
    let worker = Worker::new(&client).handler("analyst", analyse).start().await.expect("a worker");
    let http = json!(format!("{}/mcp", node.url));
    let stdio = json!({"command": env!("CARGO_BIN_EXE_longhaul"), "args": ["mcp", "--server", node.url]});
    let direct = json!({"command": env!("CARGO_BIN_EXE_longhaul"), "args": ["mcp", "--store", store.url],
                        "env": {"HOME": store.folder()}});
    for (server, mode, revision) in [
        (&http, "2026-07-28", "2026-07-28"),
        (&http, "legacy", "2025-11-25"),
        (&stdio, "auto", "2026-07-28"),
        (&stdio, "legacy", "2025-11-25"),
        (&direct, "auto", "2026-07-28"),
        (&direct, "legacy", "2025-11-25"),
    ] {
        let task = client.submit(NewTask::new("analyst", &"find out")).await.expect("accepted").id;
        until_it_waits(&client, task, "go").await;
        let uri = format!("state://agents/analyst/tasks/{task}");
        let asked = json!({"server": server, "mode": mode, "uri": uri, "task_id": task, "last": CHANGES + 1});
        let mut b = Command::new(&python)
            .arg("-W")
            .arg("ignore")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/mcp_agent.py"))
            .arg(asked.to_string())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(b.stdout.take().expect("piped")).lines();
        assert_eq!(line(&mut lines).await, "watching", "{server} {mode}");
        client.signal(task, "go", &json!(null)).await.expect("told");
        let report: Value = serde_json::from_str(&line(&mut lines).await).expect("a report");
        assert!(b.wait().await.expect("it ends").success());

        let last = CHANGES + 1;
        assert_eq!(report["revision"], revision, "{server} {mode}");
        let told: Vec<u64> = serde_json::from_value(report["told"].clone()).expect("versions");
        // Since 2026-07-28, who begins to listen is told how things stand.
        let first = if revision == "2026-07-28" { 1 } else { 2 };
        assert_eq!(
            told[..told.len().min((last - first + 1) as usize)],
            (first..=last).collect::<Vec<u64>>(),
            "{server} {mode}"
        );
        assert_eq!((&report["seen"]["version"], &report["seen"]["agent_id"]), (&json!(last), &json!("analyst")));
        assert_eq!(report["seen"]["agent_state"]["known_facts"].as_array().map(Vec::len), Some(CHANGES as usize));
        assert_eq!(
            (&report["stale"]["code"], &report["stale"]["version"]),
            (&json!("version_conflict"), &json!(last))
        );
        assert_eq!(report["patched"]["version"], last + 1);
        let facts = report["after"]["agent_state"]["known_facts"].to_string();
        assert!(facts.contains("advice") && !facts.contains("stale"), "{facts}");

        client.signal(task, "advised", &json!("thanks")).await.expect("told");
        assert_eq!(client.wait(task, PATIENCE).await.expect("it ends").state, State::Completed);
        let (version, state) = client.state(task).await.expect("readable").expect("there");
        assert_eq!((version, state.known_facts.len() as u64), (last + 1, last), "nothing of A or B is lost");
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_agents_share_a_state_on_sqlite() {
    two_agents_share_a_state(Store::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_agents_share_a_state_on_postgres() {
    if let Some(store) = Store::postgres().await {
        two_agents_share_a_state(store).await;
    }
}

/// A client of `longhaul mcp` that writes lines and reads lines.
struct Lined {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Lined {
    fn start(arguments: &[&str], home: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
        command
            .arg("mcp")
            .args(arguments)
            .env("HOME", home)
            .env_remove("LONGHAUL_SERVER")
            .env_remove("LONGHAUL_TOKEN");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { input: child.stdin.take(), child, lines }
    }

    async fn say(&mut self, text: &str) {
        let input = self.input.as_mut().expect("open");
        input.write_all(format!("{text}\n").as_bytes()).await.expect("written");
    }

    async fn ask(&mut self, id: u64, method: &str, mut params: Value, modern: bool) {
        if modern {
            params["_meta"] = json!({
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {},
            });
        }
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string()).await;
    }

    /// The next message; every line of stdout is one.
    async fn hear(&mut self) -> Value {
        let message: Value = serde_json::from_str(&line(&mut self.lines).await).expect("a message");
        assert_eq!(message["jsonrpc"], "2.0", "{message}");
        message
    }

    async fn until(&mut self, holds: impl Fn(&Value) -> bool) -> Value {
        loop {
            let message = self.hear().await;
            if holds(&message) {
                return message;
            }
        }
    }

    async fn end(mut self) {
        drop(self.input.take());
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("in time").expect("ended");
        assert!(ended.success(), "{ended}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_watches_on_stdio_goes_on_watching_when_the_server_is_killed_and_started_again() {
    let store = Store::sqlite();
    let (address, manifests) = (Node::free_address(), repository().join("examples/sagas"));
    let node = Node::start_at(&store, &manifests, &address, &[]).await;
    let client = Client::open(&store.url).await.expect("the store opens");
    client.announce(&["analyst"]).await.expect("announced");
    let task = client.submit(NewTask::new("analyst", &1)).await.expect("accepted").id;
    let patch = async |version| {
        let patch = serde_json::from_value(json!({"set_goal": "g"})).expect("a patch");
        assert_eq!(client.patch_state(task, patch, None).await.expect("patched"), version);
    };
    patch(1).await;
    let leaves = client.submit(NewTask::new("analyst", &2)).await.expect("accepted").id;
    let (url, uri) = (node.url.clone(), format!("state://agents/analyst/tasks/{task}"));
    let left = format!("state://agents/analyst/tasks/{leaves}");
    let told = |message: &Value| message["method"] == "notifications/resources/updated";

    let mut modern = Lined::start(&["--server", &url], store.folder());
    let listen = json!({"notifications": {"resourceSubscriptions": [left, uri]}});
    modern.ask(1, "subscriptions/listen", listen, true).await;
    assert_eq!(modern.hear().await["method"], "notifications/subscriptions/acknowledged");
    modern.until(told).await;
    let mut legacy = Lined::start(&["--server", &url], store.folder());
    let initialize =
        json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
    legacy.ask(1, "initialize", initialize, false).await;
    assert_eq!(legacy.hear().await["result"]["serverInfo"]["name"], "longhaul");
    legacy.say(r#"{"jsonrpc": "2.0", "method": "notifications/initialized"}"#).await;
    legacy.ask(2, "resources/subscribe", json!({"uri": uri}), false).await;
    assert_eq!(legacy.hear().await["result"], json!({}));
    patch(2).await;
    modern.until(|message| message["params"]["_meta"]["dev.longhaul/version"] == 2).await;
    legacy.until(told).await;

    node.kill();
    patch(3).await;
    client.cancel(leaves, None).await.expect("cancelled");
    client.delete(leaves).await.expect("removed");
    modern.ask(2, "tools/list", json!({}), true).await;
    let refused = modern.until(|message| message["id"] == 2).await;
    assert!(refused["error"]["message"].as_str().expect("a sentence").contains("longhaul up"), "{refused}");
    let _node = Node::start_at(&store, &manifests, &address, &[]).await;
    // What happened meanwhile is told, and so is what comes.
    modern.until(|message| told(message) && message["params"]["uri"] == left.as_str()).await;
    modern.until(|message| message["params"]["_meta"]["dev.longhaul/version"] == 3).await;
    legacy.until(told).await;
    patch(4).await;
    modern.until(|message| message["params"]["_meta"]["dev.longhaul/version"] == 4).await;
    legacy.until(|message| message["params"]["_meta"]["dev.longhaul/version"] == 4).await;
    legacy.ask(3, "resources/read", json!({"uri": uri}), false).await;
    let read = legacy.until(|message| message["id"] == 3).await;
    assert!(read["result"]["contents"][0]["text"].as_str().expect("text").contains("\"version\":4"), "{read}");
    legacy.say("this is no JSON").await;
    assert_eq!(
        legacy.until(|message| message["id"].is_null() && message["error"].is_object()).await["error"]["code"],
        -32700
    );
    modern.end().await;
    legacy.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_not_there_is_not_made_for_an_mcp_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("no such folder/typo.db");
    let file = format!("sqlite:{}", path.display());
    let other = folder.path().join("other.db");
    std::fs::write(&other, "").expect("written");
    let mut stores =
        vec![(file, path.display().to_string()), (format!("sqlite:{}", other.display()), "other.db".into())];
    let empty = Store::postgres().await;
    stores.extend(empty.as_ref().map(|store| (store.url.clone(), "in this database".to_owned())));
    for (store, said) in stores {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
        command.args(["mcp", "--store", &store]).env("HOME", folder.path()).stdin(Stdio::null());
        let ran = tokio::time::timeout(PATIENCE, command.output()).await.expect("in time").expect("it starts");
        let why = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(2), "{store}: {why}");
        assert!(why.contains(&said) && why.contains("longhaul up"), "{why}");
        assert!(ran.stdout.is_empty());
    }
    assert!(!path.parent().expect("a folder").exists(), "nothing was made");
    if let Some(store) = empty {
        assert_eq!(longhaul::store::inspect(&store.url).await.expect("it answers").schema, 0);
    }
}
