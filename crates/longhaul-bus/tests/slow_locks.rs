//! Locks and the lead on all three services (the store alone, Redis, etcd), each on SQLite and PostgreSQL, with
//! whole programs: killed, paused, and with a service that goes away and comes back. What the lock protects is
//! outside: a ledger that refuses a token smaller than one it has seen, and notes who was there when.

mod locks_bed;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use locks_bed::{Kind, PATIENCE, Restart, TTL, connect, until};
use longhaul::{
    Client, Event, NewTask, Run, Schedule, State, StatePatch, Task, TaskError, TaskId, Worker, WorkerHandle,
};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{RwLock, RwLockReadGuard};

/// Held to write by tests that stop a service, to read by all others.
static SERVICES: RwLock<()> = RwLock::const_new(());

/// What the lock protects.
#[derive(Clone)]
struct Ledger {
    address: String,
    entries: Arc<Mutex<Vec<Entry>>>,
}

#[derive(Clone, Debug)]
struct Entry {
    who: String,
    token: u64,
    accepted: bool,
}

impl Ledger {
    async fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let entries: Arc<Mutex<Vec<Entry>>> = Arc::default();
        let kept = Arc::clone(&entries);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let kept = Arc::clone(&kept);
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    let mut line = String::new();
                    stream.read_line(&mut line).await.expect("a line");
                    let (token, who) = line.trim().split_once(' ').expect("a token and a name");
                    let token: u64 = token.parse().expect("a number");
                    let accepted = {
                        let mut entries = kept.lock().expect("not poisoned");
                        let largest = entries.iter().filter(|entry| entry.accepted).map(|entry| entry.token).max();
                        let accepted = largest.is_none_or(|largest| token >= largest);
                        entries.push(Entry { who: who.to_owned(), token, accepted });
                        accepted
                    };
                    let answer: &[u8] = if accepted { b"ok\n" } else { b"refused\n" };
                    stream.write_all(answer).await.expect("answered");
                });
            }
        });
        Self { address, entries }
    }

    fn entries(&self) -> Vec<Entry> {
        self.entries.lock().expect("not poisoned").clone()
    }

    /// Each one's `in` is followed by its `out`: nobody was there at the same time. And tokens grew.
    fn check(&self) -> usize {
        let mut entries = self.entries();
        entries.retain(|entry| entry.accepted || entry.who.ends_with(" out"));
        for pair in entries.chunks(2) {
            let [enters, leaves] = pair else { panic!("somebody is still inside: {entries:?}") };
            let name = |entry: &Entry, what: &str| entry.who.strip_suffix(what).map(str::to_owned);
            assert!(name(enters, " in").is_some(), "{enters:?}");
            assert_eq!(name(enters, " in"), name(leaves, " out"), "two at once: {enters:?} {leaves:?}");
            assert!(enters.accepted && leaves.accepted && enters.token == leaves.token, "{enters:?} {leaves:?}");
        }
        for pair in entries.chunks(2).collect::<Vec<_>>().windows(2) {
            assert!(pair[0][0].token < pair[1][0].token, "tokens grow: {pair:?}");
        }
        entries.len() / 2
    }
}

/// Writes to the ledger; says whether that took it.
async fn write(ledger: &str, token: u64, who: &str) -> Result<bool, TaskError> {
    let broken = |error: std::io::Error| TaskError::retryable("ledger", error.to_string());
    let mut stream = BufReader::new(TcpStream::connect(ledger).await.map_err(broken)?);
    stream.write_all(format!("{token} {who}\n").as_bytes()).await.map_err(broken)?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await.map_err(broken)?;
    Ok(answer == "ok\n")
}

/// Where tasks are kept, and by which service their locks: one cluster.
#[derive(Clone)]
struct Cluster {
    store: String,
    locks: String,
    client: Client,
    _folder: Option<Arc<tempfile::TempDir>>,
}

impl Cluster {
    /// The first of a test; `None` when something is not here.
    async fn new(kind: Kind, postgres: bool) -> Option<Self> {
        Self::with(kind.url()?, postgres).await
    }

    /// Another one at the same service.
    async fn another(&self) -> Self {
        let postgres = self.store.starts_with("postgres");
        Self::with(self.locks.clone(), postgres).await.expect("what was here is here")
    }

