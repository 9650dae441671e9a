//! A server with a store that has something of everything, for hostile requests to hit.
//!
//! Requests go to the real router. Nobody works on the tasks once the bed is made, so that what changes in the store changes by a request.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use longhaul::{
    AgentState, Client, NewTask, NewToken, QueueSettings, Risk, Role, Run, Schedule, Settings, State, TaskError,
    TaskId, Webhook, Worker,
};
use longhaul_agent::Artifacts;
use longhaul_hostile::MARK;
use longhaul_server::{App, ServerSettings, router};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use super::trial::Broke;
use super::witness::{Held, Witness};

/// How long a request may take that waits for something.
const WAITS: Duration = Duration::from_millis(4);
/// How long any other may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// The tasks of a bed that are looked at from all sides.
const LOOKED_AT: usize = 40;

/// Where the store is.
pub(super) enum Place<'u> {
    /// In a file in memory.
    Memory,
    /// On the server with this URL, in a schema of its own.
    Postgres(&'u str),
}

/// See the module.
pub(super) struct Bed {
    pub(super) client: Client,
    pub(super) app: App,
    pub(super) router: Router,
    pub(super) witness: Witness,
    /// What stands for what in an input: `{pending}` for the id of a task.
    names: BTreeMap<&'static str, String>,
    /// What the answers said is there.
    told: Held,
    /// Tasks that are gone by request.
    removed: usize,
    /// The version of the store when it was last looked at.
    version: String,
    /// The store's file, with its folder.
    pub(super) file: Option<std::path::PathBuf>,
    _folder: Option<tempfile::TempDir>,
}

/// What a request was answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// It goes on; only the beginning was read.
    pub(super) streams: bool,
}

impl Answer {
    pub(super) fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }

    fn kind(&self) -> &str {
        self.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default()
    }
}

async fn state(run: Run, goal: String) -> Result<Value, TaskError> {
    let patch = json!({"set_goal": goal, "add_facts": [{"key": "k", "value": 1}], "replace_plan": ["a", "b"]});
    run.patch(serde_json::from_value(patch).unwrap_or_default()).await?;
    run.progress("thinking", 1, 3, "begins");
    run.step("first", async || Ok::<_, TaskError>(json!({"n": 1}))).await?;
    run.signal("end").await
}

/// A worker with the handlers that the tasks of a bed have.
pub(super) fn worker(client: &Client) -> Worker {
    Worker::new(client)
        .handler("echo", async |run: Run, input: Value| {
            run.step("say", async || Ok::<_, TaskError>(input.clone())).await
        })
        .handler("fail", async |_: Run, _: Value| Err::<(), _>(TaskError::fatal("broken", "it broke")))
        .handler("ask", async |run: Run, question: String| run.ask(&question).await)
        .handler("approve", async |run: Run, what: String| {
            run.approve(&what, Risk::ExternalAction).await.map(drop)
        })
        .handler("state", state)
}

impl Bed {
    /// A new one; who asks it needs a token if it is `guarded`.
    pub(super) async fn make(place: &Place<'_>, guarded: bool) -> Result<Self, Broke> {
        let mut folder = None;
        let (url, file) = match place {
            Place::Memory => {
                let here = tempfile::tempdir_in(shared_memory())?;
                let file = here.path().join("hostile.db");
                folder = Some(here);
                (format!("sqlite:{}", file.display()), Some(file))
            }
            Place::Postgres(url) => (schema(url).await?, None),
        };
        let client = Client::open(&url).await?;
        let queue = QueueSettings { max_pending: 1_000_000, ..QueueSettings::default() };
        let queues = BTreeMap::from([("default".to_owned(), queue)]);
        client.configure(&Settings { queues, ..Settings::default() }).await?;
        let artifacts = Artifacts::open("memory:")?;
        let stored = artifacts.put("default", Bytes::from_static(b"one\ntwo\nthree\n")).await?;
        let mut names = fill(&client, &stored.artifact_id).await?;
        let settings = ServerSettings { artifacts: Some(artifacts), ..ServerSettings::default() };
        let app = App::new(client.clone(), guarded, settings);
        let token = NewToken {
            name: "admin".to_owned(),
            tenant: "default".to_owned(),
            role: Role::Admin,
            expires_after: None,
        };
        names.insert("token", client.create_token(token).await?.1);
        let witness = match &file {
            Some(file) => Witness::of_file(file)?,
            None => Witness::of_server(&url).await?,
        };
        let mut bed = Self {
            client,
            router: router(app.clone()),
            app,
            witness,
            names,
            told: Held::default(),
            removed: 0,
            version: String::new(),
            file,
            _folder: folder,
        };
        bed.sign_in().await?;
        bed.told = bed.witness.held().await?;
        bed.version = bed.witness.version().await?;
        Ok(bed)
    }

