//! The MCP server against the conformance suite of the protocol, for both revisions.
//!
//! What cannot pass stands in `mcp_fixtures/baseline-REVISION.yml`, with its reason; the suite fails when anything else does
//! not pass, and when something that stands there does.

mod common;
mod mcp_fixtures;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;

use common::Store;
use longhaul_server::{App, ServerSettings, router_with, serve_router};
use mcp_fixtures::{Fixtures, Lists};
use serde_json::json;

static LISTS: LazyLock<Lists> = LazyLock::new(Lists::default);

/// The suite and the Node that runs it; `None`, with one line that says so, without them.
fn suite() -> Option<(PathBuf, PathBuf)> {
    let named = |name| std::env::var_os(name).map(PathBuf::from);
    let found = named("LONGHAUL_TEST_CONFORMANCE_NODE").zip(named("LONGHAUL_TEST_CONFORMANCE"));
    if found.is_none() {
        eprintln!(
            "skipped: needs the MCP conformance suite (tests/node/package.json) and Node 22; use ./dev test"
        );
    }
    found
}

async fn conforms(revision: &str, at_least: usize) {
    let Some((node, suite)) = suite() else { return };
    let store = Store::sqlite();
    let client = store.open().await;
    // A resource of ours is listed and read, too.
    client.announce(&["agent"]).await.expect("announced");
    let task = client.submit(longhaul::NewTask::new("agent", &1)).await.expect("accepted").id;
    let patch = serde_json::from_value(json!({"set_goal": "to conform"})).expect("a patch");
    client.patch_state(task, patch, None).await.expect("patched");
    let app = App::new(client, false, ServerSettings::default());
    let router = router_with(app.clone(), |longhaul| Fixtures { longhaul, lists: &LISTS });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/mcp", listener.local_addr().expect("bound"));
    let served = tokio::spawn(serve_router(listener, app.clone(), router, std::future::pending()));

    let baseline =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/mcp_fixtures/baseline-{revision}.yml"));
    let folder = tempfile::tempdir().expect("a folder");
    let ran = tokio::process::Command::new(node)
        .arg(suite)
        .args(["server", "--url", &url, "--requirements", revision, "--timeout", "60000", "-o", "results"])
        .arg("--expected-failures")
        .arg(baseline)
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let ran =
        tokio::time::timeout(std::time::Duration::from_secs(300), ran).await.expect("in time").expect("it runs");
    let told = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{told}");
    // Each scenario leaves a folder: all of them were run.
    let results = std::fs::read_dir(folder.path().join("results")).expect("results").count();
    assert!(results >= at_least, "only {results} scenarios were run: {told}");
    served.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_conforms_to_revision_2025_11_25() {
    conforms("2025-11-25", 30).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_conforms_to_revision_2026_07_28() {
    conforms("2026-07-28", 37).await;
}