    async fn with(locks: String, postgres: bool) -> Option<Self> {
        let (store, folder) = if postgres {
            let Ok(server) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
                eprintln!("skipped: needs PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test");
                return None;
            };
            let schema = format!("locks_{}", TaskId::new().0.simple());
            let (admin, connection) =
                tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("the test server answers");
            tokio::spawn(connection);
            admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
            let mark = if server.contains('?') { '&' } else { '?' };
            (format!("{server}{mark}options=-csearch_path%3D{schema}"), None)
        } else {
            let folder = tempfile::tempdir().expect("a folder");
            (format!("sqlite:{}", folder.path().join("test.db").display()), Some(Arc::new(folder)))
        };
        let client = open(&store, &locks).await;
        Some(Self { store, locks, client, _folder: folder })
    }

    /// What tells it from others in the ledger.
    fn name(&self) -> &str {
        self.store.rsplit(['/', '_']).nth(1).unwrap_or(&self.store)
    }

    /// A program of its own with a worker for the handlers of [`handlers`].
    fn program(&self, ledger: &Ledger) -> Program {
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "the_other_program", "--nocapture"])
            .env("TEST_PROGRAM", format!("{}|{}|{}", self.store, self.locks, ledger.address))
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        Program(child)
    }

    async fn submit(&self, handler: &str, input: &str) -> TaskId {
        self.client.submit(NewTask::new(handler, &input)).await.expect("accepted").id
    }

    async fn ended(&self, id: TaskId) -> Task {
        self.client.wait(id, PATIENCE).await.expect("the task ends")
    }

    async fn event(&self, id: TaskId, kind: &str) -> Event {
        let wait = async {
            let mut events = self.client.events(id, 0).await.expect("the task is there");
            while let Some(event) = events.next().await.expect("the store answers") {
                if event.kind == kind {
                    return event;
                }
            }
            panic!("the task ended without {kind}")
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("it comes")
    }

    async fn waits_for(&self, id: TaskId, kind: &str) {
        until("the task waits", async || {
            let task = self.client.task(id).await.expect("there");
            assert!(!task.state.is_final(), "it ended: {:?}", task.error);
            task.waiting_for.is_some_and(|waiting| waiting.kind == kind)
        })
        .await;
    }
}

async fn open(store: &str, locks: &str) -> Client {
    let client = Client::open(store).await.expect("the store opens");
    if locks != "store:" {
        client.use_lock_service(connect(locks).await).await.expect("taken");
    }
    client
}

/// A program that is killed at the end.
struct Program(Child);

impl Program {
    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Stops a program, but not in the middle of a write to a SQLite file, which would hold up everyone who shares it.
async fn pause(program: &Program, client: &Client) {
    program.signal("-STOP");
    while client.announce(&["short"]).await.is_err() {
        program.signal("-CONT");
        tokio::task::yield_now().await;
        program.signal("-STOP");
    }
}

/// The worker of a cluster, with what tests need done.
async fn start(client: &Client, ledger: &str) -> WorkerHandle {
    handlers(Worker::new(client), client, ledger).start().await.expect("starts")
}

fn handlers(worker: Worker, client: &Client, ledger: &str) -> Worker {
    let ledger: Arc<str> = ledger.into();
    let (short, long, client) = (Arc::clone(&ledger), ledger, client.clone());
    worker
        // Has the lock for a moment. Should it be lost before that began, the ledger says so: it asks again.
        .handler("short", move |run: Run, who: String| {
            let ledger = Arc::clone(&short);
            async move {
                loop {
                    let lock = run.lock("db").await?;
                    let token = lock.token();
                    let visit = run.step("visit", async || {
                        if !write(&ledger, token, &format!("{who} in")).await? {
                            return Ok(false);
                        }
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        write(&ledger, token, &format!("{who} out")).await
                    });
                    let visited: bool = visit.await?;
                    lock.release().await?;
                    if visited {
                        return Ok::<_, TaskError>(());
                    }
                }
            }
        })
        // Has the lock until it is told to go on, and then writes with its token: to the ledger, and to the
        // state of a task. Says what became of both; with such a task, not before it may end.
        .handler("long", move |run: Run, (name, max_hold, shared): (String, u64, Option<TaskId>)| {
            let (ledger, client) = (Arc::clone(&long), client.clone());
            async move {
                let lock = run.lock("db").max_hold(Duration::from_secs(max_hold)).await?;
                let (token, proof) = (lock.token(), lock.proof());
                write(&ledger, token, &name).await?;
                run.publish("test.inside", &token).await?;
                // In a step: the run stays where it is, with its worker.
                let write = run.step("write", async || {
                    while !go_file(&ledger).exists() {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    let taken = write(&ledger, token, &format!("{name} again")).await?;
                    let patch = StatePatch { set_goal: Some(name.clone()), ..StatePatch::default() };
                    let patched = match shared {
                        Some(shared) => client.patch_state_under(&proof, shared, patch, None).await.is_ok(),
                        None => taken,
                    };
                    Ok::<_, TaskError>((taken, patched))
                });
                let became: (bool, bool) = write.await?;
                if shared.is_some() {
                    run.signal::<()>("end").await?;
                }
                Ok::<_, TaskError>(became)
            }
        })
        .handler("wait", |run: Run, _: String| async move { run.signal::<()>("go").await })
        .handler("tick", |_: Run, _: String| async move { Ok::<_, TaskError>(()) })
}

/// Not a test: what [`Cluster::program`] runs.
#[test]
fn the_other_program() {
    let Ok(told) = std::env::var("TEST_PROGRAM") else { return };
    let [store, locks, ledger] = told.split('|').collect::<Vec<_>>()[..] else {
        panic!("told too little: {told}")
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let client = open(store, locks).await;
        handlers(Worker::new(&client), &client, ledger).run(std::future::pending()).await.expect("it works");
    });
}

/// The file for which `long` waits.
fn go_file(ledger: &str) -> PathBuf {
    std::env::temp_dir().join(format!("longhaul-test-{}-go", ledger.replace(':', "-")))
}

/// Makes it, and removes it when dropped.
struct Go(PathBuf);

impl Go {
    fn of(ledger: &Ledger) -> Self {
        Self(go_file(&ledger.address))
    }

