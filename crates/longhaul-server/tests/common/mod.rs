//! What the tests of the server share: a server on each kind of store with a worker beside it, and a client that
//! reads streams as a program would.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use longhaul::{Client, Risk, Run, TaskError, TaskId, Worker, WorkerHandle};
use longhaul_server::{App, ServerSettings, serve};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A store of its own, removed with this value.
pub struct Store {
    pub url: String,
    _folder: Option<tempfile::TempDir>,
}

impl Store {
    pub fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = format!("sqlite:{}", folder.path().join("test.db").display());
        Self { url, _folder: Some(folder) }
    }

    /// A schema of its own on the test server; `None`, with one line that says so, without one.
    pub async fn postgres() -> Option<Self> {
        let Ok(server) = std::env::var("LONGHAUL_TEST_POSTGRES") else {
            eprintln!("skipped: needs PostgreSQL; set LONGHAUL_TEST_POSTGRES or use ./dev test");
            return None;
        };
        let schema = format!("server_{}", TaskId::new().0.simple());
        let (admin, connection) =
            tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        admin.batch_execute(&format!("CREATE SCHEMA {schema}")).await.expect("a schema");
        let mark = if server.contains('?') { '&' } else { '?' };
        Some(Self { url: format!("{server}{mark}options=-csearch_path%3D{schema}"), _folder: None })
    }

    pub async fn open(&self) -> Client {
        Client::open(&self.url).await.expect("the store opens")
    }
}

/// A server that answers on a port of its own until it is stopped.
pub struct Server {
    pub client: Client,
    pub address: SocketAddr,
    pub app: App,
    /// Sent with every request.
    pub token: Option<String>,
    http: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<()>>,
}

impl Server {
    pub async fn start(client: Client, settings: ServerSettings) -> Self {
        Self::start_at(client, false, settings, "127.0.0.1:0").await
    }

    /// One that wants a token.
    pub async fn guarded(client: Client, settings: ServerSettings) -> Self {
        Self::start_at(client, true, settings, "127.0.0.1:0").await
    }

    pub async fn start_at(client: Client, guarded: bool, settings: ServerSettings, address: &str) -> Self {
        // Another may have installed it already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind(address).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let app = App::new(client.clone(), guarded, settings);
        let (stop, told) = oneshot::channel::<()>();
        let served = tokio::spawn(serve(listener, app.clone(), async move {
            let _ = told.await;
        }));
        let http = reqwest::Client::builder().timeout(PATIENCE).no_proxy().build().expect("a client");
        Self { client, address, app, token: None, http, stop: Some(stop), served: Some(served) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, self.url(path));
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        Answer::of(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        Answer::of(self.request(Method::POST, path).json(&body)).await
    }

    /// Submits a task that is accepted, and gives its id.
    pub async fn submit(&self, body: Value) -> String {
        let answer = self.post("/v1/tasks", body).await;
        assert_eq!(answer.status, 202, "{}", answer.body);
        answer.body["id"].as_str().expect("an id").to_owned()
    }

    /// Waits until the task has ended.
    pub async fn ended(&self, id: &str) -> Value {
        let answer = self.get(&format!("/v1/tasks/{id}/wait?timeout=60s")).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.body
    }

    /// Waits until something holds of the answer to a GET.
    pub async fn until(&self, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let asked = std::time::Instant::now();
        loop {
            let answer = self.get(path).await;
            if holds(&answer.body) {
                return answer.body;
            }
            assert!(asked.elapsed() < PATIENCE, "it does not come to hold: {}", answer.body);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A worker with the handlers of these tests.
    pub async fn worker(&self) -> WorkerHandle {
        worker(&self.client).await
    }

    pub async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(served) = self.served.take() {
            served.await.expect("it ends well");
        }
    }
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: reqwest::header::HeaderMap,
    pub body: Value,
}

impl Answer {
    pub async fn of(request: RequestBuilder) -> Self {
        let response = request.send().await.expect("an answer");
        let (status, headers) = (response.status(), response.headers().clone());
        let text = response.text().await.expect("a body");
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Self { status, headers, body }
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// A problem with this status and code, well-formed.
    #[track_caller]
    pub fn is_problem(&self, status: u16, code: &str) {
        assert_eq!((self.status.as_u16(), self.body["code"].as_str()), (status, Some(code)), "{}", self.body);
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert_eq!(self.body["status"], status);
        assert!(
            self.body["detail"].is_string() && self.body["title"].is_string() && self.body["type"].is_string()
        );
    }
}

/// A frame of an event stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    pub id: String,
    pub data: Value,
}

/// A stream as it comes, cut into frames.
pub struct Frames {
    bytes: std::pin::Pin<Box<dyn futures_util::Stream<Item = reqwest::Result<axum::body::Bytes>> + Send>>,
    read: Vec<u8>,
}

impl Frames {
    pub async fn open(request: RequestBuilder) -> Self {
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status(), 200, "{:?}", response.text().await);
        Self::of(response)
    }

    pub fn of(response: reqwest::Response) -> Self {
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { bytes: Box::pin(response.bytes_stream()), read: Vec::new() }
    }

    /// The next frame that carries data; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(end) = self.read.windows(2).position(|two| two == b"\n\n") {
                let frame: Vec<u8> = self.read.drain(..end + 2).collect();
                if let Some(frame) = Self::frame(std::str::from_utf8(&frame).expect("UTF-8")) {
                    return Some(frame);
                }
                continue;
            }
            let more = tokio::time::timeout(PATIENCE, self.bytes.next()).await.expect("something comes");
            match more {
                Some(Ok(bytes)) => self.read.extend_from_slice(&bytes),
                Some(Err(_)) | None => return None,
            }
        }
    }

    fn frame(text: &str) -> Option<Frame> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
        assert!(field("event:").is_none(), "frames have no event field");
        let data = serde_json::from_str(field("data:")?).expect("JSON");
        Some(Frame { id: field("id:").unwrap_or_default().to_owned(), data })
    }

    /// All frames to the end of the stream.
    pub async fn all(mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next().await {
            frames.push(frame);
        }
        frames
    }
}

