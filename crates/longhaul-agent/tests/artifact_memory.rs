//! Alone in its process, because it measures that.

use longhaul_agent::artifact::Artifacts;

/// The most memory this process ever had, KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the line");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

#[tokio::test]
async fn fifty_megabytes_are_written_paged_and_searched_in_little_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let artifacts = Artifacts::open(&folder.path().display().to_string()).expect("open");
    let chunk: String =
        (0..500).map(|n| format!("line {n} of a log that nobody reads {}\n", "x".repeat(64))).collect();
    let warm = artifacts.put("default", chunk.clone().into()).await.expect("stored");
    artifacts.search("default", &warm.artifact_id, "needle", 10, 8_000).await.expect("searched");
    let before = peak();
    let mut writer = artifacts.writer("default");
    while writer.bytes() < 50_000_000 {
        writer.write(chunk.as_bytes()).await.expect("written");
    }
    writer.write(b"a needle at the end\n").await.expect("written");
    let stored = writer.finish().await.expect("stored");
    assert!(stored.summary.starts_with("50.0 MB of text"), "{}", stored.summary);
    let found = artifacts.search("default", &stored.artifact_id, "needle", 10, 8_000).await.expect("searched");
    assert_eq!(found.matches[0].line, stored.lines);
    let page = artifacts.lines("default", &stored.artifact_id, stored.lines - 1, 10, 8_000).await.expect("lines");
    assert_eq!(page.lines, 2);
    let grown = peak() - before;
    assert!(grown < 16 * 1024, "{grown} KiB more for 50 MB");
}