    fn give(&self) {
        std::fs::write(&self.0, "").expect("a file");
    }
}

impl Drop for Go {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn others_run() -> RwLockReadGuard<'static, ()> {
    SERVICES.read().await
}

macro_rules! on_every_service {
    ($($test:ident),+ $(,)?) => {
        on_every_service!(@ store_on_sqlite, Store, false, $($test),+);
        on_every_service!(@ store_on_postgres, Store, true, $($test),+);
        on_every_service!(@ redis_with_sqlite, Redis, false, $($test),+);
        on_every_service!(@ redis_with_postgres, Redis, true, $($test),+);
        on_every_service!(@ etcd_with_sqlite, Etcd, false, $($test),+);
        on_every_service!(@ etcd_with_postgres, Etcd, true, $($test),+);
    };
    (@ $name:ident, $kind:ident, $postgres:literal, $($test:ident),+) => {
        mod $name {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::Kind::$kind, $postgres).await;
            })+
        }
    };
}

on_every_service!(
    a_holder_paused_past_its_session_cannot_write_with_its_old_token,
    tasks_of_several_programs_never_meet_and_tokens_grow,
    a_lock_of_a_program_that_was_killed_is_had_by_others_within_seconds,
    a_long_line_in_one_store_does_not_keep_another_store_out,
    schedules_go_on_within_seconds_when_the_program_that_fires_them_is_paused,
    a_service_that_is_killed_and_comes_back_loses_no_task_and_lets_no_two_in,
    while_the_service_is_away_asking_says_why_and_waits,
);

/// With a service: two clusters. With the store alone there is only one; there `max_hold` is the session.
async fn a_holder_paused_past_its_session_cannot_write_with_its_old_token(kind: Kind, postgres: bool) {
    let _all = others_run().await;
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let other = if kind == Kind::Store { one.clone() } else { one.another().await };
    let (ledger, max_hold) = (Ledger::open().await, if kind == Kind::Store { 2 } else { 3_600 });
    let go = Go::of(&ledger);
    let program = one.program(&ledger);
    until("it is up", async || !one.client.workers().await.expect("answers").is_empty()).await;
    let shared = one.submit("wait", "").await;
    one.waits_for(shared, "signal").await;
    let paused =
        one.client.submit(NewTask::new("long", &("paused", max_hold, Some(shared)))).await.expect("accepted").id;
    let old = one.event(paused, "test.inside").await.data.as_u64();
    pause(&program, &one.client).await;

    // Another one is next, and is there within seconds.
    let stopped = Instant::now();
    let worker = start(&other.client, &ledger.address).await;
    let next = other.submit("short", "next").await;
    assert_eq!(other.ended(next).await.state, State::Completed);
    let waited = stopped.elapsed();
    assert!(waited < TTL + Duration::from_secs(8), "after {waited:?}");
    let new = other.event(next, "lock.acquired").await.data["token"].as_u64();
    assert!(old < new, "{old:?} {new:?}");

    // The paused one goes on as if nothing had happened, and is refused by both.
    go.give();
    program.signal("-CONT");
    let expired = one.event(paused, "lock.expired").await;
    one.client.signal(paused, "end", &()).await.expect("taken");
    let task = one.ended(paused).await;
    assert_eq!(task.result.as_ref().map(|result| result.get()), Some("[false,false]"), "{:?}", task.error);
    let late = ledger.entries().into_iter().find(|entry| entry.who == "paused again").expect("it tried");
    assert!(!late.accepted && Some(late.token) == old);
    let (_, state) = one.client.state(shared).await.expect("answers").unwrap_or_default();
    assert_eq!(state.goal, "");
    let reason = expired.data["reason"].as_str().expect("a reason").to_owned();
    if kind == Kind::Store {
        assert_eq!(reason, "max_hold");
    } else {
        assert!(reason == "session_ended" || reason == "session_lost", "{reason}");
    }
    worker.stop().await;
}

