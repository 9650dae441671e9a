//! Many watch one state while many change it: each hears of the last version, none of one that never was.

mod common;
mod mcp_wire;

use std::collections::BTreeSet;
use std::time::Instant;

use common::{Server, Store};
use longhaul_server::ServerSettings;
use mcp_wire::Wire;
use serde_json::json;

on_every_store!(two_hundred_who_watch_all_hear_of_the_last_of_a_thousand_patches);

const WATCHERS: usize = 200;
const PATCHES: u64 = 1_000;

/// Half of them on another server, half of them of the revision before, every tenth of them too slow.
async fn two_hundred_who_watch_all_hear_of_the_last_of_a_thousand_patches(store: Store) {
    let servers = [
        Server::start(store.open().await, ServerSettings::default()).await,
        Server::start(store.open().await, ServerSettings::default()).await,
    ];
    servers[0].client.announce(&["agent"]).await.expect("announced");
    let wire = Wire::modern(&servers[0]);
    let task =
        wire.tool("submit_task", json!({"handler": "agent"})).await["id"].as_str().expect("an id").to_owned();
    let goal = serde_json::from_value(json!({"set_goal": "g"})).expect("a patch");
    servers[0].client.patch_state(task.parse().expect("an id"), goal, None).await.expect("patched");
    let uri = format!("state://agents/agent/tasks/{task}");

    let mut watching = Vec::new();
    for number in 0..WATCHERS {
        let server = &servers[number % 2];
        let wire = if number % 4 < 2 { Wire::modern(server) } else { Wire::legacy(server, None).await };
        let stream = wire.watch(&[&uri]).await;
        watching.push((wire, stream));
    }
    let began = Instant::now();
    let last = PATCHES + 1;
    // Each change is made by the version that was read, by two at a time on two servers.
    let patching = async {
        let patch = async |server: &Server| {
            let wire = Wire::modern(server);
            let (mut made, mut version) = (BTreeSet::new(), 1);
            loop {
                let arguments =
                    json!({"task_id": task, "version": version, "patch": {"current_step": format!("{version}")}});
                let answer =
                    wire.result("tools/call", json!({"name": "patch_state", "arguments": arguments})).await;
                if answer["isError"] == true {
                    let problem: serde_json::Value =
                        serde_json::from_str(answer["content"][0]["text"].as_str().expect("text")).expect("JSON");
                    assert_eq!(problem["code"], "version_conflict", "{problem}");
                    version = problem["version"].as_u64().expect("a version");
                } else {
                    version = answer["structuredContent"]["version"].as_u64().expect("a version");
                    assert!(made.insert(version), "{version} was made twice");
                }
                if version >= last {
                    return made;
                }
            }
        };
        let (mut here, there) = tokio::join!(patch(&servers[0]), patch(&servers[1]));
        assert!(here.is_disjoint(&there), "nobody's change was overwritten");
        here.extend(there);
        here
    };
    let heard =
        futures_util::future::join_all(watching.iter_mut().enumerate().map(async |(number, (_, stream))| {
            if number % 10 == 9 {
                // Takes nothing for a while.
                tokio::time::sleep(std::time::Duration::from_secs(3)).await;
            }
            let mut told = Vec::new();
            while told.last().is_none_or(|version| *version < last) {
                told.extend(stream.change().await.1);
            }
            told
        }));
    let (mut made, heard) = tokio::join!(patching, heard);
    let seconds = began.elapsed().as_secs_f64();
    made.insert(1);
    let newest = *made.last().expect("some were made");
    assert!(
        newest >= last && made.len() as u64 == newest,
        "each version was made once: {} of {newest}",
        made.len()
    );
    let mut all = 0;
    for (number, told) in heard.iter().enumerate() {
        assert!(told.is_sorted_by(|a, b| a < b), "watcher {number}: {told:?}");
        let never: Vec<&u64> = told.iter().filter(|version| !made.contains(version)).collect();
        assert!(never.is_empty(), "watcher {number} was told of {never:?}, which never were");
        all += told.len();
    }
    // What they read then is the last.
    for (wire, _) in watching.iter().step_by(17) {
        assert_eq!(wire.read(&uri).await["version"], newest);
    }
    eprintln!(
        "{WATCHERS} watchers, {} patches: {seconds:.1} s, {all} notifications, {:.0} a watcher",
        made.len() - 1,
        all as f64 / WATCHERS as f64
    );
}
