//! What the tests share: a folder with scripts and a manifest, calls, and an HTTP server that says
//! what it is told to.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longhaul::{StepContext, TaskId};
use longhaul_agent::{Agent, AgentTool, Call, Loaded, Manifest, Saga, Tool, load};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The trace that calls belong to.
pub const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A folder of manifests, removed with this value.
pub struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> &Self {
        std::fs::write(self.file(name), text).expect("the folder can be written");
        self
    }

    /// An executable script.
    pub fn script(&self, name: &str, text: &str) -> &Self {
        self.write(name, &format!("#!/bin/sh\n{text}\n"));
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.file(name), executable).expect("the file is ours");
        self
    }

    pub fn load(&self) -> Loaded {
        load(self.path())
    }

    /// The only saga of the folder, which has no problems.
    pub fn saga(&self) -> Saga {
        let loaded = self.load();
        assert_eq!(loaded.problems, []);
        match loaded.manifests.into_iter().next() {
            Some(Manifest::Saga(saga)) => saga,
            other => panic!("not a saga: {other:?}"),
        }
    }

    /// The only agent of the folder, which has no problems.
    pub fn agent(&self) -> Agent {
        let loaded = self.load();
        assert_eq!(loaded.problems, []);
        match loaded.manifests.into_iter().next() {
            Some(Manifest::Agent(agent)) => *agent,
            other => panic!("not an agent: {other:?}"),
        }
    }

    /// The tool of an agent with these lines.
    pub fn agent_tool(&self, lines: &str) -> AgentTool {
        let head = "[agent]\nname = \"a\"\nmodel = \"m\"\n[[tool]]\nname = \"one\"\ndescription = \"Does it\"\n";
        self.write("agent.toml", &format!("{head}{lines}\n"));
        self.agent().tools.remove(0)
    }

    /// The tool of a step with this line.
    pub fn tool(&self, line: &str) -> Tool {
        self.write("saga.toml", &format!("[saga]\nname = \"s\"\n[[step]]\nname = \"one\"\n{line}\n"));
        self.saga().steps.remove(0).action
    }

    /// All problems, as shown, without the folder's name.
    pub fn problems(&self) -> Vec<String> {
        let prefix = format!("{}/", self.path().display());
        self.load().problems.iter().map(|problem| problem.to_string().replace(&prefix, "")).collect()
    }
}

pub fn context() -> StepContext {
    let task: TaskId = "0198f000-0000-7000-8000-000000000001".parse().expect("a task id");
    StepContext {
        task,
        step: "one".to_owned(),
        idempotency_key: format!("{task}/one"),
        attempt: 1,
        fence: 7,
        traceparent: Some(TRACEPARENT.to_owned()),
    }
}

/// A call with this input, as a saga's step makes it.
pub fn call(input: Value) -> Call {
    let values = Arc::new(json!({"input": input, "steps": {}}));
    Call { body: Arc::clone(&values), values, context: context(), progress: None }
}

/// A call with these arguments, as an agent makes it.
pub fn arguments(arguments: Value) -> Call {
    let values = Arc::new(arguments);
    Call { body: Arc::clone(&values), values, context: context(), progress: None }
}

/// Waits until something holds; only for what no event can tell.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}: not in time"));
}

/// Whether a process is there and not only a zombie.
pub fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|state| state != "Z")
}

/// A server that gives every connection the same answer and remembers what it was asked.
pub struct Server {
    pub url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub head: String,
    pub body: String,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    }
}

impl Server {
    /// `answer` is all that is sent before the connection is closed.
    pub async fn start(answer: impl Into<Vec<u8>>) -> Self {
        let answer = answer.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, seen) = (answer.clone(), Arc::clone(&seen));
                tokio::spawn(async move { serve(stream, &answer, &seen).await });
            }
        });
        Self { url, asked }
    }

    /// Answers with a status line and a body.
    pub async fn answering(status: &str, body: &str) -> Self {
        Self::start(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }

    pub fn only(&self) -> Asked {
        let asked = self.asked();
        assert_eq!(asked.len(), 1, "asked once");
        asked[0].clone()
    }
}

async fn serve(mut stream: TcpStream, answer: &[u8], seen: &Mutex<Vec<Asked>>) {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let asked = Asked { head: head.to_owned(), body: body.to_owned() };
            let length = asked.header("content-length").map_or(0, |length| length.parse().expect("a number"));
            if body.len() >= length {
                seen.lock().expect("no panic").push(asked);
                break;
            }
        }
        match stream.read(&mut buffer).await {
            Ok(count @ 1..) => bytes.extend_from_slice(&buffer[..count]),
            _ => return,
        }
    }
    let _ = stream.write_all(answer).await;
    let _ = stream.shutdown().await;
}