async fn tasks_of_several_programs_never_meet_and_tokens_grow(kind: Kind, postgres: bool) {
    let _all = others_run().await;
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let other = if kind == Kind::Store { one.clone() } else { one.another().await };
    let ledger = Ledger::open().await;
    let workers = [start(&one.client, &ledger.address).await, start(&other.client, &ledger.address).await];
    let mut tasks = Vec::new();
    for number in 0..30 {
        for cluster in [&one, &other] {
            tasks.push((cluster, cluster.submit("short", &format!("{number} of {}", cluster.name())).await));
        }
    }
    for (cluster, id) in tasks {
        let task = cluster.ended(id).await;
        assert_eq!(task.state, State::Completed, "{:?}", task.error);
    }
    assert_eq!(ledger.check(), 60);
    for worker in workers {
        worker.stop().await;
    }
}

async fn a_lock_of_a_program_that_was_killed_is_had_by_others_within_seconds(kind: Kind, postgres: bool) {
    let _all = others_run().await;
    if kind == Kind::Store {
        // A task's lock outlives its worker: that is tested where the store is.
        return;
    }
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let (other, ledger) = (one.another().await, Ledger::open().await);
    let program = one.program(&ledger);
    until("it is up", async || !one.client.workers().await.expect("answers").is_empty()).await;
    let holder =
        one.client.submit(NewTask::new("long", &("killed", 3_600, None::<TaskId>))).await.expect("accepted").id;
    one.event(holder, "test.inside").await;
    let worker = start(&other.client, &ledger.address).await;
    let next = other.submit("short", "next").await;
    other.waits_for(next, "lock").await;
    let killed = Instant::now();
    drop(program);
    assert_eq!(other.ended(next).await.state, State::Completed);
    let waited = killed.elapsed();
    assert!(waited < TTL + Duration::from_secs(5), "after {waited:?}");
    eprintln!("{kind:?}: a lock of a killed program was had after {waited:?}");
    worker.stop().await;
}

async fn a_long_line_in_one_store_does_not_keep_another_store_out(kind: Kind, postgres: bool) {
    let _all = others_run().await;
    if kind == Kind::Store {
        return; // its one line is tested where the store is
    }
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let (other, ledger) = (one.another().await, Ledger::open().await);
    let go = Go::of(&ledger);
    let workers = [start(&one.client, &ledger.address).await, start(&other.client, &ledger.address).await];
    let first = NewTask::new("long", &("first", 3_600, None::<TaskId>));
    let first = one.client.submit(first).await.expect("accepted").id;
    one.event(first, "test.inside").await;
    let mut tasks = vec![(&one, first)];
    tasks.push((&other, other.submit("short", "of the other store").await));
    until("the service knows that it waits", async || {
        let lock = other.client.lock("db").await.expect("answers");
        lock.and_then(|lock| lock.trouble).is_some_and(|why| why.contains("someone outside"))
    })
    .await;
    for number in 0..5 {
        let id = one.submit("short", &format!("{number} in line")).await;
        one.waits_for(id, "lock").await;
        tasks.push((&one, id));
    }
    go.give();
    for (cluster, id) in tasks {
        assert_eq!(cluster.ended(id).await.state, State::Completed);
    }
    let order: Vec<String> = ledger.entries().into_iter().map(|entry| entry.who).collect();
    assert_eq!(order[..3], ["first", "first again", "of the other store in"], "{order:?}");
    assert_eq!(order.iter().filter(|who| who.ends_with("in line out")).count(), 5);
    for (index, who) in order.iter().filter(|who| who.ends_with("in line in")).enumerate() {
        assert_eq!(*who, format!("{index} in line in"), "the store's own line is in order");
    }
    for worker in workers {
        worker.stop().await;
    }
}

