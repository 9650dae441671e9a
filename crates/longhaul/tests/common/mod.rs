//! What the tests of the engine share: a client on each kind of store, and ways to wait.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::time::Duration;

use longhaul::{Client, Event, RetryPolicy, Task, TaskId};

pub mod receiver;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A client on a store of its own, removed with this value.
pub struct Bed {
    pub client: Client,
    pub url: String,
    _folder: Option<tempfile::TempDir>,
}

impl Bed {
    pub async fn memory() -> Self {
        let client = Client::open("memory:").await.expect("a store in memory");
        Self { client, url: "memory:".to_owned(), _folder: None }
    }

    pub async fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = format!("sqlite:{}", folder.path().join("test.db").display());
        let client = Client::open(&url).await.expect("a store in a file");
        Self { client, url, _folder: Some(folder) }
    }

    /// A schema of its own on the test server; `None`, with one line that says so, without one.
    pub async fn postgres() -> Option<Self> {
        let Ok(server) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
            eprintln!("skipped: needs PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test");
            return None;
        };
        let schema = format!("engine_{}", TaskId::new().0.simple());
        let (admin, connection) =
            tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
        let mark = if server.contains('?') { '&' } else { '?' };
        let url = format!("{server}{mark}options=-csearch_path%3D{schema}");
        let client = Client::open(&url).await.expect("a store on PostgreSQL");
        Some(Self { client, url, _folder: None })
    }

    /// A second process would see the store like this.
    pub async fn another_client(&self) -> Client {
        Client::open(&self.url).await.expect("the same store")
    }

    /// As [`Bed::another_client`]; a store in memory cannot be shared, so there it is the same one.
    pub async fn another_client_or_same(&self) -> Client {
        if self.url == "memory:" { self.client.clone() } else { self.another_client().await }
    }

    pub async fn ended(&self, id: TaskId) -> Task {
        self.client.wait(id, PATIENCE).await.expect("the task ends")
    }

    /// Waits until the task is in a state.
    pub async fn reaches(&self, id: TaskId, wanted: longhaul::State) -> Task {
        let wait = async {
            let mut events = self.client.events(id, 0).await.expect("the task is there");
            loop {
                let task = self.client.task(id).await.expect("the task is there");
                if task.state == wanted {
                    return task;
                }
                events.next().await.expect("the store answers");
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the task gets there")
    }

    /// Waits until the task is suspended for something of a kind.
    pub async fn waiting_for(&self, id: TaskId, kind: &str) -> Task {
        let wait = async {
            let mut events = self.client.events(id, 0).await.expect("the task is there");
            loop {
                let task = self.client.task(id).await.expect("the task is there");
                if task.waiting_for.as_ref().is_some_and(|waiting| waiting.kind == kind) {
                    return task;
                }
                assert!(!task.state.is_final(), "the task ended instead: {:?}", task.error);
                events.next().await.expect("the store answers");
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the task gets there")
    }

    /// Waits for an event of a kind.
    pub async fn event(&self, id: TaskId, kind: &str) -> Event {
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

    /// Waits until the task has told this many events of a kind.
    pub async fn after(&self, id: TaskId, times: usize, wanted: impl Fn(&Event) -> bool) {
        let wait = async {
            let mut events = self.client.events(id, 0).await.expect("the task is there");
            let mut seen = 0;
            while seen < times {
                let event = events.next().await.expect("the store answers").expect("it goes on");
                seen += usize::from(wanted(&event));
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("they come");
    }

    /// All events so far of a task that has ended.
    pub async fn events(&self, id: TaskId) -> Vec<Event> {
        let mut events = self.client.events(id, 0).await.expect("the task is there");
        let mut all = Vec::new();
        while let Some(event) = events.next().await.expect("the store answers") {
            all.push(event);
        }
        assert!(all.iter().map(|event| event.seq).eq(1..=all.len() as u64), "events are 1..n");
        all
    }

    pub async fn kinds(&self, id: TaskId) -> Vec<String> {
        self.events(id).await.into_iter().map(|event| event.kind).collect()
    }
}

/// Tries again at once, so that no test waits.
pub fn at_once(attempts: u32) -> RetryPolicy {
    RetryPolicy { attempts, first: Duration::from_millis(1), cap: Duration::from_millis(1), jitter: false }
}

/// Makes a test of each function over a [`Bed`] for each store.
#[macro_export]
macro_rules! on_every_store {
    ($($test:ident),+ $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::common::Bed::memory().await).await;
            })+
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::common::Bed::sqlite().await).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                if let Some(bed) = super::common::Bed::postgres().await {
                    super::$test(bed).await;
                }
            })+
        }
    };
}
