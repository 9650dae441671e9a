//! A node of the real binary, `longhaul up`, as people start it: on a port of its own, with a store, a working directory and
//! a configuration of its own, and manifests that need nothing but a shell.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use longhaul::TaskId;
use reqwest::{Method, StatusCode};
use serde_json::Value;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Where a node keeps its tasks.
pub struct Store {
    pub url: String,
    folder: tempfile::TempDir,
}

impl Store {
    pub fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { url: format!("sqlite:{}", folder.path().join("node.db").display()), folder }
    }

    /// A schema of its own on the test server; `None`, with one line that says so, without one.
    pub async fn postgres() -> Option<Self> {
        let Ok(server) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
            eprintln!("skipped: needs PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test");
            return None;
        };
        let schema = format!("node_{}", TaskId::new().0.simple());
        let (admin, connection) =
            tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
        let mark = if server.contains('?') { '&' } else { '?' };
        let folder = tempfile::tempdir().expect("a temporary folder");
        Some(Self { url: format!("{server}{mark}options=-csearch_path%3D{schema}"), folder })
    }

    /// A folder for whatever the test keeps.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A running `longhaul up`; killed when dropped.
pub struct Node {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub url: String,
    http: reqwest::Client,
    /// Sent with every request.
    token: Option<String>,
}

impl Node {
    /// Starts one on a free port, and waits until it is ready.
    pub async fn start(store: &Store, manifests: &Path) -> Self {
        Self::start_at(store, manifests, "127.0.0.1:0", &[]).await
    }

    /// Starts one at an address, with more in its environment. One that wants a token is asked with `LONGHAUL_TOKEN`.
    pub async fn start_at(store: &Store, manifests: &Path, listen: &str, env: &[(&str, &str)]) -> Self {
        // Another may have installed it already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
        command.args(["up", "--listen", listen, "--store", &store.url, "--workers", "4", "--manifests"]);
        // What is configured on the machine that runs the tests is none of theirs.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("LONGHAUL_")) {
                command.env_remove(name);
            }
        }
        command.arg(manifests).current_dir(store.folder()).env("HOME", store.folder());
        command.env("WORLD", store.folder().join("world")).envs(env.iter().copied());
        command.env("LONGHAUL_LOG", "error");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut said = String::new();
        let url = loop {
            let Some(Ok(line)) = lines.next() else { panic!("it ended instead of listening: {said}") };
            if let Some(url) = line.strip_prefix("listening on ") {
                break url.to_owned();
            }
            said.push_str(&line);
        };
        // A pipe that nobody reads would fill up in the end.
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                eprintln!("node: {line}");
            }
        });
        let http = reqwest::Client::builder().timeout(PATIENCE).no_proxy().build().expect("a client");
        let token = env.iter().find(|(name, _)| *name == "LONGHAUL_TOKEN").map(|(_, token)| (*token).to_owned());
        let node = Self { child, url, http, token };
        node.until("/readyz", |_, status| status == 200).await;
        node.until("/v1/handlers", |answer, _| answer["handlers"].as_array().is_some_and(|all| !all.is_empty()))
            .await;
        node
    }

    /// An address that nobody listens at, below those that the kernel gives to outgoing connections: a node that is
    /// started again at it finds it free.
    pub fn free_address() -> String {
        // Tests that run side by side look at different ports: a free one is taken only a moment later.
        static ASKED: AtomicU16 = AtomicU16::new(0);
        let start = u16::try_from(std::process::id() % 9_000).expect("small")
            + ASKED.fetch_add(50, Ordering::Relaxed) % 9_000;
        let ports = (0..9_000).map(|offset| 21_000 + (start + offset) % 9_000);
        let free = ports.into_iter().find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok());
        format!("127.0.0.1:{}", free.expect("a free port"))
    }

    /// kill -9
    pub fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    pub async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let mut request = self.http.request(method, format!("{}{path}", self.url));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let response = request.send().await.expect("an answer");
        let status = response.status();
        let text = response.text().await.expect("a body");
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    pub async fn get(&self, path: &str) -> Value {
        let (status, answer) = self.ask(Method::GET, path, None).await;
        assert!(status.is_success(), "{path}: {status} {answer}");
        answer
    }

    pub async fn post(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.ask(Method::POST, path, Some(body)).await;
        assert!(status.is_success(), "{path}: {status} {answer}");
        answer
    }

    pub async fn put(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.ask(Method::PUT, path, Some(body)).await;
        assert!(status.is_success(), "{path}: {status} {answer}");
        answer
    }

    /// Submits a task and gives its id.
    pub async fn submit(&self, body: Value) -> String {
        self.post("/v1/tasks", body).await["id"].as_str().expect("an id").to_owned()
    }

    /// Waits until something holds of the answer to a GET.
    pub async fn until(&self, path: &str, holds: impl Fn(&Value, StatusCode) -> bool) -> Value {
        let asked = Instant::now();
        loop {
            let (status, answer) = self.ask(Method::GET, path, None).await;
            if holds(&answer, status) {
                return answer;
            }
            assert!(asked.elapsed() < PATIENCE, "{path}: it does not come to hold: {answer}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the task has ended.
    pub async fn ended(&self, id: &str) -> Value {
        self.until(&format!("/v1/tasks/{id}"), |task, _| {
            task["state"].as_str().is_some_and(|state| ["completed", "failed", "cancelled"].contains(&state))
        })
        .await
    }

    /// Waits until the task asks for an approval, and gives that approval's id.
    pub async fn approval(&self, id: &str) -> String {
        let pending = |answer: &Value| answer["approvals"][0]["id"].as_str().map(str::to_owned);
        let path = format!("/v1/tasks/{id}/approvals");
        let answer = self.until(&path, |answer, _| pending(answer).is_some()).await;
        pending(&answer).expect("there is one")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The top folder of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("it is there")
}

/// The Python with the packages of `tests/python/requirements.txt`; `None`, with one line that says so, without one.
pub fn python() -> Option<PathBuf> {
    let python = std::env::var_os("LONGHAUL_TEST_PYTHON").map(PathBuf::from);
    if python.is_none() {
        eprintln!(
            "skipped: needs Python with tests/python/requirements.txt; set LONGHAUL_TEST_PYTHON or use ./dev test"
        );
    }
    python
}
