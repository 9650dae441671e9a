//! MCP servers as tools: servers that know only one revision of the protocol, on stdio and on HTTP.

mod common;
#[path = "common/mcp.rs"]
mod server;

use std::sync::{Arc, Mutex};

use common::{Folder, arguments, until};
use longhaul_agent::{Call, Tell};
use serde_json::json;
use server::{ERAS, Served, open, pids, python, run, stdio_of, tool};

/// An agent's folder with a server of this revision, on stdio or on HTTP.
async fn folder_of(python: &str, era: &str, http: bool) -> (Folder, Option<Served>) {
    let folder = Folder::new();
    if !http {
        stdio_of(&folder, python, era, "");
        return (folder, None);
    }
    let served = Served::start_of(python, era, 0).await;
    served.manifest(&folder, "");
    (folder, Some(served))
}

/// Every kind of server: what it knows, and whether it is on HTTP.
fn kinds() -> impl Iterator<Item = (&'static str, bool)> {
    ERAS.into_iter().flat_map(|era| [(era, false), (era, true)])
}

#[tokio::test]
async fn a_server_that_knows_only_one_revision_is_used_and_tools_that_come_later_are_there_without_a_restart() {
    let Some(python) = python() else { return };
    for (era, http) in kinds() {
        let (folder, _served) = folder_of(&python, era, http).await;
        let toolbox = open(&folder).await;
        assert!(toolbox.get("test__late").is_none(), "{era} {http}");
        run(&toolbox, "test__grow", json!({})).await.expect("grows");
        until("the new tool is listed", || toolbox.get("test__late").is_some()).await;
        let late = run(&toolbox, "test__late", json!({})).await.expect("called");
        assert_eq!(late, json!("better late than never"), "{era} {http}");
        assert!(pids(&folder).len() <= 1, "nothing was started twice: {era} {http}");
    }
}

#[tokio::test]
async fn a_dropped_call_is_cancelled_at_the_server() {
    let Some(python) = python() else { return };
    for (era, http) in kinds() {
        let (folder, _served) = folder_of(&python, era, http).await;
        let toolbox = open(&folder).await;
        let slow = tool(&toolbox, "test__slow");
        let call = arguments(json!({"folder": folder.path()}));
        tokio::select! {
            ended = slow.action.run(&call) => panic!("it ended: {ended:?}"),
            () = until("it started", || folder.file("started").exists()) => {}
        }
        until("it is cancelled", || folder.file("cancelled").exists()).await;
        let two = run(&toolbox, "test__add", json!({"a": 1, "b": 1})).await;
        assert_eq!(two.expect("goes on"), json!({"result": 2}), "{era} {http}");
    }
}

#[tokio::test]
async fn what_a_server_tells_of_a_call_under_way_is_passed_on_and_not_too_often() {
    let Some(python) = python() else { return };
    for (era, http) in kinds() {
        let (folder, _served) = folder_of(&python, era, http).await;
        let toolbox = open(&folder).await;
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&told);
        let tell = Tell::new(move |how_far| hears.lock().expect("no panic").push(how_far.to_string()));
        let call = arguments(json!({"count": 500, "folder": folder.path()}));
        let call = Call { progress: Some(tell), ..call };
        let copy = tool(&toolbox, "test__copy");
        let go = async {
            until("it is told", || !told.lock().expect("no panic").is_empty()).await;
            folder.write("go", "");
        };
        let (copied, ()) = tokio::join!(copy.action.run(&call), go);
        assert_eq!(copied.expect("copied"), json!("passed"));
        let told = told.lock().expect("no panic");
        assert!(told[0].contains(" of 500, copied file "), "{told:?}");
        assert!(told.len() < 50, "500 words in a moment are too many: {}", told.len());
    }
}

#[tokio::test]
async fn a_call_that_breaks_leaves_others_alone() {
    let Some(python) = python() else { return };
    for era in ERAS {
        let (folder, _served) = folder_of(&python, era, true).await;
        let toolbox = open(&folder).await;
        let gate = tool(&toolbox, "test__gate");
        let call = arguments(json!({"folder": folder.path()}));
        let meanwhile = async {
            until("it started", || folder.file("started").exists()).await;
            let broken = run(&toolbox, "test__broken", json!({})).await.expect_err("a status 500");
            assert!(broken.is_in_doubt(), "{broken}");
            run(&toolbox, "test__add", json!({"a": 1, "b": 1})).await.expect("goes on");
            folder.write("go", "");
        };
        let (passed, ()) = tokio::join!(gate.action.run(&call), meanwhile);
        assert_eq!(passed.expect("not disturbed"), json!("passed"), "{era}");
    }
}