    /// Gets a session of the dashboard and tokens of all kinds: what is made at their first use is there from now on.
    async fn sign_in(&mut self) -> Result<(), Broke> {
        let bearer = format!("Bearer {}", self.names["token"]);
        let request = |method: &str, path: &str| {
            Request::builder()
                .method(method)
                .uri(path)
                .header("host", "localhost")
                .header("authorization", &bearer)
        };
        let stream = format!("/v1/tasks/{}/stream-token", self.names["state"]);
        let stream = self.send(request("POST", &stream).body(Body::empty())?).await?;
        let stream = stream.json().unwrap_or_default()["token"].as_str().unwrap_or_default().to_owned();
        self.names.insert("stream", stream);
        self.send(request("GET", "/v1/webhooks/secret").body(Body::empty())?).await?;
        let form = format!("token={}&next=/", self.names["token"]);
        let signed = request("POST", "/sign-in").header("content-type", "application/x-www-form-urlencoded");
        let signed = self.send(signed.body(Body::from(form))?).await?;
        let cookie =
            signed.headers.get(header::SET_COOKIE).and_then(|cookie| cookie.to_str().ok()).unwrap_or_default();
        let cookie = cookie.split(';').next().unwrap_or_default().to_owned();
        let page = Request::get("/fleet")
            .header("host", "localhost")
            .header("cookie", &cookie)
            .header("accept", "text/html");
        let page = self.send(page.body(Body::empty())?).await?;
        let page = String::from_utf8_lossy(&page.body).into_owned();
        let csrf = page.split("name=\"csrf\" value=\"").nth(1).and_then(|rest| rest.split('"').next());
        self.names.insert("csrf", csrf.ok_or("the page has no form")?.to_owned());
        self.names.insert("cookie", cookie);
        Ok(())
    }

    /// What an input says, with the names of this bed filled in.
    pub(super) fn filled(&self, input: &[u8]) -> Vec<u8> {
        let mut filled = Vec::with_capacity(input.len() + 64);
        let mut rest = input;
        while let Some(open) = rest.iter().position(|byte| *byte == b'{') {
            filled.extend_from_slice(&rest[..open]);
            rest = &rest[open..];
            let named = rest.iter().take(16).position(|byte| *byte == b'}').and_then(|close| {
                let name = std::str::from_utf8(&rest[1..close]).ok()?;
                Some((self.names.get(name)?, close + 1))
            });
            let (bytes, skip) = named.map_or((&rest[..1], 1), |(name, skip)| (name.as_bytes(), skip));
            filled.extend_from_slice(bytes);
            rest = &rest[skip..];
        }
        filled.extend_from_slice(rest);
        filled
    }

    /// The name of something in this bed.
    pub(super) fn name(&self, name: &str) -> &str {
        self.names.get(name).map_or("", String::as_str)
    }

