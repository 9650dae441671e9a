//! The bytes of artifacts over HTTP.

mod common;

use axum::body::Bytes;
use common::{Answer, Server, Store};
use longhaul::state::{ArtifactRef, StatePatch};
use longhaul::{NewToken, Role, Run, TaskError, Worker};
use longhaul_agent::Artifacts;
use longhaul_server::ServerSettings;
use reqwest::Method;
use serde_json::{Value, json};

on_every_store!(
    an_artifact_is_given_whole_or_by_a_range,
    what_is_no_text_is_for_saving_only,
    only_what_stands_in_the_tasks_state_is_given,
    an_artifact_of_another_tenant_is_not_there,
    an_artifact_is_read_on_the_dashboard_a_page_at_a_time,
);

async fn serving(store: &Store, guarded: bool) -> (Server, Artifacts) {
    let artifacts = Artifacts::open("memory:").expect("open");
    let settings = ServerSettings { artifacts: Some(artifacts.clone()), ..ServerSettings::default() };
    let client = store.open().await;
    let server =
        if guarded { Server::guarded(client, settings).await } else { Server::start(client, settings).await };
    (server, artifacts)
}

/// Runs a task that has stored `bytes`; gives its id and the artifact's.
async fn stored(server: &Server, artifacts: &Artifacts, bytes: impl Into<Bytes>) -> (String, String) {
    let (artifacts, bytes) = (artifacts.clone(), bytes.into());
    let handler = move |run: Run, _: Value| store(run, artifacts.clone(), bytes.clone());
    let worker = Worker::new(&server.client).handler("store", handler).start().await.expect("a worker");
    let id = server.submit(json!({"handler": "store"})).await;
    let artifact = server.ended(&id).await["result"].as_str().expect("an id").to_owned();
    worker.stop().await;
    (id, artifact)
}

async fn store(run: Run, artifacts: Artifacts, bytes: Bytes) -> Result<String, TaskError> {
    let stored = artifacts.put(run.tenant(), bytes).await.map_err(|error| error.task_error())?;
    let kept = ArtifactRef {
        artifact_id: stored.artifact_id.clone(),
        kind: "tool_result.text".to_owned(),
        summary: stored.summary,
        bytes: stored.bytes,
        step: String::new(),
    };
    run.patch(StatePatch { add_artifacts: vec![kept], ..StatePatch::default() }).await?;
    Ok(stored.artifact_id)
}

async fn an_artifact_is_given_whole_or_by_a_range(store: Store) {
    let (server, artifacts) = serving(&store, false).await;
    let text: String = (1..=100_000).map(|n| format!("line {n}\n")).collect();
    let (task, id) = stored(&server, &artifacts, text.clone()).await;
    let path = format!("/v1/tasks/{task}/artifacts/{id}");
    let get =
        |name: &'static str, value: String| Answer::of(server.request(Method::GET, &path).header(name, value));

    let whole = get("accept-encoding", "gzip".to_owned()).await;
    assert_eq!((whole.status.as_u16(), whole.body.as_str()), (200, Some(text.as_str())));
    assert_eq!(whole.header("content-length"), text.len().to_string());
    assert_eq!(whole.header("content-type"), "text/plain; charset=utf-8");
    assert_eq!(whole.header("x-content-type-options"), "nosniff");
    assert_eq!(whole.header("accept-ranges"), "bytes");
    assert_eq!((whole.header("etag"), whole.header("content-encoding")), (format!("\"{id}\"").as_str(), ""));

    let size = text.len();
    for (range, from, to) in
        [("0-4".to_owned(), 0, 5), (format!("{}-", size - 9), size - 9, size), ("-3".to_owned(), size - 3, size)]
    {
        let part = get("range", format!("bytes={range}")).await;
        assert_eq!((part.status.as_u16(), part.body.as_str()), (206, Some(&text[from..to])), "{range}");
        assert_eq!(part.header("content-range"), format!("bytes {from}-{}/{size}", to - 1));
        assert_eq!(part.header("content-length"), (to - from).to_string());
    }
    let beyond = get("range", format!("bytes={size}-")).await;
    beyond.is_problem(416, "range_not_satisfiable");
    assert_eq!(beyond.header("content-range"), format!("bytes */{size}"));
    for everything in ["bytes=0-1,4-5", "lines=1-2", "bytes=9-1"] {
        assert_eq!(get("range", everything.to_owned()).await.status, 200, "{everything}");
    }
    assert_eq!(get("if-none-match", format!("\"{id}\"")).await.status, 304);
    let stale = server.request(Method::GET, &path).header("range", "bytes=0-4").header("if-range", "\"other\"");
    assert_eq!(Answer::of(stale).await.status, 200);
    let head = Answer::of(server.request(Method::HEAD, &path)).await;
    assert_eq!((head.status.as_u16(), head.header("content-length")), (200, size.to_string().as_str()));
}

