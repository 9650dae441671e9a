//! What the crash tests share: worker processes that can be killed, the ledger they write to, and
//! what must hold of both in the end.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use longhaul::{Client, Filter, NewTask, QueueSettings, Settings, State, Task, TaskId};
use serde_json::{Value, json};

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// A store of its own, a ledger, and the workers that use both.
pub struct Bed {
    pub client: Client,
    pub url: String,
    folder: tempfile::TempDir,
}

impl Bed {
    pub async fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = format!("sqlite:{}", folder.path().join("kill.db").display());
        Self::open(url, folder).await
    }

    /// A schema of its own on the test server; `None`, with one line that says so, without one.
    pub async fn postgres() -> Option<Self> {
        let Ok(server) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
            eprintln!("skipped: needs PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test");
            return None;
        };
        let schema = format!("kill_{}", TaskId::new().0.simple());
        let (admin, connection) =
            tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
        let url = format!("{server}?options=-csearch_path%3D{schema}");
        Some(Self::open(url, tempfile::tempdir().expect("a temporary folder")).await)
    }

    pub async fn open(url: String, folder: tempfile::TempDir) -> Self {
        let client = Client::open(&url).await.expect("the store opens");
        let queue = QueueSettings { max_pending: 1_000_000, ..QueueSettings::default() };
        let queues = BTreeMap::from([("default".to_owned(), queue)]);
        client.configure(&Settings { queues, ..Settings::default() }).await.expect("set");
        client.announce(&["ledger", "deploy", "deploy_app", "branches"]).await.expect("announced");
        Self { client, url, folder }
    }

    /// A worker process of the real binary, with leases of `lease` seconds.
    pub fn worker(&self, slots: usize, lease: f64) -> WorkerProcess {
        let child = Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["bench-worker", "--store", &self.url, "--slots", &slots.to_string()])
            .args(["--lease", &lease.to_string(), "--drain", "5", "--ledger"])
            .arg(self.ledger_path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("the worker starts");
        WorkerProcess { child }
    }

    /// A worker process for the manifests of a folder, whose commands find the ledger in `LEDGER`
    /// and a folder for what they make in `WORLD`.
    pub fn manifest_worker(&self, manifests: &Path, slots: usize, lease: f64) -> WorkerProcess {
        let child = Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["worker", "--store", &self.url, "--workers", &slots.to_string()])
            .args(["--lease", &lease.to_string(), "--manifests"])
            .arg(manifests)
            .env("LEDGER", self.ledger_path())
            .env("WORLD", self.folder.path().join("world"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("the worker starts");
        WorkerProcess { child }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn ledger_path(&self) -> PathBuf {
        self.folder.path().join("ledger")
    }

    pub async fn submit(&self, input: Value) -> TaskId {
        self.client.submit(NewTask::new("ledger", &input)).await.expect("accepted").id
    }

    pub async fn submit_many(&self, count: usize, input: Value) -> Vec<TaskId> {
        let tasks = (0..count).map(|_| NewTask::new("ledger", &input)).collect();
        let accepted = self.client.submit_many(tasks).await.expect("the store answers");
        accepted.into_iter().map(|answer| answer.expect("accepted").id).collect()
    }

    pub fn ledger(&self) -> Ledger {
        let text = std::fs::read_to_string(self.ledger_path()).unwrap_or_default();
        // A line that was cut off by a kill, or is being written, has no full stop.
        Ledger { lines: text.lines().filter_map(|line| line.strip_suffix(" .")).map(str::to_owned).collect() }
    }

    /// Waits until the ledger says something.
    pub async fn until(&self, what: &str, mut said: impl FnMut(&Ledger) -> bool) {
        let asked = Instant::now();
        while !said(&self.ledger()) {
            assert!(asked.elapsed() < PATIENCE, "{what} does not happen");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a step is on record.
    pub async fn until_recorded(&self, id: TaskId, step: &str) {
        let mut events = self.client.events(id, 0).await.expect("the task is there");
        let recorded = async {
            while let Some(event) = events.next().await.expect("the store answers") {
                if event.kind == "step.completed" && event.step.as_deref() == Some(step) {
                    return;
                }
            }
            panic!("the task ended without {step}");
        };
        tokio::time::timeout(PATIENCE, recorded).await.expect("the step is recorded");
    }

    pub async fn ended(&self, id: TaskId) -> Task {
        self.client.wait(id, PATIENCE).await.expect("the task ends")
    }

    /// How many tasks are in a state.
    pub async fn count(&self, state: State) -> usize {
        let (mut count, mut after) = (0, None);
        loop {
            let filter = Filter { state: Some(state), after, limit: 1_000, ..Filter::default() };
            let page = self.client.list(&filter).await.expect("the store answers");
            count += page.len();
            match page.last() {
                Some(last) => after = Some(last.id),
                None => return count,
            }
        }
    }

    /// Each task's events are numbered 1..n, its runs have strictly growing fences, and it has
    /// one final event, the last. Gives how many runs there were.
    pub async fn check_histories(&self, tasks: &[TaskId]) -> usize {
        let mut runs = 0;
        for &id in tasks {
            let mut events = self.client.events(id, 0).await.expect("the task is there");
            let (mut next, mut fence, mut finals) = (1, 0, 0);
            while let Some(event) = events.next().await.expect("the store answers") {
                assert_eq!(event.seq, next, "task {id}: events are 1..n");
                next += 1;
                if event.kind == "task.started" {
                    assert!(event.run > fence, "task {id}: fence {} after {fence}", event.run);
                    fence = event.run;
                    runs += 1;
                } else if event.run != 0 {
                    assert_eq!(event.run, fence, "task {id}: an event of a run that lost its lease");
                }
                finals += u32::from(event.is_final());
            }
            assert_eq!(finals, 1, "task {id}: one final event");
        }
        runs
    }
}

/// A worker process; killed when dropped.
pub struct WorkerProcess {
    child: Child,
}

impl WorkerProcess {
    pub fn of(child: Child) -> Self {
        Self { child }
    }

    /// kill -9
    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status().expect("kill runs");
        assert!(sent.success(), "kill {name} {pid}");
    }

    /// Whether the process has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it can be asked").is_some()
    }

    /// CPU time used so far.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("a process");
        let after_name = stat.rsplit_once(')').expect("a name in brackets").1;
        let ticks: u64 =
            after_name.split_whitespace().skip(11).take(2).map(|n| n.parse::<u64>().expect("ticks")).sum();
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What effects really happened: lines `effect TASK KEY FENCE`, `run TASK FENCE`, `hang TASK FENCE`.
pub struct Ledger {
    lines: Vec<String>,
}

impl Ledger {
    fn of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
        self.lines.iter().filter_map(move |line| {
            let words: Vec<&str> = line.split(' ').collect();
            (words.first() == Some(&kind)).then(|| words[1..].to_vec())
        })
    }

    /// All of it.
    pub fn lines(&self) -> &[String] {
        &self.lines
    }

    pub fn hangs(&self) -> usize {
        self.of("hang").count()
    }

    pub fn runs(&self) -> usize {
        self.of("run").count()
    }

    pub fn effects(&self) -> usize {
        self.of("effect").count()
    }

    /// How often each effect happened, by its idempotency key.
    pub fn effects_by_key(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for words in self.of("effect") {
            *counts.entry(words[1].to_owned()).or_insert(0) += 1;
        }
        counts
    }

    /// No effect of a step happened in a run after the one that recorded it: `recorded` has the
    /// fence of the record for each key.
    pub fn check_no_recorded_step_ran_again(&self, recorded: &BTreeMap<String, u64>) {
        for words in self.of("effect") {
            let fence: u64 = words[2].parse().expect("a fence");
            if let Some(&at) = recorded.get(words[1]) {
                assert!(fence <= at, "{} was recorded by run {at} and run again by {fence}", words[1]);
            }
        }
    }

    pub fn tasks_seen(&self) -> BTreeSet<&str> {
        self.of("run").map(|words| words[0]).collect()
    }
}

impl Bed {
    /// The fence of the run that recorded each step, by idempotency key.
    pub async fn recorded(&self, tasks: &[TaskId]) -> BTreeMap<String, u64> {
        let mut recorded = BTreeMap::new();
        for &id in tasks {
            let mut events = self.client.events(id, 0).await.expect("the task is there");
            while let Some(event) = events.next().await.expect("the store answers") {
                if let ("step.completed", Some(step)) = (event.kind.as_str(), event.step) {
                    let again = recorded.insert(format!("{id}/{step}"), event.run);
                    assert_eq!(again, None, "step {step} of {id} was recorded twice");
                }
            }
        }
        recorded
    }
}

pub fn steps(count: u32) -> Value {
    json!({"steps": count})
}