    /// Sends a request to the router and reads the answer, of one without an end the beginning.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Answer, Broke> {
        let path = request.uri().path();
        let waits = path.contains("/wait") || path.contains("/mcp");
        self.send_within(request, if waits { WAITS } else { PATIENCE }, WAITS).await
    }

    /// The same, for an answer that may not come before the time is over, or goes on after a pause.
    pub(super) async fn send_within(
        &self,
        request: Request<Body>,
        whole: Duration,
        pause: Duration,
    ) -> Result<Answer, Broke> {
        let answered = tokio::time::timeout(whole, async {
            // Routers have no errors of their own.
            let Ok(answer) = self.router.clone().oneshot(request).await;
            let (parts, mut body) = answer.into_parts();
            let kind = parts.headers.get(header::CONTENT_TYPE).map(|kind| kind.as_bytes()).unwrap_or_default();
            let streams = kind.starts_with(b"text/event-stream");
            let mut read = Vec::new();
            while !streams || !is_answered(&read) {
                let frame = match tokio::time::timeout(if streams { pause } else { PATIENCE }, body.frame()).await
                {
                    Ok(frame) => frame,
                    Err(_) if streams => break,
                    Err(_) => return Err(Broke(format!("the answer does not go on for {PATIENCE:?}"))),
                };
                match frame {
                    Some(Ok(frame)) => {
                        read.extend_from_slice(frame.data_ref().map(|data| &data[..]).unwrap_or_default())
                    }
                    Some(Err(error)) => return Err(Broke(format!("the answer broke off: {error}"))),
                    None => break,
                }
            }
            Ok(Answer { status: parts.status, headers: parts.headers, body: read.into(), streams })
        });
        match answered.await {
            Ok(answer) => answer,
            // It waits, as it was asked to.
            Err(_) if whole < PATIENCE => Ok(Answer {
                status: StatusCode::ACCEPTED,
                headers: HeaderMap::new(),
                body: Bytes::new(),
                streams: true,
            }),
            Err(_) => Err(Broke(format!("there is no answer after {PATIENCE:?}"))),
        }
    }

    /// What holds of every answer.
    pub(super) fn check(&mut self, answer: &Answer) -> Result<(), Broke> {
        let shown = || String::from_utf8_lossy(&answer.body[..answer.body.len().min(600)]).into_owned();
        if answer.status.is_server_error() {
            return Err(Broke(format!("it was answered with {}: {}", answer.status, shown())));
        }
        if answer.headers.contains_key(header::CONTENT_ENCODING) || answer.streams {
            return Ok(());
        }
        let kind = answer.kind();
        if kind.starts_with("text/html") && answer.body.windows(5).any(|text| text == &MARK.as_bytes()[..5]) {
            return Err(Broke("a page has text of a request as markup".to_owned()));
        }
        if !kind.contains("json") || answer.body.is_empty() {
            return Ok(());
        }
        let Some(said) = answer.json() else { return Err(Broke(format!("an answer is no JSON: {}", shown()))) };
        if kind.starts_with("application/problem+json") && said["status"] != answer.status.as_u16() {
            return Err(Broke(format!("a problem has another status than its answer: {said}")));
        }
        if answer.status.is_success() {
            self.hear(&said);
        }
        Ok(())
    }

    /// Takes note of what an answer says is there now.
    pub(super) fn hear(&mut self, said: &Value) {
        let has = |names: &[&str]| names.iter().all(|name| said.get(name).is_some());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if has(&["id", "handler", "state"]) {
            self.told.tasks.insert(text(&said["id"]));
        }
        if has(&["name", "missed", "next_at"]) {
            self.told.schedules.insert(text(&said["name"]));
        }
        if has(&["name", "url", "events"]) {
            self.told.endpoints.insert(text(&said["name"]));
        }
        if has(&["token", "secret"]) {
            self.told.tokens.insert(text(&said["token"]["id"]));
        }
        for one in said["results"].as_array().into_iter().flatten() {
            self.hear(&one["task"]);
        }
    }

    /// A form made this task.
    pub(super) fn made(&mut self, answer: &Answer) {
        let said = answer.json().unwrap_or_default();
        let header = answer.headers.get(header::LOCATION).and_then(|path| path.to_str().ok());
        if let Some(id) = said["location"].as_str().or(header).and_then(|path| path.strip_prefix("/tasks/")) {
            self.told.tasks.insert(id.to_owned());
        }
    }

    /// A task was removed by request.
    pub(super) fn removed(&mut self) {
        self.removed += 1;
    }

    /// Whether something was written since this was last asked.
    pub(super) async fn has_changed(&mut self) -> Result<bool, Broke> {
        let version = self.witness.version().await?;
        Ok(std::mem::replace(&mut self.version, version.clone()) != version)
    }

    /// What the store has must be what answers said: nothing else, and nothing less. And all of it can be shown.
    pub(super) async fn audit(&mut self) -> Result<(), Broke> {
        let held = self.witness.held().await?;
        for (what, held, told) in [
            ("task", &held.tasks, &self.told.tasks),
            ("schedule", &held.schedules, &self.told.schedules),
            ("endpoint", &held.endpoints, &self.told.endpoints),
            ("token", &held.tokens, &self.told.tokens),
        ] {
            if let Some(more) = held.difference(told).next() {
                return Err(Broke(format!(
                    "the {what} '{more}' is stored, and nobody was told that it was accepted"
                )));
            }
        }
        let (stored, told, removed) = (held.tasks.len(), self.told.tasks.len(), self.removed);
        if stored + removed != told {
            return Err(Broke(format!(
                "{stored} tasks are stored and {removed} were removed; {told} were accepted"
            )));
        }
        let newest: Vec<String> = held.tasks.into_iter().rev().take(LOOKED_AT).collect();
        let mut paths: Vec<String> = [
            "/v1/tasks?limit=1000",
            "/v1/schedules",
            "/v1/webhooks",
            "/v1/tokens",
            "/v1/stats",
            "/v1/approvals",
            "/",
            "/fleet",
            "/inbox",
        ]
        .map(str::to_owned)
        .into();
        for id in newest {
            let of = [
                "",
                "/steps",
                "/why",
                "/export",
                "/approvals",
                "/questions",
                "/deliveries",
                "/checkpoints",
                "/artifacts",
            ];
            paths.extend(of.map(|part| format!("/v1/tasks/{id}{part}")));
            paths.push(format!("/tasks/{id}"));
        }
        for path in paths {
            let asks = Request::get(&path).header("host", "localhost").header("accept", "text/html");
            let asks = match path.starts_with("/v1") {
                true => asks.header("authorization", format!("Bearer {}", self.names["token"])),
                false => asks.header("cookie", &self.names["cookie"]),
            };
            let answer = self.send(asks.body(Body::empty())?).await?;
            self.check(&answer)
                .map_err(|Broke(why)| Broke(format!("{path}, which shows what was accepted: {why}")))?;
            if !answer.status.is_success() {
                return Err(Broke(format!("{path} is answered with {}", answer.status)));
            }
        }
        self.has_changed().await?;
        Ok(())
    }
}

