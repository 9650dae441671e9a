//! The resources of the MCP server, states and artifacts, on both revisions, by what goes over the wire.

mod common;
mod mcp_wire;

use common::{Answer, PATIENCE, Server, Store};
use longhaul::Role;
use longhaul_agent::Artifacts;
use longhaul_server::ServerSettings;
use mcp_wire::{LEGACY, MODERN, Wire, fact, id, open, shared, token};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

/// A method or a tool, and what it is asked about a task of this id.
type AboutTask = (&'static str, fn(&str) -> Value);

on_every_store!(
    a_state_is_read_and_changed_by_its_version,
    every_change_is_told_to_who_watches_whatever_the_revision,
    a_task_that_has_ended_can_still_be_watched,
    another_tenants_resources_are_not_found,
    what_is_not_there_is_not_acknowledged_on_lines_either,
    resources_are_listed_page_by_page,
    artifacts_are_read_whole_or_in_pieces,
);

async fn a_state_is_read_and_changed_by_its_version(store: Store) {
    let server = open(&store).await;
    let _worker = server.worker().await;
    for wire in [Wire::modern(&server), Wire::legacy(&server, None).await] {
        let (task, uri) = shared(&wire).await;
        let state = wire.read(&uri).await;
        assert_eq!(state, wire.tool("get_state", json!({"task_id": task})).await);
        assert_eq!(
            state,
            json!({
                "uri": uri, "agent_id": "state", "task_id": task, "state": "waiting", "plan": [], "artifacts": [], "version": 1,
                "agent_state": state["agent_state"],
            })
        );
        assert_eq!(state["agent_state"]["goal"], "be shared");
        let patch = json!({"replace_plan": ["look", "act"], "add_risk_flags": ["hot"]});
        let patched = wire.tool("patch_state", json!({"task_id": task, "version": 1, "patch": patch})).await;
        assert_eq!((&patched["version"], &patched["state"]["plan"]), (&json!(2), &json!(["look", "act"])));
        let stale =
            wire.refused("patch_state", json!({"task_id": task, "version": 1, "patch": fact("lost")})).await;
        assert_eq!((&stale["code"], &stale["version"]), (&json!("version_conflict"), &json!(2)));
        assert_eq!(wire.read(&uri).await["agent_state"]["known_facts"], json!([]), "nothing was changed");
        let wrong = json!({"task_id": task, "version": 2, "patch": {"set_gaol": "x"}});
        assert_eq!(wire.refused("patch_state", wrong).await["code"], "invalid_field");
        let list = json!({"task_id": task, "version": 2, "patch": ["a goal, if fields had an order"]});
        assert_eq!(wire.refused("patch_state", list).await["code"], "invalid_field");
        let without = wire.refused("patch_state", json!({"task_id": task, "patch": {}})).await;
        assert!(without["detail"].as_str().expect("a sentence").contains("version"), "{without}");
        let other_agent = format!("state://agents/echo/tasks/{task}");
        let code = if wire.revision == MODERN { -32602 } else { -32002 };
        for nothing in [other_agent.as_str(), "state://agents/state/tasks/x", "file:///etc/passwd"] {
            let answer = wire.ask("resources/read", json!({"uri": nothing})).await;
            assert_eq!(answer["error"]["code"], code, "{answer}");
        }
    }
    // Two who read the same version: one of them is refused, whoever it is.
    let wire = Wire::modern(&server);
    let (task, uri) = shared(&wire).await;
    for round in 1..=10 {
        let both = ["a", "b"].map(|who| {
            let arguments = json!({"task_id": task, "version": round, "patch": fact(&format!("{who}{round}"))});
            wire.result("tools/call", json!({"name": "patch_state", "arguments": arguments}))
        });
        let answers = futures_util::future::join_all(both).await;
        let refused = answers.iter().filter(|answer| answer["isError"] == true).count();
        assert_eq!(refused, 1, "{answers:?}");
    }
    let state = wire.read(&uri).await;
    assert_eq!(
        (&state["version"], state["agent_state"]["known_facts"].as_array().map(Vec::len)),
        (&json!(11), Some(10))
    );
}

async fn every_change_is_told_to_who_watches_whatever_the_revision(store: Store) {
    let server = open(&store).await;
    // Another server on the same store, in a process of its own as far as the two can tell.
    let elsewhere = Server::start(store.open().await, ServerSettings::default()).await;
    let _worker = server.worker().await;
    let wire = Wire::modern(&server);
    let (task, uri) = shared(&wire).await;
    let legacy = Wire::legacy(&server, None).await;
    let far = Wire::modern(&elsewhere);
    let mut watching = [wire.watch(&[&uri]).await, legacy.watch(&[&uri]).await, far.watch(&[&uri]).await];
    // Who listens is told at once how things stand; who has subscribed, only what changes from then on.
    for number in [0, 2] {
        assert_eq!(watching[number].change().await, (uri.clone(), Some(1)));
    }
    for version in 1..=20 {
        let patcher = if version % 2 == 0 { &wire } else { &far };
        let arguments = json!({"task_id": task, "version": version, "patch": fact(&format!("f{version}"))});
        assert_eq!(patcher.tool("patch_state", arguments).await["version"], version + 1);
    }
    for (number, messages) in watching.iter_mut().enumerate() {
        let told = messages.until(21).await;
        assert_eq!(told, (2..=21).collect::<Vec<u64>>(), "watcher {number}");
    }
    // The task's own state is part of it.
    server.post(&format!("/v1/tasks/{task}/signals/end"), json!({})).await;
    for messages in &mut watching {
        assert_eq!(messages.change().await, (uri.clone(), None));
    }
    legacy.result("resources/unsubscribe", json!({"uri": uri})).await;
}

async fn a_task_that_has_ended_can_still_be_watched(store: Store) {
    let server = open(&store).await;
    let _worker = server.worker().await;
    let wire = Wire::modern(&server);
    let (task, uri) = shared(&wire).await;
    wire.tool("cancel_task", json!({"task_id": task})).await;
    wire.tool("wait_task", json!({"task_id": task})).await;
    let mut messages = wire.watch(&[&uri]).await;
    assert_eq!(messages.until(1).await, [1]);
    let late = wire.refused("patch_state", json!({"task_id": task, "version": 1, "patch": fact("late")})).await;
    assert_eq!(late["code"], "wrong_state", "its state is what it ended with: {late}");
    // Removed: one last word, and then it is not found.
    let removed = Answer::of(server.request(Method::DELETE, &format!("/v1/tasks/{task}"))).await;
    assert_eq!(removed.status, 204);
    assert_eq!(messages.change().await, (uri.clone(), None));
    assert!(wire.ask("resources/read", json!({"uri": uri})).await["error"].is_object());

    // Who listens to it and to another one hears of the other one.
    let (other, other_uri) = shared(&wire).await;
    let mut messages = wire.listen(&[&uri, &other_uri]).await;
    assert_eq!(messages.acknowledged().await, [other_uri.as_str()]);
    assert_eq!(messages.change().await, (other_uri.clone(), Some(1)));
    wire.tool("patch_state", json!({"task_id": other, "version": 1, "patch": fact("more")})).await;
    assert_eq!(messages.change().await, (other_uri, Some(2)));
}

async fn another_tenants_resources_are_not_found(store: Store) {
    let server = Server::guarded(store.open().await, ServerSettings::default()).await;
    let _worker = server.worker().await;
    let (ours, theirs) = (token(&server, "a", Role::Admin).await, token(&server, "b", Role::Admin).await);
    let own = Wire::modern(&server).with_token(&ours);
    let (task, uri) = shared(&own).await;
    let never = longhaul::TaskId::new().to_string();
    let uri_of = |task: &str| format!("state://agents/state/tasks/{task}");
    let able = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}, "elicitation": {"form": {}}});
    let modern = Wire::modern(&server).with_token(&theirs).able(able);
    for wire in [modern, Wire::legacy(&server, Some(&theirs)).await] {
        // What is said of theirs is to the letter what is said of one that never was.
        let strip = |answer: &Value, task: &str| {
            let mut answer = answer.clone();
            answer["id"] = Value::Null;
            answer.to_string().replace(task, "ID")
        };
        let code = if wire.revision == MODERN { -32602 } else { -32002 };
        let mut requests: Vec<AboutTask> = vec![
            ("resources/read", |task| json!({"uri": format!("state://agents/state/tasks/{task}")})),
            ("resources/read", |task| json!({"uri": format!("artifact://tasks/{task}/sha256-00")})),
        ];
        if wire.revision == LEGACY {
            requests.push((
                "resources/subscribe",
                |task| json!({"uri": format!("state://agents/state/tasks/{task}")}),
            ));
        } else {
            for method in ["tasks/get", "tasks/cancel"] {
                requests.push((method, |task| json!({"taskId": format!("wait-{task}")})));
            }
            requests.push((
                "tasks/update",
                |task| json!({"taskId": format!("wait-{task}"), "inputResponses": {"x": {"action": "accept"}}}),
            ));
        }
        for (method, params) in requests {
            let foreign = wire.ask(method, params(&task)).await;
            assert_eq!(
                (&foreign["error"]["code"], &foreign["error"]["data"]["code"]),
                (&json!(code), &json!("not_found")),
                "{method}: {foreign}"
            );
            assert_eq!(strip(&foreign, &task), strip(&wire.ask(method, params(&never)).await, &never), "{method}");
        }
        let read = strip(&wire.ask("resources/read", json!({"uri": uri})).await, &task);
        if wire.revision == LEGACY {
            assert_eq!(strip(&wire.ask("resources/subscribe", json!({"uri": uri})).await, &task), read);
        } else {
            // Refused before anything is acknowledged, as a read is.
            for (task, uris) in [
                (&task, vec![uri.clone()]),
                (&never, vec![uri_of(&never)]),
                (&task, vec![uri.clone(), uri_of(&never), uri.clone(), "file:///etc/passwd".to_owned()]),
            ] {
                let uris: Vec<&str> = uris.iter().map(String::as_str).collect();
                let mut messages = wire.listen(&uris).await;
                let first = messages.next().await.expect("an answer");
                assert_eq!(strip(&first, task), read, "{uris:?}");
                assert_eq!(messages.next().await, None, "that is all");
            }
            // Beside one of their own, theirs is acknowledged and nothing else.
            let (_, mine) = shared(&wire).await;
            let asked = [uri.as_str(), &mine, &uri_of(&never), &mine, "file:///etc/passwd"];
            let mut messages = wire.listen(&asked).await;
            assert_eq!(messages.acknowledged().await, [mine.as_str()]);
            assert_eq!(messages.change().await, (mine, Some(1)));
        }
        let completion = json!({
            "ref": {"type": "ref/resource", "uri": "state://agents/{agent_id}/tasks/{task_id}"},
            "argument": {"name": "task_id", "value": &task[..8]},
        });
        assert_eq!(wire.ask("completion/complete", completion).await["error"]["code"], -32601);
        let calls: [AboutTask; 9] = [
            ("get_task", |task| json!({"task_id": task})),
            ("wait_task", |task| json!({"task_id": task})),
            ("get_state", |task| json!({"task_id": task})),
            ("patch_state", |task| json!({"task_id": task, "version": 1, "patch": {}})),
            ("answer", |task| json!({"task_id": task, "answer": "x"})),
            ("approve", |task| json!({"task_id": task})),
            ("deny", |task| json!({"task_id": task})),
            ("cancel_task", |task| json!({"task_id": task})),
            ("read_artifact", |task| json!({"task_id": task, "artifact_id": "x"})),
        ];
        for (name, arguments) in calls {
            let foreign = wire.refused(name, arguments(&task)).await;
            assert_eq!(foreign["code"], "not_found", "{name}");
            let absent = wire.refused(name, arguments(&never)).await;
            assert_eq!(strip(&foreign, &task), strip(&absent, &never), "{name}");
        }
        for listed in [wire.tool("list_tasks", json!({})).await, wire.result("resources/list", json!({})).await] {
            assert!(!listed.to_string().contains(&task), "{listed}");
        }
    }
    // A session is of who began it.
    let session = Wire::legacy(&server, Some(&ours)).await;
    let mut stolen = Wire::modern(&server).with_token(&theirs);
    (stolen.revision, stolen.session) = (LEGACY, session.session.clone());
    assert_eq!(stolen.post("tools/list", json!({})).await.status(), 404);
    assert_eq!(session.post("tools/list", json!({})).await.status(), 200);
    assert_eq!(own.read(&uri).await["version"], 1);
}

