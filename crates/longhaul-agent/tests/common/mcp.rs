//! The MCP server of the official Python SDK that tests call: as a child process, or on HTTP.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use longhaul::TaskError;
use longhaul_agent::{AgentTool, Toolbox};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::common::{Folder, PATIENCE, arguments};

/// The revisions of the protocol that a server may know alone.
pub const ERAS: [&str; 2] = ["2025-11-25", "2026-07-28"];
/// A server that knows both.
pub const BOTH: &str = "";

/// The Python that has the packages of the tests; without one, a test says so and is skipped.
pub fn python() -> Option<String> {
    let python = std::env::var("LONGHAUL_TEST_PYTHON").ok();
    if python.is_none() {
        eprintln!("skipped: LONGHAUL_TEST_PYTHON names no Python with the package mcp (./dev services)");
    }
    python
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/mcp_server.py")
}

/// The server as a child process of the tools; `more` are lines of the manifest below `[[mcp]]`.
pub fn stdio(folder: &Folder, python: &str, more: &str) {
    stdio_of(folder, python, BOTH, more);
}

/// The same, of a server that knows only this.
pub fn stdio_of(folder: &Folder, python: &str, era: &str, more: &str) {
    // A script, because the interpreter lies wherever it does.
    folder.script("server", &format!("echo $$ >> pids\nexec '{python}' '{}' {era}", script().display()));
    folder.write(
        "agent.toml",
        &format!(
            "[agent]\nname = \"a\"\nmodel = \"m\"\n[[mcp]]\nname = \"test\"\ncommand = [\"./server\"]\n{more}\n"
        ),
    );
}

/// The processes that were started as a server, in order.
pub fn pids(folder: &Folder) -> Vec<String> {
    std::fs::read_to_string(folder.file("pids")).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// The agent's tools, with the server's.
pub async fn open(folder: &Folder) -> Toolbox {
    tokio::time::timeout(PATIENCE, Toolbox::open(&folder.agent(), Vec::new()))
        .await
        .expect("in time")
        .expect("the server can be used")
}

pub fn tool(toolbox: &Toolbox, name: &str) -> Arc<AgentTool> {
    toolbox.get(name).unwrap_or_else(|| panic!("no {name}"))
}

/// Calls a tool.
pub async fn run(toolbox: &Toolbox, name: &str, given: Value) -> Result<Value, TaskError> {
    let tool = tool(toolbox, name);
    let given = tool.arguments(&given.to_string()).expect("they fit");
    tokio::time::timeout(PATIENCE, tool.action.run(&arguments(given))).await.expect("in time")
}

/// The server on a port; killed with this value.
pub struct Served {
    pub child: tokio::process::Child,
    pub port: u16,
}

impl Served {
    pub async fn start(python: &str, port: u16) -> Self {
        Self::start_of(python, BOTH, port).await
    }

    /// One that knows only this.
    pub async fn start_of(python: &str, era: &str, port: u16) -> Self {
        let mut child = tokio::process::Command::new(python)
            .arg(script())
            .args((era != BOTH).then_some(era))
            .arg(port.to_string())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let port = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("readable");
        Self { child, port: port.expect("a line").parse().expect("a port") }
    }

    pub fn manifest(&self, folder: &Folder, more: &str) {
        let port = self.port;
        folder.write(
            "agent.toml",
            &format!(
                "[agent]\nname = \"a\"\nmodel = \"m\"\n[[mcp]]\nname = \"test\"\nurl = \"http://127.0.0.1:{port}/mcp\"\n{more}\n"
            ),
        );
    }
}
