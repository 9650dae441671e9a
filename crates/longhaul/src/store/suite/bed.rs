//! Where a test of the suite runs: a fresh store, a worker that has the handlers `h` and `g`, and
//! short ways to do what tests do.

use std::future::Future;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use serde_json::json;
use serde_json::value::RawValue;
use tokio_postgres::NoTls;
use uuid::Uuid;

use crate::error::TaskError;
use crate::event::{Event, LogEntry, LogRow, NewEvent};
use crate::record::{Effect, Op, Record};
use crate::store::{
    Accepted, Action, Beat, Claim, Claimed, Commit, CommitRefused, Committed, Control, ControlRefused, Controlled,
    Filter, Heartbeat, Hints, LOG_PAGE, Lease, Outcome, QueueInfo, QueueSettings, Settings, Store, SubmitRefused,
    Swept, WorkerInfo,
};
use crate::task::{NewTask, State, Task, TaskId, Waiting};

/// How long a claim's lease is when a test does not say otherwise.
pub(super) const LEASE: Duration = Duration::from_secs(15);

/// No test of the suite takes this long; one that does hangs.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) async fn on_memory<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Bed) -> F) {
    run(test(Bed::open("memory:").await)).await;
}

pub(super) async fn on_sqlite<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Bed) -> F) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("suite.db");
    run(test(Bed::open(&format!("sqlite:{}", path.display())).await)).await;
}

/// Each test has a schema of its own, which is gone afterwards.
pub(super) async fn on_postgres<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Bed) -> F) {
    static SKIPPED: Once = Once::new();
    let Ok(url) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
        // Past the test harness, which shows nothing of a test that passes.
        SKIPPED.call_once(|| {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: the store suite on PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test"
            );
        });
        return;
    };
    let (admin, connection) = tokio_postgres::connect(&url, NoTls).await.expect("LONGHAUL_TEST_POSTGRES answers");
    tokio::spawn(connection);
    let schema = format!("suite_{}", Uuid::now_v7().simple());
    admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
    let mark = if url.contains('?') { '&' } else { '?' };
    let bed = Bed::open(&format!("{url}{mark}options=-csearch_path%3D{schema}")).await;
    let ended = tokio::time::timeout(PATIENCE, tokio::spawn(test(bed))).await;
    admin.batch_execute(&format!("DROP SCHEMA {schema} CASCADE")).await.expect("the schema goes");
    ended.expect("the test hangs").unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
}

async fn run(test: impl Future<Output = ()> + Send + 'static) {
    let ended = tokio::time::timeout(PATIENCE, tokio::spawn(test)).await;
    ended.expect("the test hangs").unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
}

/// A store and one worker of it.
#[derive(Clone)]
pub(super) struct Bed {
    pub(super) store: Arc<dyn Store>,
    pub(super) worker: Uuid,
    pub(super) url: Arc<str>,
    claims: Arc<AtomicU64>,
    /// Claims are for the handler `h` and the default queue only.
    narrow: bool,
}

impl Bed {
    async fn open(url: &str) -> Self {
        let store = crate::store::open(url, Arc::new(Hints::default())).await.expect("the store opens");
        // A database server that has just started gives leases some grace; tests begin after that.
        store.clock().advance(secs(60));
        Self::on(store, url.into()).await
    }

    async fn on(store: Arc<dyn Store>, url: Arc<str>) -> Self {
        let worker = worker(&["h", "g"]);
        store.register(&worker).await.expect("registered");
        Self { store, worker: worker.id, url, claims: Arc::default(), narrow: false }
    }

    /// Another worker on the same store.
    pub(super) async fn another_worker(&self) -> Self {
        let other = Self::on(Arc::clone(&self.store), Arc::clone(&self.url)).await;
        Self { narrow: self.narrow, ..other }
    }

    /// The same, with claims for one handler and one queue, which a store may do in another way.
    pub(super) fn narrow(self) -> Self {
        Self { narrow: true, ..self }
    }