/// Whether a stream has said what was asked for: a message of JSON-RPC that is an answer.
fn is_answered(read: &[u8]) -> bool {
    let has = |text: &[u8]| read.windows(text.len()).any(|window| window == text);
    read.ends_with(b"\n\n") && has(b"\"jsonrpc\"") && (has(b"\"result\":") || has(b"\"error\":"))
}

/// A folder whose files are in memory, if there is one.
pub(super) fn shared_memory() -> std::path::PathBuf {
    let memory = std::path::Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// The URL of a new schema on a server.
async fn schema(url: &str) -> Result<String, Broke> {
    let name = format!("hostile_{}", TaskId::new().0.simple());
    let (admin, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    admin.batch_execute(&format!("CREATE SCHEMA {name}")).await?;
    Ok(format!("{url}?options=-csearch_path%3D{name}"))
}

/// Something of everything, by name.
async fn fill(client: &Client, artifact: &str) -> Result<BTreeMap<&'static str, String>, Broke> {
    let worker = worker(client).start().await?;
    let mut names = BTreeMap::new();
    for (name, handler, input, until) in [
        ("done", "echo", json!({"a": [1, "two"]}), State::Completed),
        ("failed", "fail", json!(null), State::Failed),
        ("asks", "ask", json!("Which one?"), State::Waiting),
        ("approves", "approve", json!("Delete it?"), State::Waiting),
        ("state", "state", json!("reach it"), State::Waiting),
    ] {
        let id = client.submit(NewTask::new(handler, &input).tag("kind", name)).await?.id;
        names.insert(name, id.to_string());
        let begun = std::time::Instant::now();
        while client.task(id).await?.state != until {
            if begun.elapsed() > PATIENCE {
                return Err(Broke(format!("the task '{name}' does not come to be {until:?}")));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    worker.stop().await;
    let asks = client.open_asks().await?;
    let of = |name: &str| asks.iter().find(|ask| ask.task_id.to_string() == names[name]);
    let (question, approval) =
        (of("asks").ok_or("nothing is asked")?, of("approves").ok_or("nothing is to be approved")?);
    let (question, approval, digest) = (question.id.clone(), approval.id.clone(), approval.digest.clone());
    names.insert("question", question);
    names.insert("approval", approval);
    names.insert("digest", digest);
    let kept = json!({"add_artifacts": [{"artifact_id": artifact, "type": "text", "summary": "three lines", "bytes": 14}]});
    let id: TaskId = names["state"].parse()?;
    client.patch_state(id, serde_json::from_value(kept)?, None).await?;
    names.insert("artifact", artifact.to_owned());
    let pending = client.submit(NewTask::new("echo", &json!("waits")).key("known").tag("kind", "pending")).await?;
    names.insert("pending", pending.id.to_string());
    let gone = client.submit(NewTask::new("echo", &json!(1))).await?.id;
    client.cancel(gone, Some("not needed")).await?;
    names.insert("cancelled", gone.to_string());
    client.schedule(Schedule::cron("nightly", "0 3 * * *", NewTask::new("echo", &json!("night")))).await?;
    client.save_endpoint("hook", Webhook::new("https://example.com/hook")).await?;
    debug_assert!(client.state(id).await?.is_some_and(|(_, state)| state != AgentState::default()));
    Ok(names)
}
