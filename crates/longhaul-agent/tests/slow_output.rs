//! An output that does not belong into memory. Alone in this program, so that its memory is that of the call.

mod common;

use common::{Folder, arguments};
use longhaul_agent::{Artifacts, Output};
use serde_json::json;

/// How much memory this process has at most had, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    let kilobytes: u64 = line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number");
    kilobytes * 1024
}

#[tokio::test]
async fn fifty_megabytes_go_to_storage_while_they_come() {
    let (folder, storage) = (Folder::new(), tempfile::tempdir().expect("a folder"));
    let artifacts = Artifacts::open(&storage.path().display().to_string()).expect("a folder");
    let before = peak_memory();

    folder.script("run", "yes 'a line of the log' | head -c 50000000; echo; echo the end");
    let tool = folder.agent_tool("command = [\"./run\"]").action;
    let output = tool.run_long(&arguments(json!({})), 16_384, &artifacts, "t").await.expect("exit 0");
    let Output::Stored(stored) = output else { panic!("not stored") };
    assert_eq!((stored.bytes, stored.binary), (50_000_009, false));
    assert!(stored.excerpt.contains("the end"), "{}", stored.excerpt);
    let end = artifacts.read("t", &stored.artifact_id, 49_999_990..50_000_009).await.expect("there");
    assert!(end.ends_with(b"\nthe end\n"));

    let grown = peak_memory() - before;
    assert!(grown < 25_000_000, "{grown} bytes of it were in memory");
}
