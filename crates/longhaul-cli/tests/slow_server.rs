//! The server under more than it can take: a storm of submits, and thousands of readers.

mod common;

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::Bed;
use longhaul::{QueueSettings, Run, Settings, TaskError, TaskId, Worker};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_submits_is_refused_in_bounded_memory_sqlite() {
    storm(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_submits_is_refused_in_bounded_memory_postgres() {
    if let Some(bed) = Bed::postgres().await {
        storm(bed).await;
    }
}

#[test]
fn readers_that_are_cut_off_again_and_again_miss_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = Command::new(env!("CARGO_BIN_EXE_longhaul"))
        .args(["bench", "sse", "--tasks", "400", "--reconnects", "12", "--json"])
        .current_dir(folder.path())
        .output()
        .expect("it runs");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(report["errors"], 0, "{report}");
    assert!(report["events"].as_u64().expect("a number") >= 400 * 10, "{report}");
}

/// A server process without workers.
struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    fn start(store: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["serve", "--store", store, "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut said = lines.by_ref().map_while(Result::ok);
        let address = said.find_map(|line| line.strip_prefix("listening on http://").map(str::to_owned));
        let address = address.expect("it listens");
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    fn rss_mb(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it lives");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") / 1024.0
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What one who submits without pause was told.
#[derive(Default)]
struct Told {
    accepted: Vec<TaskId>,
    refused: usize,
}

async fn storm(bed: Bed) {
    let queue = QueueSettings { max_pending: 500, ..QueueSettings::default() };
    let queues = [("default".to_owned(), queue)].into();
    bed.client.configure(&Settings { queues, ..Settings::default() }).await.expect("set");
    let server = ServerProcess::start(&bed.url);
    let run = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&run);
    // Far fewer tasks per second than are submitted.
    let worker = Worker::new(&bed.client)
        .slots(4)
        .handler("storm", move |_run: Run, (): ()| {
            counted.fetch_add(1, Ordering::Relaxed);
            async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok::<_, TaskError>(())
            }
        })
        .start()
        .await
        .expect("a worker");
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> =
        (0..32).map(|_| tokio::spawn(submit_without_pause(server.address.clone(), Arc::clone(&over)))).collect();
    // The first requests fill every buffer there is; from then on memory stays where it is.
    until(|| run.load(Ordering::Relaxed) >= 60).await;
    let before = server.rss_mb();
    until(|| run.load(Ordering::Relaxed) >= 400).await;
    let after = server.rss_mb();
    over.store(true, Ordering::Relaxed);
    let (mut accepted, mut refused) = (HashSet::new(), 0);
    for caller in callers {
        let told = caller.await.expect("it ends");
        accepted.extend(told.accepted);
        refused += told.refused;
    }
    assert!(refused > accepted.len(), "{refused} refused, {} accepted", accepted.len());
    assert!(after - before < 30.0, "the server grew from {before:.0} to {after:.0} MB");
    for id in &accepted {
        let task = bed.client.wait(*id, common::PATIENCE).await.expect("every accepted task ends");
        assert_eq!(task.state, longhaul::State::Completed);
    }
    worker.stop().await;
}

async fn until(holds: impl Fn() -> bool) {
    let asked = std::time::Instant::now();
    while !holds() {
        assert!(asked.elapsed() < common::PATIENCE, "it does not come to hold");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn submit_without_pause(address: String, over: Arc<AtomicBool>) -> Told {
    let mut told = Told::default();
    let mut stream = tokio::io::BufReader::new(TcpStream::connect(&address).await.expect("a connection"));
    let body = r#"{"handler":"storm","input":null}"#;
    let request = format!(
        "POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    while !over.load(Ordering::Relaxed) {
        stream.get_mut().write_all(request.as_bytes()).await.expect("sent");
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let start = head.len();
            assert!(stream.read_line(&mut head).await.expect("an answer") > 0, "cut off after: {head}");
            let line = head[start..].to_ascii_lowercase();
            if let Some(number) = line.strip_prefix("content-length:") {
                length = number.trim().parse().expect("a number");
            }
        }
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).await.expect("its body");
        let answer: serde_json::Value = serde_json::from_slice(&answer).expect("JSON");
        if head.starts_with("HTTP/1.1 202") {
            told.accepted.push(answer["id"].as_str().expect("an id").parse().expect("an id"));
        } else {
            assert!(
                head.starts_with("HTTP/1.1 429") && head.to_ascii_lowercase().contains("retry-after:"),
                "{head}"
            );
            assert_eq!((&answer["code"], &answer["queue"]), (&"queue_full".into(), &"default".into()));
            told.refused += 1;
        }
    }
    told
}