    /// The same database opened once more, as another process does (`memory:` cannot be shared,
    /// there it is the same store).
    pub(super) async fn another_process(&self) -> Self {
        if &*self.url == "memory:" {
            return self.another_worker().await;
        }
        let other = Self::open(&self.url).await;
        let behind = self.store.clock().offset() - other.store.clock().offset();
        other.store.clock().advance(Duration::from_micros(behind.unsigned_abs()));
        Self { narrow: self.narrow, ..other }
    }

    /// Accepts a new task.
    pub(super) async fn submit(&self, task: NewTask) -> TaskId {
        let accepted = self.try_submit(&task).await.expect("accepted");
        assert!(accepted.new, "the task was known already");
        assert_eq!(accepted.id, task.id);
        accepted.id
    }

    /// Accepts `count` plain tasks for `h`, in one batch.
    pub(super) async fn submit_many(&self, count: usize) -> Vec<TaskId> {
        let batch: Vec<NewTask> = (0..count).map(|n| NewTask::new("h", &n)).collect();
        let answers = self.store.submit(&batch).await.expect("the store answers");
        answers.into_iter().map(|answer| answer.expect("accepted").id).collect()
    }

    pub(super) async fn try_submit(&self, task: &NewTask) -> Result<Accepted, SubmitRefused> {
        let mut answers = self.store.submit(std::slice::from_ref(task)).await.expect("the store answers");
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    /// A new claim for everything this worker has.
    pub(super) fn ask(&self, max: usize) -> Claim {
        Claim {
            worker: self.worker,
            number: self.claims.fetch_add(1, Ordering::Relaxed) + 1,
            queues: ["default", "q", "r"][..if self.narrow { 1 } else { 3 }].iter().map(|&q| q.into()).collect(),
            handlers: ["h", "g"][..if self.narrow { 1 } else { 2 }].iter().map(|&h| h.into()).collect(),
            timeouts: std::collections::BTreeMap::new(),
            max,
            lease: LEASE,
            idle: false,
        }
    }

    pub(super) async fn claim_as(&self, ask: &Claim) -> Claimed {
        self.store.claim(ask).await.expect("the store answers")
    }

    pub(super) async fn claim(&self, max: usize) -> Vec<Lease> {
        self.claim_as(&self.ask(max)).await.leases
    }

    /// Claims as a worker that runs nothing else.
    pub(super) async fn claim_idle(&self, max: usize) -> Vec<Lease> {
        self.claim_as(&Claim { idle: true, ..self.ask(max) }).await.leases
    }

    pub(super) async fn claim_ids(&self, max: usize) -> Vec<TaskId> {
        self.claim(max).await.into_iter().map(|lease| lease.task).collect()
    }

    /// The only task that can be claimed.
    pub(super) async fn claim_one(&self) -> Lease {
        let mut leases = self.claim(2).await;
        assert_eq!(leases.len(), 1, "exactly one task is ready");
        leases.remove(0)
    }

    /// A new plain task, leased.
    pub(super) async fn running(&self) -> Lease {
        self.running_as(NewTask::new("h", &1)).await
    }

    /// `task`, leased.
    pub(super) async fn running_as(&self, task: NewTask) -> Lease {
        self.submit(task).await;
        self.claim_one().await
    }

    pub(super) async fn commit(&self, write: Write) -> Result<Committed, CommitRefused> {
        let mut answers = self.commit_all(vec![write]).await;
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    pub(super) async fn commit_all(&self, writes: Vec<Write>) -> Vec<Result<Committed, CommitRefused>> {
        let batch: Vec<Commit> = writes.into_iter().map(Write::build).collect();
        self.store.commit(&batch).await.expect("the store answers")
    }

    /// Ends the run of `lease`, which must have written nothing before.
    pub(super) async fn end(&self, lease: &Lease, outcome: Outcome) {
        self.end_with(lease, 1, outcome).await;
    }

    /// Ends the run of `lease` with its commit of this number.
    pub(super) async fn end_with(&self, lease: &Lease, number: u32, outcome: Outcome) {
        self.commit(write(lease, number).outcome(outcome)).await.expect("the lease is current");
    }

    pub(super) async fn heartbeat(&self, leases: &[&Lease]) -> Vec<Beat> {
        let leases = leases.iter().map(|lease| (lease.task, lease.fence)).collect();
        let beat = Heartbeat { worker: self.worker, leases, lease: LEASE };
        self.store.heartbeat(&beat).await.expect("the store answers").beats
    }

    pub(super) async fn control(&self, task: TaskId, action: Action) -> Result<Controlled, ControlRefused> {
        let control = Control { tenant: "default".into(), task, by: "ann".into(), action };
        let mut answers = self.store.control(&[control]).await.expect("the store answers");
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    pub(super) async fn cancel(&self, task: TaskId) -> Result<Controlled, ControlRefused> {
        self.control(task, Action::Cancel { undo: false, reason: Some("enough".into()) }).await
    }

    pub(super) async fn sweep(&self) -> Swept {
        self.store.sweep(1_000, true).await.expect("the store answers")
    }

    /// Moves the clock and does what is due then.
    pub(super) async fn pass(&self, seconds: u64) -> Swept {
        self.advance(seconds);
        self.sweep().await
    }

    pub(super) fn advance(&self, seconds: u64) {
        self.store.clock().advance(secs(seconds));
    }

    /// Lets the lease of a task run out and be taken back.
    pub(super) async fn lose(&self, lease: &Lease) {
        let swept = self.pass(LEASE.as_secs() + 1).await;
        assert_eq!(swept.expired, 1, "the lease of {} was taken back", lease.task);
    }

    pub(super) async fn find(&self, id: TaskId) -> Option<Task> {
        self.store.task("default", id).await.expect("the store answers")
    }

    pub(super) async fn task(&self, id: TaskId) -> Task {
        self.find(id).await.expect("the task is there")
    }

    /// A task of any tenant.
    pub(super) async fn task_of(&self, tenant: &str, id: TaskId) -> Task {
        self.store.task(tenant, id).await.expect("the store answers").expect("the task is there")
    }

    pub(super) async fn state(&self, id: TaskId) -> State {
        self.task(id).await.state
    }

    pub(super) async fn list(&self, filter: Filter) -> Vec<TaskId> {
        let page = self.store.list("default", &filter).await.expect("the store answers");
        page.tasks.into_iter().map(|task| task.id).collect()
    }

    /// The whole log, page by page.
    pub(super) async fn log(&self, id: TaskId) -> Vec<LogRow> {
        let (mut rows, mut after) = (Vec::<LogRow>::new(), 0);
        loop {
            let page = self.store.log(id, after, LOG_PAGE).await.expect("the store answers");
            let last = page.last().map_or(0, LogRow::last_seq);
            rows.extend(page);
            if last <= after {
                return rows;
            }
            after = last;
        }
    }

    /// All events; their numbers are 1..n and n is what the task says.
    pub(super) async fn events(&self, id: TaskId) -> Vec<Event> {
        let events: Vec<Event> = self.log(id).await.iter().flat_map(|row| row.events_of(id)).collect();
        let numbers: Vec<u64> = events.iter().map(|event| event.seq).collect();
        let expected: Vec<u64> = (1..=events.len() as u64).collect();
        assert_eq!(numbers, expected, "events are 1..n without gaps");
        if let Some(task) = self.find(id).await {
            assert_eq!(task.last_seq, events.len() as u64, "the task knows its newest event");
        }
        events
    }

    pub(super) async fn kinds(&self, id: TaskId) -> Vec<String> {
        self.events(id).await.into_iter().map(|event| event.kind).collect()
    }

    pub(super) async fn records(&self, id: TaskId) -> Vec<Record> {
        let rows = self.log(id).await;
        rows.iter().flat_map(|row| crate::record::records_of(row).expect("records are readable")).collect()
    }

    /// Everything a reader can see of a task, to tell whether anything changed.
    pub(super) async fn everything(&self, id: TaskId) -> String {
        let task = self.task(id).await;
        let state = self.store.state(id).await.expect("the store answers");
        let checkpoints = self.store.checkpoints(id).await.expect("the store answers");
        format!("{task:?} {:?} {state:?} {checkpoints:?}", self.log(id).await)
    }

    pub(super) async fn configure(&self, settings: Settings) {
        self.store.configure(&settings).await.expect("the store answers");
    }

    pub(super) async fn configure_queue(&self, name: &str, queue: QueueSettings) {
        self.configure(Settings { queues: [(name.to_owned(), queue)].into(), ..Settings::default() }).await;
    }

    pub(super) async fn queue(&self, name: &str) -> QueueInfo {
        let queues = self.store.queues().await.expect("the store answers");
        queues.into_iter().find(|queue| queue.name == name).expect("the queue is known")
    }
}

/// A worker as it registers.
pub(super) fn worker(handlers: &[&str]) -> WorkerInfo {
    WorkerInfo {
        id: Uuid::now_v7(),
        name: "suite:1".into(),
        handlers: handlers.iter().map(|&name| name.to_owned()).collect(),
        queues: ["default", "q", "r"].map(String::from).to_vec(),
        slots: 10,
        started_at: 0,
        seen_at: 0,
        running: 0,
    }
}

/// What a run writes, in the making.
#[derive(Clone)]
pub(super) struct Write {
    commit: Commit,
    events: Vec<NewEvent>,
    records: Vec<Record>,
}

/// The commit with this number of the run that holds `lease`: forward, and empty so far.
pub(super) fn write(lease: &Lease, number: u32) -> Write {
    let commit = Commit {
        task: lease.task,
        fence: lease.fence,
        number,
        forward: true,
        recorded: false,
        known_seq: None,
        entry: LogEntry::default(),
        progress: None,
        usage: None,
        undo_on: None,
        patches: Vec::new(),
        checkpoint: None,
        undoable: false,
        phase: None,
        asks: Vec::new(),
        outcome: None,
    };
    Write { commit, events: Vec::new(), records: Vec::new() }
}

impl Write {
    pub(super) fn event(mut self, kind: &str) -> Self {
        self.events.push(NewEvent::new(kind, json!({"of": kind})));
        self
    }

    pub(super) fn record(mut self, record: Record) -> Self {
        self.records.push(record);
        self
    }

    /// A step that ended well: its record and its event.
    pub(super) fn step(self, name: &str) -> Self {
        self.with(|commit| commit.recorded = true).event("step.completed").record(done(name, "true"))
    }

    /// How the run ended, and the event that says so.
    pub(super) fn outcome(self, outcome: Outcome) -> Self {
        let kind = match &outcome {
            Outcome::Completed { .. } => "task.completed",
            Outcome::Failed { .. } => "task.failed",
            Outcome::Cancelled { .. } => "task.cancelled",
            Outcome::Suspended { .. } => "task.waiting",
            Outcome::Retry { .. } | Outcome::Released => "progress",
        };
        self.event(kind).with(|commit| commit.outcome = Some(outcome))
    }

    /// Not forward: what a cancel or a deadline does not forbid.
    pub(super) fn backward(self) -> Self {
        self.with(|commit| commit.forward = false)
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut Commit)) -> Self {
        change(&mut self.commit);
        self
    }

    fn build(mut self) -> Commit {
        self.commit.entry = LogEntry::new(&self.events, &self.records);
        self.commit
    }
}

pub(super) fn done(step: &str, result: &str) -> Record {
    Record::Done {
        step: step.into(),
        op: Op::Step,
        effect: Effect::Idempotent,
        attempt: 1,
        started: 0,
        result: raw(result),
        undoable: false,
        given_after: None,
    }
}

pub(super) fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).expect("the test's text is JSON")
}

pub(super) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) fn completed() -> Outcome {
    Outcome::Completed { result: raw(r#"{"ok":true}"#) }
}

pub(super) fn failed() -> Outcome {
    Outcome::Failed { error: TaskError::fatal("broken", "it broke"), attempt: true }
}

pub(super) fn cancelled() -> Outcome {
    Outcome::Cancelled { error: TaskError::fatal("cancelled", "cancelled by ann") }
}

pub(super) fn retry(after: u64) -> Outcome {
    Outcome::Retry { error: TaskError::retryable("flaky", "not this time"), after: secs(after), attempt: true }
}

pub(super) fn suspended(kind: &str, id: &str, wake_after: Option<u64>) -> Outcome {
    let waiting = Waiting { kind: kind.into(), id: id.into(), since: None, until: None };
    Outcome::Suspended { waiting, wake_after: wake_after.map(secs) }
}
