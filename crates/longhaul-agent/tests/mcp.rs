//! MCP servers as tools: against a real server of the official Python SDK, on stdio and on HTTP.

mod common;
#[path = "common/mcp.rs"]
mod server;

use common::{Folder, TRACEPARENT, alive, arguments, until};
use longhaul::{Effect, Risk};
use longhaul_agent::{Artifacts, Output, Toolbox};
use serde_json::json;
use server::{Served, open, pids, python, run, stdio, stdio_of, tool};

#[tokio::test]
async fn the_tools_of_a_server_become_tools_with_the_rules_of_the_manifest() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    let own =
        "[mcp.tools.add]\nrisk = \"read_only\"\n[mcp.tools.say]\neffect = \"compensable\"\nundo = \"test__fail\"";
    stdio(&folder, &python, &format!("risk = \"write_local\"\ntimeout = \"5s\"\nattempts = 2\n{own}"));
    let toolbox = open(&folder).await;
    let names: Vec<String> = toolbox.tools().iter().map(|tool| tool.name.clone()).collect();
    assert!(names.contains(&"test__add".to_owned()), "{names:?}");
    assert!(!names.contains(&"test__fail".to_owned()), "an undo is not for the model: {names:?}");
    let add = tool(&toolbox, "test__add");
    assert_eq!((add.risk, add.effect, add.attempts), (Risk::ReadOnly, Effect::Read, 2));
    assert_eq!(add.description, "Adds two numbers.");
    assert!(add.arguments(r#"{"a": "one"}"#).expect_err("does not fit").contains("/a"));
    let say = tool(&toolbox, "test__say");
    assert_eq!(
        (say.risk, say.effect, say.undo.as_deref()),
        (Risk::WriteLocal, Effect::Compensable, Some("test__fail"))
    );
    assert_eq!(tool(&toolbox, "test__long").effect, Effect::Irreversible);
}

#[tokio::test]
async fn a_call_gives_what_the_tool_gives() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "");
    let toolbox = open(&folder).await;
    assert_eq!(run(&toolbox, "test__add", json!({"a": 2, "b": 3})).await.expect("adds"), json!({"result": 5}));
    assert_eq!(run(&toolbox, "test__say", json!({"text": "hé"})).await.expect("says"), json!("hé"));
    let error = run(&toolbox, "test__fail", json!({"why": "no such zone"})).await.expect_err("fails");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("tool_failed", true, false));
    assert!(error.message.contains("no such zone"), "{}", error.message);
}

#[tokio::test]
async fn a_server_has_a_clean_environment_and_is_told_who_calls() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "env = [\"CARGO_PKG_NAME\"]");
    let toolbox = open(&folder).await;
    let called = run(&toolbox, "test__called", json!({})).await.expect("tells");
    let (meta, env) = (&called["meta"], called["env"].as_array().expect("a list"));
    let id = "0198f000-0000-7000-8000-000000000001";
    assert_eq!((&meta["LONGHAUL_TASK_ID"], &meta["LONGHAUL_STEP"]), (&json!(id), &json!("one")), "{meta}");
    assert_eq!(meta["LONGHAUL_IDEMPOTENCY_KEY"], format!("{id}/one"));
    assert_eq!((&meta["LONGHAUL_FENCE"], &meta["traceparent"]), (&json!(7), &json!(TRACEPARENT)));
    assert!(env.contains(&json!("CARGO_PKG_NAME")) && !env.contains(&json!("CARGO_PKG_VERSION")), "{env:?}");
    assert_eq!(called["folder"], json!(folder.path().canonicalize().expect("there")));
}

#[tokio::test]
async fn long_results_and_pictures_are_stored() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "");
    let toolbox = open(&folder).await;
    let artifacts = Artifacts::open("memory:").expect("in memory");
    let long = tool(&toolbox, "test__long").action.clone();
    let output = long.run_long(&arguments(json!({"lines": 10_000})), 4_096, &artifacts, "t").await.expect("given");
    let Output::Stored(stored) = output else { panic!("not stored") };
    assert_eq!(stored.lines, 10_000);
    let picture = tool(&toolbox, "test__picture").action.clone();
    let output = picture.run_long(&arguments(json!({})), 4_096, &artifacts, "t").await.expect("given");
    let Output::Value(value) = output else { panic!("the description is short") };
    let id = value["attachments"][0]["artifact_id"].as_str().expect("stored");
    assert_eq!(artifacts.info("t", id).await.expect("asked"), Some(8));
}

#[tokio::test]
async fn an_old_server_that_ends_when_asked_for_what_it_does_not_know_is_greeted_in_the_old_way() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio_of(&folder, &python, "ends", "");
    let toolbox = open(&folder).await;
    let two = json!({"a": 1, "b": 1});
    assert_eq!(run(&toolbox, "test__add", two.clone()).await.expect("adds"), json!({"result": 2}));
    run(&toolbox, "test__die", json!({})).await.expect_err("it died");
    assert_eq!(run(&toolbox, "test__add", two).await.expect("another one"), json!({"result": 2}));
    assert_eq!(pids(&folder).len(), 3, "what it does not know is asked for once");
}

