//! Agents whose tools are those of an MCP server: what becomes of a task when the server dies, hangs or takes
//! long.

mod agent;
mod common;
mod provider;
#[path = "common/mcp.rs"]
mod server;

use agent::{Reads, Stage, calls, model, says};
use common::{Folder, until};
use longhaul::{Decision, State, TaskId};
use longhaul_agent::Agent;
use longhaul_agent::manifest::agent::People;
use provider::Asked;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use server::{ERAS, pids, python, stdio, stdio_of};

/// An agent with the server's tools that asks nobody.
fn agent_of(folder: &Folder) -> Agent {
    let human_in_the_loop = People { required_for_risk_levels: Vec::new(), ..People::default() };
    Agent { human_in_the_loop, model: model("m-1"), ..folder.agent() }
}

/// Calls one tool, and ends with what it gave.
async fn calling(folder: &Folder, tool: &'static str, mut arguments: Value) -> Stage {
    arguments["folder"] = json!(folder.path());
    let script = move |turn: usize, asked: &Asked| match turn {
        0 => calls(&[(tool, arguments.clone())]),
        _ => says(&asked.result()),
    };
    Stage::new([agent_of(folder)], script).await
}

fn lines(folder: &Folder, file: &str) -> usize {
    std::fs::read_to_string(folder.file(file)).unwrap_or_default().lines().count()
}

async fn waiting_for(stage: &Stage, id: TaskId) -> String {
    stage.event(id, "task.waiting", 0).await.data["kind"].as_str().expect("a kind").to_owned()
}

#[tokio::test]
async fn how_far_a_long_call_is_becomes_progress_of_the_task() {
    let Some(python) = python() else { return };
    for era in ERAS {
        let folder = Folder::new();
        stdio_of(&folder, &python, era, "");
        let stage = calling(&folder, "test__copy", json!({"count": 300})).await;
        let id = stage.begin("Copy.").await;
        // The first says that it is called.
        let how_far = stage.event(id, "progress", 2).await.data;
        let message = how_far["message"].as_str().expect("a message");
        assert!(message.starts_with("test__copy: ") && message.contains(" of 300, copied file "), "{message}");
        assert_eq!((&how_far["tool"], &how_far["status"]), (&json!("test__copy"), &json!("tool_call")));
        assert_eq!((&how_far["step"], &how_far["total_step"]), (&json!(1), &json!(20)));
        folder.write("go", "");
        assert_eq!(stage.end(id).await.state, State::Completed);
        let told = stage.events(id).await.iter().filter(|event| event.kind == "progress").count();
        assert!(told < 30, "300 words in a moment are too many: {told}");
    }
}

#[tokio::test]
async fn a_call_that_may_not_happen_twice_waits_for_a_person_when_its_server_dies() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "risk = \"external_action\"");
    let stage = calling(&folder, "test__die", json!({})).await;
    let id = stage.begin("Do it.").await;
    assert_eq!(waiting_for(&stage, id).await, "in_doubt");
    assert_eq!(lines(&folder, "died"), 1, "never repeated silently");
    let done = Decision::Done(to_raw_value("it was done").expect("JSON"));
    stage.client.decide(id, "test__die", done, None).await.expect("decided");
    let task = stage.end(id).await;
    assert_eq!(task.result.expect("a result").get(), "\"it was done\"");
    assert_eq!(lines(&folder, "died"), 1);
}

#[tokio::test]
async fn a_call_that_only_reads_is_made_again_by_the_next_server() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "risk = \"read_only\"");
    let stage = calling(&folder, "test__die", json!({})).await;
    assert_eq!(stage.answer("Look.").await.1, "survived");
    assert_eq!((lines(&folder, "died"), pids(&folder).len()), (2, 2));
}

#[tokio::test]
async fn a_call_that_takes_too_long_is_cancelled_at_the_server_and_told_to_the_model() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "risk = \"read_only\"\ntimeout = \"300ms\"\nattempts = 1");
    let stage = calling(&folder, "test__slow", json!({})).await;
    let (_, answer) = stage.answer("Look.").await;
    assert!(answer.contains("no result after 300ms"), "{answer}");
    until("it is cancelled", || folder.file("cancelled").exists()).await;
}

#[tokio::test]
async fn a_cancel_of_the_task_reaches_the_server() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    stdio(&folder, &python, "risk = \"read_only\"");
    let stage = calling(&folder, "test__slow", json!({})).await;
    let id = stage.begin("Look.").await;
    until("it started", || folder.file("started").exists()).await;
    stage.client.cancel(id, None).await.expect("cancelled");
    assert_eq!(stage.end(id).await.state, State::Cancelled);
    until("it is cancelled", || folder.file("cancelled").exists()).await;
}