async fn what_is_no_text_is_for_saving_only(store: Store) {
    let (server, artifacts) = serving(&store, false).await;
    let (task, id) = stored(&server, &artifacts, &b"\0\x01<script>alert(1)</script>"[..]).await;
    let answer = server.get(&format!("/v1/tasks/{task}/artifacts/{id}")).await;
    assert_eq!(answer.header("content-type"), "application/octet-stream");
    assert_eq!(answer.header("content-disposition"), format!("attachment; filename=\"{id}\""));
    assert_eq!(answer.header("x-content-type-options"), "nosniff");
}

async fn only_what_stands_in_the_tasks_state_is_given(store: Store) {
    let (server, artifacts) = serving(&store, false).await;
    let (task, _) = stored(&server, &artifacts, "mine").await;
    let other = artifacts.put("default", Bytes::from_static(b"of another task")).await.expect("stored");
    for id in [other.artifact_id.as_str(), "..%2F..%2Fetc%2Fpasswd", "a1", "sha256-"] {
        server.get(&format!("/v1/tasks/{task}/artifacts/{id}")).await.is_problem(404, "not_found");
    }
    // What a person wrote into the state need not be here.
    let patch = json!({"add_artifacts": [{"artifact_id": "log_123", "type": "log", "summary": "", "bytes": 1}]});
    let _worker = server.worker().await;
    let open = server.submit(json!({"handler": "state", "input": "goal"})).await;
    server.until(&format!("/v1/tasks/{open}/state"), |body| body["state"].is_object()).await;
    let patched = server.request(Method::PATCH, &format!("/v1/tasks/{open}/state")).json(&patch);
    assert_eq!(Answer::of(patched).await.status, 200);
    server.get(&format!("/v1/tasks/{open}/artifacts/log_123")).await.is_problem(404, "not_found");
}

async fn an_artifact_of_another_tenant_is_not_there(store: Store) {
    let (mut server, artifacts) = serving(&store, true).await;
    let token = async |tenant: &str| {
        let new = NewToken {
            name: tenant.to_owned(),
            tenant: tenant.to_owned(),
            role: Role::Admin,
            expires_after: None,
        };
        server.client.create_token(new).await.expect("a token").1
    };
    let (ours, theirs) = (token("a").await, token("b").await);
    server.token = Some(ours);
    let (task, id) = stored(&server, &artifacts, "ours alone").await;
    let path = format!("/v1/tasks/{task}/artifacts/{id}");
    assert_eq!(server.get(&path).await.body, "ours alone");
    server.token = Some(theirs);
    server.get(&path).await.is_problem(404, "not_found");
    // The same bytes of theirs are theirs.
    artifacts.put("b", Bytes::from_static(b"ours alone")).await.expect("stored");
    server.get(&path).await.is_problem(404, "not_found");
}

async fn an_artifact_is_read_on_the_dashboard_a_page_at_a_time(store: Store) {
    let (server, artifacts) = serving(&store, false).await;
    let text: String = (1..=20_000).map(|n| format!("<b>line {n}</b>\n")).collect();
    let (task, id) = stored(&server, &artifacts, text.clone()).await;
    let page = async |path: String| {
        let answer = Answer::of(server.request(Method::GET, &path).header("accept", "text/html")).await;
        assert_eq!(answer.status, 200, "{path}");
        answer.body.as_str().expect("a page").to_owned()
    };
    assert!(page(format!("/tasks/{task}")).await.contains(&format!("/tasks/{task}/artifacts/{id}")));
    let (mut path, mut lines) = (format!("/tasks/{task}/artifacts/{id}"), 0);
    loop {
        let shown = page(path.clone()).await;
        assert!(!shown.contains("<b>line"), "what a tool put out is text");
        lines += shown.matches("/b&#62;\n").count();
        let Some((before, _)) = shown.split_once("\" data-sheet>More") else { break };
        path = before.rsplit_once("href=\"").expect("a link").1.to_owned();
    }
    assert!((19_990..=20_000).contains(&lines), "{lines} lines: only those at the edge of a page may be cut");
    let raw = server.get(&format!("/tasks/{task}/artifacts/{id}/raw")).await;
    assert_eq!((raw.body.as_str(), raw.header("x-content-type-options")), (Some(text.as_str()), "nosniff"));
}