#[tokio::test]
async fn a_server_that_hangs_is_replaced_once_a_call_was_given_up() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "");
    let toolbox = open(&folder).await;
    let freeze = tool(&toolbox, "test__freeze");
    let call = arguments(json!({"folder": folder.path()}));
    tokio::select! {
        ended = freeze.action.run(&call) => panic!("it ended: {ended:?}"),
        () = until("it hangs", || folder.file("frozen").exists()) => {}
    }
    let two = run(&toolbox, "test__add", json!({"a": 1, "b": 1})).await;
    assert_eq!(two.expect("another one"), json!({"result": 2}));
    let pids = pids(&folder);
    assert_eq!(pids.len(), 2);
    until("the first ends", || !alive(&pids[0])).await;
}

#[tokio::test]
async fn a_server_that_dies_leaves_the_call_in_doubt_and_is_started_again_by_the_next() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "");
    let toolbox = open(&folder).await;
    let error = run(&toolbox, "test__die", json!({})).await.expect_err("it died");
    assert_eq!((error.code.as_str(), error.is_in_doubt()), ("no_answer", true), "{error}");
    assert_eq!(
        run(&toolbox, "test__add", json!({"a": 1, "b": 1})).await.expect("another one"),
        json!({"result": 2})
    );
    assert_eq!(pids(&folder).len(), 2, "started again");
}

#[tokio::test]
async fn a_server_ends_with_its_tools() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "");
    let toolbox = open(&folder).await;
    let pid = pids(&folder).pop().expect("it started");
    assert!(alive(&pid));
    drop(toolbox);
    until("the server ends", || !alive(&pid)).await;
}

#[tokio::test]
async fn a_server_that_does_not_speak_is_told_with_its_last_words() {
    let folder = Folder::new();
    folder.script("server", "echo 'no licence' >&2; exit 1").write(
        "agent.toml",
        "[agent]\nname = \"a\"\nmodel = \"m\"\n[[mcp]]\nname = \"test\"\ncommand = [\"./server\"]\n",
    );
    let error = Toolbox::open(&folder.agent(), Vec::new()).await.expect_err("it ended");
    assert_eq!((error.code.as_str(), error.retryable), ("not_connected", true));
    assert!(error.message.starts_with("MCP server test cannot be used: "), "{}", error.message);
    folder.script("server", "exec sleep 60");
    let agent = std::fs::read_to_string(folder.file("agent.toml")).expect("there");
    folder.write("agent.toml", &format!("{agent}connect_timeout = \"100ms\"\n"));
    let error = Toolbox::open(&folder.agent(), Vec::new()).await.expect_err("it says nothing");
    assert!(error.message.contains("not ready within 100ms"), "{}", error.message);
}

#[tokio::test]
async fn an_undo_that_no_server_has_is_told() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "[mcp.tools.say]\neffect = \"compensable\"\nundo = \"test__unsay\"");
    let error = Toolbox::open(&folder.agent(), Vec::new()).await.expect_err("not there");
    assert_eq!(error.code, "unknown_tool");
    assert!(error.message.contains("'test__unsay'"), "{}", error.message);
}

#[tokio::test]
async fn a_server_on_http_is_called_with_its_headers() {
    let Some(python) = python() else { return };
    let served = Served::start(&python, 0).await;
    let folder = Folder::new();
    // Cargo sets this one for tests; it stands for a secret.
    served.manifest(&folder, "headers = { X-Token = \"{{env.CARGO_PKG_NAME}}\" }\nenv = [\"CARGO_PKG_NAME\"]");
    let toolbox = open(&folder).await;
    // Only what was sent is hidden when it comes back.
    assert_eq!(run(&toolbox, "test__token", json!({})).await.expect("told"), json!("[CARGO_PKG_NAME]"));
    assert_eq!(run(&toolbox, "test__add", json!({"a": 2, "b": 3})).await.expect("adds"), json!({"result": 5}));
    run(&toolbox, "test__grow", json!({})).await.expect("grows");
    until("the new tool is listed", || toolbox.get("test__late").is_some()).await;
}

#[tokio::test]
async fn a_server_on_http_that_is_gone_is_a_known_failure_until_it_is_back() {
    let Some(python) = python() else { return };
    let mut served = Served::start(&python, 0).await;
    let folder = Folder::new();
    served.manifest(&folder, "");
    let toolbox = open(&folder).await;
    served.child.kill().await.expect("SIGKILL");
    let error = run(&toolbox, "test__add", json!({"a": 1, "b": 1})).await.expect_err("nobody is there");
    assert_eq!(
        (error.code.as_str(), error.retryable, error.is_in_doubt()),
        ("not_connected", true, false),
        "{error}"
    );
    let _again = Served::start(&python, served.port).await;
    assert_eq!(run(&toolbox, "test__add", json!({"a": 1, "b": 1})).await.expect("back"), json!({"result": 2}));
}

#[tokio::test]
async fn a_server_on_http_that_dies_leaves_the_call_in_doubt() {
    let Some(python) = python() else { return };
    let served = Served::start(&python, 0).await;
    let folder = Folder::new();
    served.manifest(&folder, "");
    let toolbox = open(&folder).await;
    let error = run(&toolbox, "test__die", json!({})).await.expect_err("it died");
    assert!(error.is_in_doubt(), "{error}");
}