async fn what_is_not_there_is_not_acknowledged_on_lines_either(store: Store) {
    let server = open(&store).await;
    let _worker = server.worker().await;
    let (_, uri) = shared(&Wire::modern(&server)).await;
    let never = format!("state://agents/state/tasks/{}", longhaul::TaskId::new());
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    let (input, output) = tokio::io::split(theirs);
    let served = tokio::spawn(longhaul_server::mcp::serve_lines(server.app.clone(), input, output));
    let (read, mut write) = tokio::io::split(ours);
    let mut lines = tokio::io::BufReader::new(read).lines();
    for (id, uris, there) in [(1, vec![&never], false), (2, vec![&never, &uri], true)] {
        let meta = json!({
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        let listen = json!({"jsonrpc": "2.0", "id": id, "method": "subscriptions/listen", "params": {
            "notifications": {"resourceSubscriptions": uris}, "_meta": meta}});
        write.write_all(format!("{listen}\n").as_bytes()).await.expect("written");
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("read");
        let first: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        if there {
            let told = &first["params"]["notifications"]["resourceSubscriptions"];
            assert_eq!(told, &json!([uri]), "{first}");
        } else {
            assert_eq!((&first["id"], &first["error"]["code"]), (&json!(id), &json!(-32602)), "{first}");
            assert_eq!(first["error"]["data"]["uri"], never, "{first}");
        }
    }
    served.abort();
}

async fn resources_are_listed_page_by_page(store: Store) {
    let server = open(&store).await;
    let wire = Wire::modern(&server);
    server.client.announce(&["agent", "plain"]).await.expect("announced");
    let mut uris = Vec::new();
    for number in 0..70 {
        let handler = if number % 2 == 0 { "agent" } else { "plain" };
        let task = wire.tool("submit_task", json!({"handler": handler, "input": number})).await;
        if handler == "agent" {
            let patch = serde_json::from_value(json!({"set_goal": format!("goal {number}"), "add_artifacts": [
                {"artifact_id": format!("art-{number}"), "type": "t", "summary": "s", "bytes": 7}]}));
            let task = id(&task).parse().expect("an id");
            server.client.patch_state(task, patch.expect("a patch"), None).await.expect("patched");
            uris.push(format!("state://agents/agent/tasks/{task}"));
            uris.push(format!("artifact://tasks/{task}/art-{number}"));
        }
    }
    let (mut listed, mut cursor, mut pages) = (Vec::new(), Value::Null, 0);
    loop {
        let params = if cursor.is_null() { json!({}) } else { json!({"cursor": cursor}) };
        let page = wire.result("resources/list", params).await;
        pages += 1;
        for resource in page["resources"].as_array().expect("resources") {
            assert!(resource["name"].is_string() && resource["description"].is_string(), "{resource}");
            listed.push(resource["uri"].as_str().expect("a URI").to_owned());
        }
        cursor = page["nextCursor"].clone();
        if cursor.is_null() {
            break;
        }
    }
    assert_eq!(pages, 2);
    listed.sort();
    uris.sort();
    assert_eq!(listed, uris);
    let refused = wire.ask("resources/list", json!({"cursor": "made up"})).await;
    assert_eq!(refused["error"]["code"], -32602, "{refused}");
    let templates = wire.result("resources/templates/list", json!({})).await;
    assert_eq!(templates["resourceTemplates"][0]["uriTemplate"], "state://agents/{agent_id}/tasks/{task_id}");
}

async fn artifacts_are_read_whole_or_in_pieces(store: Store) {
    let artifacts = Artifacts::open("memory:").expect("open");
    let settings = ServerSettings { artifacts: Some(artifacts.clone()), ..ServerSettings::default() };
    let server = Server::start(store.open().await, settings).await;
    server.client.announce(&["agent"]).await.expect("announced");
    let wire = Wire::modern(&server);
    let task = wire.tool("submit_task", json!({"handler": "agent"})).await;
    let task = id(&task).to_owned();
    let text: String = (1..=20_000).map(|n| format!("Zeile {n} äöü\n")).collect();
    let large = "x".repeat(1024 * 1024 + 1);
    let binary = [0_u8, 159, 146, 150].repeat(100);
    let mut ids = Vec::new();
    for bytes in [text.clone().into_bytes(), binary.clone(), large.into_bytes()] {
        let stored = artifacts.put("default", bytes.into()).await.expect("stored");
        let reference =
            json!({"artifact_id": stored.artifact_id, "type": "t", "summary": "s", "bytes": stored.bytes});
        let patch = serde_json::from_value(json!({"add_artifacts": [reference]})).expect("a patch");
        server.client.patch_state(task.parse().expect("an id"), patch, None).await.expect("patched");
        ids.push(stored.artifact_id);
    }
    // Page by page, no character cut in two.
    let (mut read, mut offset, mut calls) = (String::new(), json!(0), 0);
    while !offset.is_null() {
        let arguments = json!({"task_id": task, "artifact_id": ids[0], "offset": offset, "limit": 50_001});
        let piece = wire.tool("read_artifact", arguments).await;
        assert_eq!((&piece["bytes"], &piece["offset"]), (&json!(text.len()), &offset));
        read.push_str(piece["text"].as_str().expect("text"));
        offset = piece["next_offset"].clone();
        calls += 1;
    }
    assert!(read == text && calls == text.len().div_ceil(50_000), "{calls} calls, {} bytes", read.len());
    let piece = wire.tool("read_artifact", json!({"task_id": task, "artifact_id": ids[1]})).await;
    assert!(piece["text"].is_null() && piece["base64"].is_string(), "{piece}");
    let beyond =
        wire.tool("read_artifact", json!({"task_id": task, "artifact_id": ids[0], "offset": 99_999_999})).await;
    assert_eq!((&beyond["text"], &beyond["next_offset"]), (&json!(""), &Value::Null));
    for (arguments, code) in [
        (json!({"task_id": task, "artifact_id": "sha256-00"}), "not_found"),
        (json!({"task_id": task, "artifact_id": ids[0], "limit": 0}), "invalid_field"),
    ] {
        assert_eq!(wire.refused("read_artifact", arguments).await["code"], code);
    }
    // As resources, whole.
    let uri = |id: &str| format!("artifact://tasks/{task}/{id}");
    let whole = wire.result("resources/read", json!({"uri": uri(&ids[0])})).await;
    assert_eq!(whole["contents"][0]["text"], text);
    let blob = wire.result("resources/read", json!({"uri": uri(&ids[1])})).await;
    assert!(blob["contents"][0]["blob"].is_string(), "{blob}");
    let refused = wire.ask("resources/read", json!({"uri": uri(&ids[2])})).await;
    assert!(refused["error"]["message"].as_str().expect("a sentence").contains("read_artifact"), "{refused}");
    let listed = wire.result("resources/list", json!({})).await["resources"].to_string();
    assert!(ids.iter().all(|id| listed.contains(&uri(id))), "{listed}");
}