async fn schedules_go_on_within_seconds_when_the_program_that_fires_them_is_paused(kind: Kind, postgres: bool) {
    let _all = others_run().await;
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let ledger = Ledger::open().await;
    let program = one.program(&ledger);
    until("it is up", async || !one.client.workers().await.expect("answers").is_empty()).await;
    let often = Schedule::every("often", Duration::from_secs(1), NewTask::new("tick", &""));
    let planned = one.client.schedule(often).await.expect("saved");
    let newest = async || one.client.schedules().await.expect("answers")[0].last_at;
    until("it ticks", async || newest().await.is_some()).await;
    let second = start(&one.client, &ledger.address).await;
    pause(&program, &one.client).await;
    let (paused, before) = (Instant::now(), newest().await);
    until("it ticks again", async || newest().await > before).await;
    let waited = paused.elapsed();
    assert!(waited < Duration::from_secs(9), "after {waited:?}");
    eprintln!("{kind:?}: the schedule went on after {waited:?}");
    program.signal("-CONT");
    let before = newest().await;
    until("it goes on", async || newest().await > before).await;
    one.client.pause_schedule("often").await.expect("paused");
    // Whoever fired, a tick has one task at most.
    let ticks = newest().await.expect("it ticked").duration_since(planned.next_at.expect("planned")).as_secs() + 1;
    let filter =
        longhaul::Filter { limit: 1_000, handler: Some("tick".to_owned()), ..longhaul::Filter::default() };
    let tasks = one.client.list(&filter).await.expect("answers").len();
    assert!(i64::try_from(tasks).expect("few") <= ticks, "{tasks} tasks for {ticks} ticks");
    second.stop().await;
}

async fn a_service_that_is_killed_and_comes_back_loses_no_task_and_lets_no_two_in(kind: Kind, postgres: bool) {
    if kind == Kind::Store {
        return; // what a store's restart does to tasks is tested where that is
    }
    let _alone = SERVICES.write().await;
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let (other, ledger) = (one.another().await, Ledger::open().await);
    let workers = [start(&one.client, &ledger.address).await, start(&other.client, &ledger.address).await];
    let _restart = Restart(kind);
    let mut tasks = Vec::new();
    for number in 0..40 {
        for cluster in [&one, &other] {
            tasks.push((cluster, cluster.submit("short", &format!("{number} of {}", cluster.name())).await));
        }
    }
    for (round, away) in [Duration::from_millis(300), TTL * 2].into_iter().enumerate() {
        let visits = (round + 1) * 20;
        until("they come and go", async || ledger.entries().len() >= visits).await;
        if !kind.control("kill") {
            return;
        }
        tokio::time::sleep(away).await;
        kind.control("start");
    }
    for (cluster, id) in tasks {
        let task = cluster.ended(id).await;
        assert_eq!(task.state, State::Completed, "{:?}", task.error);
    }
    assert_eq!(ledger.check(), 80);
    for worker in workers {
        worker.stop().await;
    }
}

async fn while_the_service_is_away_asking_says_why_and_waits(kind: Kind, postgres: bool) {
    if kind == Kind::Store {
        return; // without its store nobody can ask
    }
    let _alone = SERVICES.write().await;
    let Some(one) = Cluster::new(kind, postgres).await else { return };
    let ledger = Ledger::open().await;
    let worker = start(&one.client, &ledger.address).await;
    let _restart = Restart(kind);
    if !kind.control("kill") {
        return;
    }
    let id = one.submit("short", "patient").await;
    one.waits_for(id, "lock").await;
    let name = if kind == Kind::Redis { "redis" } else { "etcd" };
    until("it says why", async || {
        let why = one.client.why(id).await.expect("answers");
        why.sentence.contains(name) && why.sentence.contains("not reachable")
    })
    .await;
    kind.control("start");
    assert_eq!(one.ended(id).await.state, State::Completed);
    assert_eq!(ledger.check(), 1);
    worker.stop().await;
}
