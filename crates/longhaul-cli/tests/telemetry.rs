//! What the real binary tells those who operate it: traces, log lines, and its service manager. Every
//! worker is a process of its own, so nothing here shares a log.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use longhaul::{Client, NewTask, State, Task, TaskId};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// No test waits longer than this for anything.
const PATIENCE: Duration = Duration::from_secs(120);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// A store, manifests, and the workers that use both.
struct Bed {
    folder: tempfile::TempDir,
    client: Client,
    url: String,
}

impl Bed {
    async fn new(manifest: &str, scripts: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let manifests = folder.path().join("manifests");
        std::fs::create_dir(&manifests).expect("a folder");
        std::fs::write(manifests.join("saga.toml"), manifest).expect("written");
        for (name, text) in scripts {
            let path = manifests.join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("ours");
        }
        let url = format!("sqlite:{}", folder.path().join("test.db").display());
        let client = Client::open(&url).await.expect("the store opens");
        client.announce(&["traced"]).await.expect("announced");
        Self { folder, client, url }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn worker(&self, env: &[(&str, &str)]) -> Worker {
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
        command
            .args(["worker", "--store", &self.url, "--drain", "0", "--manifests"])
            .arg(self.file("manifests"))
            .env("WORLD", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        for name in ["LONGHAUL_LOG", "LONGHAUL_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "NOTIFY_SOCKET"] {
            command.env_remove(name);
        }
        Worker { child: command.envs(env.iter().copied()).spawn().expect("the worker starts") }
    }

    async fn submit(&self, traceparent: Option<String>) -> TaskId {
        let mut task = NewTask::new("traced", &());
        task.traceparent = traceparent;
        self.client.submit(task).await.expect("accepted").id
    }

    async fn ended(&self, id: TaskId) -> Task {
        self.client.wait(id, PATIENCE).await.expect("the task ends")
    }
}

/// A worker process; killed with this value.
struct Worker {
    child: Child,
}

impl Worker {
    /// Tells it to stop, waits until it has, and gives what it logged.
    fn stop(mut self) -> Vec<String> {
        let stderr = BufReader::new(self.child.stderr.take().expect("piped"));
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
        // It closes its end when it exits.
        let lines = stderr.lines().map(|line| line.expect("text")).collect();
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}: {lines:?}");
        lines
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let asked = Instant::now();
    while !holds() {
        assert!(asked.elapsed() < PATIENCE, "{what}: not in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An OTLP collector that keeps what it is sent.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    services: Arc<Mutex<BTreeSet<String>>>,
}

impl Collector {
    async fn start() -> (Self, String) {
        let collector = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let kept = collector.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let kept = kept.clone();
                tokio::spawn(async move { kept.serve(stream).await });
            }
        });
        (collector, url)
    }

    async fn serve(&self, mut stream: TcpStream) {
        let (mut bytes, mut buffer) = (Vec::new(), [0; 16 * 1024]);
        loop {
            let head = bytes.windows(4).position(|window| window == b"\r\n\r\n");
            if let Some(head) = head {
                let text = String::from_utf8_lossy(&bytes[..head]).to_lowercase();
                assert!(text.starts_with("post /v1/traces "), "{text}");
                assert!(text.contains("content-type: application/x-protobuf"), "{text}");
                let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
                let length: usize = length.expect("a length").trim().parse().expect("a number");
                if bytes.len() >= head + 4 + length {
                    let sent = &bytes[head + 4..head + 4 + length];
                    self.take(ExportTraceServiceRequest::decode(sent).expect("spans"));
                    break;
                }
            }
            match stream.read(&mut buffer).await {
                Ok(count @ 1..) => bytes.extend_from_slice(&buffer[..count]),
                _ => return,
            }
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
    }

    fn take(&self, request: ExportTraceServiceRequest) {
        for resource in request.resource_spans {
            let attributes = resource.resource.map(|resource| resource.attributes).unwrap_or_default();
            let service = attributes.iter().find(|attribute| attribute.key == "service.name");
            let service = service.and_then(|service| service.value.clone()?.value);
            if let Some(AnyValue::StringValue(service)) = service {
                self.services.lock().expect("not poisoned").insert(service);
            }
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.lock().expect("not poisoned").extend(spans);
        }
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().expect("not poisoned").clone()
    }

    fn named(&self, name: &str) -> Vec<Span> {
        self.spans().into_iter().filter(|span| span.name == name).collect()
    }
}

fn text(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.clone()?.value? {
        AnyValue::StringValue(text) => Some(text),
        AnyValue::IntValue(number) => Some(number.to_string()),
        other => Some(format!("{other:?}")),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const TRACED: &str = r#"
[saga]
name = "traced"

[[step]]
name = "first"
command = ["./note", "first"]
undo = ["./note", "undo first"]
env = ["WORLD"]

[[step]]
name = "gate"
command = ["./gate"]
timeout = "10m"
env = ["WORLD"]

[[step]]
name = "flaky"
command = ["./flaky"]
env = ["WORLD"]

[[step]]
name = "broken"
command = ["./broken"]
attempts = 1
env = ["WORLD"]
"#;

const SCRIPTS: [(&str, &str); 4] = [
    ("note", r#"echo "$1=$TRACEPARENT" >> "$WORLD/notes""#),
    (
        "gate",
        r#"echo "gate=$TRACEPARENT" >> "$WORLD/notes"
touch "$WORLD/reached"
while [ ! -e "$WORLD/open" ]; do sleep 0.05; done"#,
    ),
    ("flaky", r#"[ -e "$WORLD/tried" ] && exit 0; touch "$WORLD/tried"; exit 1"#),
    ("broken", "echo no >&2; exit 1"),
];

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_goes_from_the_submit_to_the_last_step_of_every_run() {
    let bed = Bed::new(TRACED, &SCRIPTS).await;
    let (collector, url) = Collector::start().await;
    let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", url.as_str()), ("OTEL_SERVICE_NAME", "traced-worker")];
    let id = bed.submit(Some(format!("00-{TRACE}-{CALLER}-01"))).await;
    // A worker that stops in the middle, and one that goes on: at least two runs.
    let worker = bed.worker(&env);
    until("the gate is reached", || bed.file("reached").exists()).await;
    worker.stop();
    std::fs::write(bed.file("open"), "").expect("written");
    let worker = bed.worker(&env);
    assert_eq!(bed.ended(id).await.state, State::Failed);
    worker.stop();

    let expected: BTreeSet<String> = ["first", "gate", "flaky", "broken", "undo first"].map(str::to_owned).into();
    let seen =
        || -> BTreeSet<String> { collector.named("step").iter().filter_map(|span| text(span, "step")).collect() };
    // Sent before the workers ended; taken in by a task of this process.
    until("all steps are traced", || seen().is_superset(&expected) && collector.named("run").len() >= 2).await;
    assert_eq!(seen(), expected);
    assert_eq!(*collector.services.lock().expect("not poisoned"), BTreeSet::from(["traced-worker".to_owned()]));

    let (runs, steps) = (collector.named("run"), collector.named("step"));
    assert_eq!(runs.len() + steps.len(), collector.spans().len(), "nothing else is exported");
    for span in collector.spans() {
        assert_eq!(hex(&span.trace_id), TRACE, "{} of another trace", span.name);
    }
    for run in &runs {
        assert_eq!(hex(&run.parent_span_id), CALLER, "a run is below the span of the caller");
        assert_eq!(text(run, "task"), Some(id.to_string()));
        assert_eq!(text(run, "handler").as_deref(), Some("traced"));
    }
    let fences: BTreeSet<Option<String>> = runs.iter().map(|run| text(run, "run")).collect();
    assert_eq!(fences.len(), runs.len(), "each run has its own span");
    let run_ids: BTreeSet<String> = runs.iter().map(|run| hex(&run.span_id)).collect();
    for step in &steps {
        assert!(run_ids.contains(&hex(&step.parent_span_id)), "{:?} is below a run", text(step, "step"));
    }
    let tries: BTreeSet<Option<String>> = steps
        .iter()
        .filter(|step| text(step, "step").as_deref() == Some("flaky"))
        .map(|step| text(step, "attempt"))
        .collect();
    assert!(tries.contains(&Some("1".to_owned())) && tries.contains(&Some("2".to_owned())), "{tries:?}");

    // What commands were given names the very span of their step.
    let notes = std::fs::read_to_string(bed.file("notes")).expect("notes");
    assert!(notes.lines().count() >= 4, "{notes}");
    for note in notes.lines() {
        let (step, traceparent) = note.split_once('=').expect("a note");
        let ids: BTreeSet<String> = steps
            .iter()
            .filter(|span| text(span, "step").as_deref() == Some(step))
            .map(|span| format!("00-{TRACE}-{}-01", hex(&span.span_id)))
            .collect();
        assert!(ids.contains(traceparent), "{note}: {ids:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_costs_one_warning_and_lines_carry_task_run_and_step() {
    let bed = Bed::new(TRACED, &SCRIPTS).await;
    std::fs::write(bed.file("open"), "").expect("written");
    let env = [
        // A port that nobody listens on, and that nobody is given by chance.
        ("LONGHAUL_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("LONGHAUL_LOG_FORMAT", "json"),
        ("LONGHAUL_LOG", "warn"),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
    ];
    let worker = bed.worker(&env);
    let id = bed.submit(None).await;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    let lines: Vec<Value> =
        worker.stop().iter().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    let said = |message: &str| -> Vec<&Value> { lines.iter().filter(|line| line["message"] == message).collect() };
    let away = "traces cannot be sent; tasks are not affected, spans are lost meanwhile";
    assert_eq!(said(away).len(), 1, "{lines:#?}");
    let failed = said("the step failed");
    assert_eq!(failed.len(), 1, "{lines:#?}");
    let line = failed[0];
    assert_eq!((&line["task"], &line["step"]), (&Value::String(id.to_string()), &"broken".into()));
    assert!(line["run"].as_u64().is_some_and(|run| run >= 1), "{line}");
    assert_eq!((&line["handler"], &line["level"]), (&"traced".into(), &"WARN".into()));
    assert!(line["timestamp"].is_string() && line["target"].is_string(), "{line}");
    assert!(lines.iter().all(|line| line["level"] != "INFO" && line["level"] != "DEBUG"), "{lines:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_manager_hears_when_a_worker_is_ready_and_when_it_stops() {
    let bed = Bed::new(TRACED, &SCRIPTS).await;
    let path = bed.file("notify");
    let socket = UnixDatagram::bind(&path).expect("bound");
    socket.set_read_timeout(Some(PATIENCE)).expect("set");
    let heard = |socket: &UnixDatagram| {
        let mut buffer = [0; 256];
        let read = socket.recv(&mut buffer).expect("told in time");
        String::from_utf8_lossy(&buffer[..read]).into_owned()
    };
    let worker = bed.worker(&[("NOTIFY_SOCKET", path_text(&path))]);
    assert_eq!(heard(&socket), "READY=1");
    // Ready means that it works.
    assert_eq!(bed.client.workers().await.expect("the store answers").len(), 1);
    worker.stop();
    assert_eq!(heard(&socket), "STOPPING=1");
}

fn path_text(path: &Path) -> &str {
    path.to_str().expect("a path of text")
}
