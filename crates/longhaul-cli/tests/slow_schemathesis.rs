//! The OpenAPI document is true: schemathesis reads it, asks the real server for everything in it with data that fits
//! and data that does not, and every answer is one that the document has: no 5xx, no other status, content type or shape.

mod node;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use node::{Node, Store, python, repository};
use serde_json::json;

/// Things of every kind, so that requests find something: `(parameter, values)`.
type Known = Vec<(&'static str, Vec<String>)>;

/// Fills the store with tasks in every state and whatever else has a name.
async fn furnish(node: &Node) -> Known {
    let publish = |page: &str| json!({"handler": "publish", "input": {"page": page}});
    let waiting = node.submit(publish("waiting")).await;
    let approval = node.approval(&waiting).await;
    let done = node
        .submit(json!({"handler": "publish", "input": {"page": "done"}, "tags": {"team": "web"},
        "webhook": {"url": "http://127.0.0.1:9/nobody-listens", "events": ["*"]}}))
        .await;
    let other = node.approval(&done).await;
    node.post(&format!("/v1/tasks/{done}/approvals/{other}"), json!({"decision": "approve", "reason": "fine"}))
        .await;
    let denied = node.submit(publish("denied")).await;
    let third = node.approval(&denied).await;
    node.post(&format!("/v1/tasks/{denied}/approvals/{third}"), json!({"decision": "deny"})).await;
    let text = node.submit(json!({"handler": "publish", "user_input": "not what it needs"})).await;
    let cancelled =
        node.submit(json!({"handler": "publish", "input": {}, "run_at": "2099-01-01T00:00:00Z"})).await;
    node.post(&format!("/v1/tasks/{cancelled}/cancel"), json!({})).await;
    let later = node.submit(json!({"handler": "publish", "input": null, "run_at": "2099-01-01T00:00:00Z"})).await;
    for id in [&done, &denied, &text] {
        node.ended(id).await;
    }
    let path = format!("/v1/tasks/{done}/deliveries");
    let deliveries =
        node.until(&path, |answer, _| answer["deliveries"].as_array().is_some_and(|all| !all.is_empty())).await;
    let delivery = deliveries["deliveries"][0]["id"].as_str().expect("an id").to_owned();
    for name in ["nightly", "often"] {
        let when = if name == "often" { json!("12h") } else { json!(null) };
        let cron = if name == "nightly" { json!("0 3 * * *") } else { json!(null) };
        let task = json!({"handler": "publish", "input": {"page": name}});
        node.put(&format!("/v1/schedules/{name}"), json!({"cron": cron, "every": when, "task": task})).await;
    }
    node.put("/v1/webhooks/ops", json!({"url": "https://ops.invalid/hook", "events": ["task.failed"]})).await;
    let tasks = [&waiting, &done, &denied, &text, &cancelled, &later].map(Clone::clone).to_vec();
    vec![
        // The first: the tests look for others.
        ("path.id", tasks.clone()),
        ("query.task_id", tasks.clone()),
        ("query.parent", tasks),
        ("path.aid", vec![approval, other]),
        ("path.did", vec![delivery]),
        ("path.name", ["nightly", "often", "ops"].map(str::to_owned).to_vec()),
        ("path.step", ["render", "go_live"].map(str::to_owned).to_vec()),
        ("path.queue", vec!["default".to_owned()]),
        ("body.handler", vec!["publish".to_owned()]),
        ("body.task.handler", vec!["publish".to_owned()]),
        ("body.queue", ["default", "reports"].map(str::to_owned).to_vec()),
        ("body.timeout", vec!["5m".to_owned()]),
        ("body.dedupe_window", vec!["10s".to_owned()]),
        ("body.concurrency_key", vec!["pages".to_owned()]),
        ("body.webhook.url", vec!["https://ops.invalid/hook".to_owned()]),
        ("body.tasks[*].handler", vec!["publish".to_owned()]),
        ("body.from_step", ["render", "go_live"].map(str::to_owned).to_vec()),
        ("body.cron", vec!["0 3 * * *".to_owned()]),
        ("body.every", ["12h", "1d"].map(str::to_owned).to_vec()),
        ("body.url", vec!["https://ops.invalid/hook".to_owned()]),
        ("body.expires_after", vec!["90d".to_owned()]),
    ]
}

/// Most requests are about what is there; the rest is made up.
fn configuration(known: &Known) -> String {
    let mut text = String::from("[dictionaries]\n");
    for (number, (_, values)) in known.iter().enumerate() {
        writeln!(text, "d{number} = {{ values = {} }}", json!(values)).expect("written");
    }
    text.push_str("[parameters]\n");
    for (number, (name, _)) in known.iter().enumerate() {
        writeln!(text, "\"{name}\" = {{ dictionary = \"d{number}\", probability = 0.8 }}").expect("written");
    }
    text
}

async fn every_answer_is_documented(store: Store) {
    let Some(python) = python() else { return };
    // Tokens are made in between, and must not close the rest to who has none.
    let open = [("LONGHAUL_AUTH_REQUIRED", "false")];
    let node = Node::start_at(&store, &repository().join("examples/clients"), "127.0.0.1:0", &open).await;
    let known = furnish(&node).await;
    let folder = store.folder();
    std::fs::write(folder.join("schemathesis.toml"), configuration(&known)).expect("written");
    // What takes its time has no end to wait for: its refusals are asked for, with tasks that are not there.
    let takes_time = "/(events|ws|wait|progress)$";
    ask(&python, &node, folder, &["--exclude-path-regex", takes_time, "--max-examples", "25"]).await;
    std::fs::remove_file(folder.join("schemathesis.toml")).expect("removed");
    ask(
        &python,
        &node,
        folder,
        &["--include-path-regex", takes_time, "--exclude-path", "/v1/events", "--max-examples", "25"],
    )
    .await;
    node.get("/readyz").await;
    // What was made up must have come further than to its refusal.
    let tasks = node.get("/v1/tasks?limit=1000").await;
    let mut ids = tasks["tasks"].as_array().expect("a list").iter().filter_map(|task| task["id"].as_str());
    assert!(ids.any(|id| !known[0].1.iter().any(|known| known == id)), "no submit was accepted: {tasks}");
    let tokens = node.get("/v1/tokens").await;
    assert_ne!(tokens["tokens"], json!([]), "no token was made");
}

async fn ask(python: &Path, node: &Node, folder: &Path, more: &[&str]) {
    let mut command = Command::new(python);
    command.args([
        "-m",
        "schemathesis.cli",
        "run",
        &format!("{}/openapi.json", node.url),
        "--no-color",
        "--seed",
        "7",
    ]);
    command.args(["--phases", "coverage,fuzzing", "--generation-database", "none", "--request-timeout", "60"]);
    command.args(["--suppress-health-check", "all", "--checks"]);
    command.arg("not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance,unsupported_method");
    command.args(more).current_dir(folder).env("NO_PROXY", "127.0.0.1");
    let output = tokio::task::spawn_blocking(move || command.output()).await.expect("it does not panic");
    let output = output.expect("schemathesis starts");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_one_that_the_document_has_on_sqlite() {
    every_answer_is_documented(Store::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_one_that_the_document_has_on_postgres() {
    if let Some(store) = Store::postgres().await {
        every_answer_is_documented(store).await;
    }
}