/// A worker with the handlers of these tests.
pub async fn worker(client: &Client) -> WorkerHandle {
    Worker::new(client)
        .handler("echo", async |_run: Run, input: Value| Ok::<_, TaskError>(input))
        .handler("steps", steps)
        .handler("ask", ask)
        .handler("approve", approve)
        .handler("signal", signal)
        .handler("fail", async |_run: Run, _: Value| Err::<(), _>(TaskError::fatal("broken", "it broke")))
        .handler("state", state)
        .handler("write", write)
        .start()
        .await
        .expect("a worker")
}

/// As many steps as its input says, with progress.
async fn steps(run: Run, count: u32) -> Result<u32, TaskError> {
    for number in 1..=count {
        run.progress("thinking", number, count, &format!("step {number} of {count}"));
        run.step(format!("step {number}"), async || Ok::<_, TaskError>(number)).await?;
    }
    Ok(count)
}

async fn ask(run: Run, question: String) -> Result<String, TaskError> {
    run.ask(&question).await
}

async fn approve(run: Run, what: String) -> Result<String, TaskError> {
    run.approve(&what, Risk::ExternalAction).await?;
    Ok("approved".to_owned())
}

/// Waits for the signal that its input names.
async fn signal(run: Run, name: String) -> Result<Value, TaskError> {
    run.signal(&name).await
}

/// Has an agent's state and waits to be told to end.
async fn state(run: Run, goal: String) -> Result<Value, TaskError> {
    run.patch(serde_json::from_value(json!({"set_goal": goal})).expect("a patch")).await?;
    run.signal("end").await
}

/// Told to go, writes as a model does, twice; then waits to be told to end.
async fn write(run: Run, _: Value) -> Result<Value, TaskError> {
    let _: Value = run.signal("go").await?;
    run.step_with("think", |context| {
        let run = run.clone();
        async move {
            for (attempt, after, text) in [(1, 0, "Good "), (2, 0, "Hello "), (2, 6, "world")] {
                run.live(&context, attempt, after, text);
            }
            Ok::<_, TaskError>("Hello world".to_owned())
        }
    })
    .await?;
    run.signal("end").await
}

/// Runs a test on a server over each kind of store.
pub async fn with_server<F: Future<Output = ()>>(
    store: Store,
    settings: ServerSettings,
    test: impl FnOnce(Server) -> F,
) {
    let client = store.open().await;
    let server = Server::start(client, settings).await;
    test(server).await;
}

/// Makes a test of each function over a [`Store`] for each kind of it.
#[macro_export]
macro_rules! on_every_store {
    ($($test:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::common::Store::sqlite()).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                if let Some(store) = super::common::Store::postgres().await {
                    super::$test(store).await;
                }
            })+
        }
    };
}
