//! The MCP server: its tools and resources, on both revisions, by what goes over the wire.

mod common;
mod mcp_wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Answer, PATIENCE, Server, Store};
use longhaul::{NewToken, Role, Run, TaskError, Worker};
use longhaul_agent::Artifacts;
use longhaul_server::{Rate, ServerSettings};
use mcp_wire::{LEGACY, MODERN, Messages, Wire};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

/// A method or a tool, and what it is asked about a task of this id.
type AboutTask = (&'static str, fn(&str) -> Value);

on_every_store!(
    a_task_is_submitted_waited_for_and_found_again,
    questions_and_approvals_are_answered,
    what_a_tool_gives_is_what_its_schema_says,
    a_state_is_read_and_changed_by_its_version,
    every_change_is_told_to_who_watches_whatever_the_revision,
    a_task_that_has_ended_can_still_be_watched,
    another_tenants_resources_are_not_found,
    what_is_not_there_is_not_acknowledged_on_lines_either,
    a_role_goes_as_far_as_its_name_says,
    resources_are_listed_page_by_page,
    artifacts_are_read_whole_or_in_pieces,
    waiting_can_be_a_task_of_the_protocol_that_any_server_knows,
    who_waits_hears_of_progress,
);

async fn open(store: &Store) -> Server {
    Server::start(store.open().await, ServerSettings::default()).await
}

async fn token(server: &Server, tenant: &str, role: Role) -> String {
    let new = NewToken { name: format!("{tenant}-{role}"), tenant: tenant.to_owned(), role, expires_after: None };
    server.client.create_token(new).await.expect("a token").1
}

fn id(task: &Value) -> &str {
    task["id"].as_str().expect("an id")
}

/// A task with a state, waiting to be told to end; its id and the URI of its state.
async fn shared(wire: &Wire<'_>) -> (String, String) {
    let task = wire.tool("submit_task", json!({"handler": "state", "input": "be shared"})).await;
    let task = id(&task).to_owned();
    let asked = std::time::Instant::now();
    loop {
        let now = wire.tool("get_task", json!({"task_id": task})).await;
        if now["waiting_for"]["id"] == "end" {
            break;
        }
        assert!(asked.elapsed() < PATIENCE, "{now}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let uri = format!("state://agents/state/tasks/{task}");
    (task, uri)
}

fn fact(key: &str) -> Value {
    json!({"add_facts": [{"key": key, "value": 1, "source": "test"}]})
}

async fn a_task_is_submitted_waited_for_and_found_again(store: Store) {
    let server = open(&store).await;
    let _worker = server.worker().await;
    for wire in [Wire::modern(&server), Wire::legacy(&server, None).await] {
        let input = json!({"n": [1, "two", {}], "by": wire.revision});
        let task = wire
            .tool(
                "submit_task",
                json!({"handler": "echo", "input": input, "key": wire.revision, "tags": {"a": "b"}}),
            )
            .await;
        let again = wire
            .tool(
                "submit_task",
                json!({"handler": "echo", "input": input, "key": wire.revision, "tags": {"a": "b"}}),
            )
            .await;
        assert_eq!(id(&task), id(&again));
        let ended = wire.tool("wait_task", json!({"task_id": id(&task), "timeout": "30s"})).await;
        assert_eq!((&ended["state"], &ended["result"]), (&json!("completed"), &input));
        let listed = wire.tool("list_tasks", json!({"q": wire.revision, "state": "completed"})).await;
        assert_eq!(id(&listed["tasks"][0]), id(&task));
        // The same task, by HTTP.
        let shown = server.get(&format!("/v1/tasks/{}", id(&task))).await.body;
        for member in shown.as_object().expect("a task").keys() {
            assert_eq!(shown[member], ended[member], "{member}");
        }
        let refused = wire.refused("submit_task", json!({"handler": "nobody", "input": 1})).await;
        assert_eq!((&refused["code"], &refused["handler"]), (&json!("unknown_handler"), &json!("nobody")));
        let refused = wire.refused("submit_task", json!({"handler": "echo", "prority": 3})).await;
        assert_eq!(refused["code"], "invalid_field");
        assert!(refused["detail"].as_str().expect("a sentence").contains("priority"), "{refused}");
        let refused = wire.refused("list_tasks", json!({"status": "running"})).await;
        assert_eq!(refused["code"], "invalid_field", "{refused}");
        let unknown = wire.ask("tools/call", json!({"name": "make_coffee", "arguments": {}})).await;
        assert_eq!(unknown["error"]["code"], -32602, "{unknown}");
    }
}

async fn questions_and_approvals_are_answered(store: Store) {
    let server = open(&store).await;
    let _worker = server.worker().await;
    let wire = Wire::modern(&server);
    let asked = wire.tool("submit_task", json!({"handler": "ask", "input": "Which region?"})).await;
    let task = id(&asked).to_owned();
    server.until(&format!("/v1/tasks/{task}/questions"), |body| body["questions"][0].is_object()).await;
    let waits = wire.tool("get_task", json!({"task_id": task})).await;
    assert_eq!(waits["questions"][0]["question"], "Which region?");
    let question = waits["questions"][0]["id"].as_str().expect("an id");
    let told = wire.tool("answer", json!({"task_id": task, "question_id": question, "answer": "eu"})).await;
    assert_eq!(told["questions"], json!([]));
    let ended = wire.tool("wait_task", json!({"task_id": task})).await;
    assert_eq!((&ended["state"], &ended["result"]), (&json!("completed"), &json!("eu")));

    for (tool, state) in [("approve", "completed"), ("deny", "failed")] {
        let task = wire.tool("submit_task", json!({"handler": "approve", "input": "Go live?"})).await;
        let task = id(&task).to_owned();
        server.until(&format!("/v1/tasks/{task}/approvals"), |body| body["approvals"][0].is_object()).await;
        let waits = wire.tool("get_task", json!({"task_id": task})).await;
        let approval = waits["approvals"][0].clone();
        assert_eq!((&approval["question"], &approval["risk"]), (&json!("Go live?"), &json!("external_action")));
        let mut arguments = json!({"task_id": task, "approval_id": approval["id"], "reason": "because"});
        if tool == "approve" {
            arguments["digest"] = "of something else".into();
            wire.refused(tool, arguments.clone()).await;
            arguments["digest"] = approval["digest"].clone();
        }
        wire.tool(tool, arguments.clone()).await;
        assert_eq!(wire.tool("wait_task", json!({"task_id": task})).await["state"], state);
        assert_eq!(wire.refused(tool, arguments).await["code"], "wrong_state");
    }
    let (task, _) = shared(&wire).await;
    assert_ne!(wire.tool("cancel_task", json!({"task_id": task, "reason": "enough"})).await["state"], "completed");
    assert_eq!(wire.tool("wait_task", json!({"task_id": task})).await["state"], "cancelled");
}

async fn what_a_tool_gives_is_what_its_schema_says(store: Store) {
    let server = open(&store).await;
    let _worker = server.worker().await;
    for wire in [Wire::modern(&server), Wire::legacy(&server, None).await] {
        let tools = wire.result("tools/list", json!({})).await["tools"].clone();
        let tools = tools.as_array().expect("tools");
        let names: Vec<&str> = tools.iter().map(|tool| tool["name"].as_str().expect("a name")).collect();
        assert_eq!(
            names,
            [
                "submit_task",
                "get_task",
                "wait_task",
                "list_tasks",
                "get_state",
                "patch_state",
                "answer",
                "approve",
                "deny",
                "cancel_task",
                "read_artifact"
            ]
        );
        let (task, _) = shared(&wire).await;
        let calls = [
            ("submit_task", json!({"handler": "echo", "input": 1})),
            ("get_task", json!({"task_id": task})),
            ("wait_task", json!({"task_id": task, "timeout": "0s"})),
            ("list_tasks", json!({"limit": 3})),
            ("get_state", json!({"task_id": task})),
            ("patch_state", json!({"task_id": task, "version": 1, "patch": fact("x")})),
            ("cancel_task", json!({"task_id": task})),
        ];
        for (name, arguments) in calls {
            let tool = tools.iter().find(|tool| tool["name"] == name).expect("a tool");
            let takes = jsonschema::validator_for(&tool["inputSchema"]).expect("a schema");
            let gives = jsonschema::validator_for(&tool["outputSchema"]).expect("a schema");
            assert_eq!(
                (&tool["inputSchema"]["type"], &tool["outputSchema"]["type"]),
                (&json!("object"), &json!("object"))
            );
            assert!(takes.is_valid(&arguments), "{name}: {:?}", takes.validate(&arguments).err());
            assert!(!takes.is_valid(&json!({"made_up": 1})), "{name}");
            let answer = wire.tool(name, arguments).await;
            assert!(gives.is_valid(&answer), "{name}: {:?}", gives.validate(&answer).err());
        }
        for tool in tools {
            let hints = &tool["annotations"];
            let reads = ["get_task", "wait_task", "list_tasks", "get_state", "read_artifact"];
            let name = tool["name"].as_str().expect("a name");
            assert_eq!(hints["readOnlyHint"], reads.contains(&name), "{name}");
            assert_eq!(hints["destructiveHint"], ["approve", "deny", "cancel_task"].contains(&name), "{name}");
            assert!(hints["idempotentHint"].is_boolean() && tool["description"].is_string(), "{name}");
        }
    }
}

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

async fn a_role_goes_as_far_as_its_name_says(store: Store) {
    let server = Server::guarded(store.open().await, ServerSettings::default()).await;
    let _worker = server.worker().await;
    let admin = token(&server, "default", Role::Admin).await;
    let (task, uri) = shared(&Wire::modern(&server).with_token(&admin)).await;
    for role in [Role::Viewer, Role::Submitter, Role::Operator] {
        let secret = token(&server, "default", role).await;
        for wire in [Wire::modern(&server).with_token(&secret), Wire::legacy(&server, Some(&secret)).await] {
            assert_eq!(wire.read(&uri).await["uri"], uri);
            wire.tool("get_task", json!({"task_id": task})).await;
            let submit = json!({"handler": "echo", "input": 1});
            if role < Role::Submitter {
                let refused = wire.refused("submit_task", submit).await;
                assert_eq!((&refused["code"], &refused["role"]), (&json!("forbidden"), &json!("submitter")));
            } else {
                wire.tool("submit_task", submit).await;
            }
            for (name, arguments) in [
                ("patch_state", json!({"task_id": task, "version": 0, "patch": {}})),
                ("answer", json!({"task_id": task, "answer": "x"})),
                ("approve", json!({"task_id": task})),
                ("deny", json!({"task_id": task})),
            ] {
                let refused = wire.refused(name, arguments).await;
                assert_eq!(refused["code"] == "forbidden", role < Role::Operator, "{role} {name}: {refused}");
            }
        }
    }
    // Without a token, or with a wrong one, not even the list of tools.
    for wrong in [None, Some("lh_0000000000000000000000000000000000000000000")] {
        let mut wire = Wire::modern(&server);
        wire.token = wrong.map(str::to_owned);
        let answer = wire.post("tools/list", json!({})).await;
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()["www-authenticate"]),
            (401, &"Bearer".parse().expect("text"))
        );
    }
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

async fn waiting_can_be_a_task_of_the_protocol_that_any_server_knows(store: Store) {
    let server = open(&store).await;
    let elsewhere = Server::start(store.open().await, ServerSettings::default()).await;
    let _worker = server.worker().await;
    let able = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}, "elicitation": {"form": {}}});
    let (here, there) = (Wire::modern(&server).able(able.clone()), Wire::modern(&elsewhere).able(able));
    let asked = here.tool("submit_task", json!({"handler": "ask", "input": "Which region?"})).await;
    let waiting =
        here.result("tools/call", json!({"name": "wait_task", "arguments": {"task_id": id(&asked)}})).await;
    assert_eq!((&waiting["resultType"], &waiting["status"]), (&json!("task"), &json!("working")));
    let handle = waiting["taskId"].as_str().expect("an id").to_owned();
    let look = async |status: &str| {
        let since = std::time::Instant::now();
        loop {
            let task = there.result("tasks/get", json!({"taskId": handle})).await;
            if task["status"] == status {
                return task;
            }
            assert!(since.elapsed() < PATIENCE, "{task}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let input = look("input_required").await;
    let (question, request) = input["inputRequests"].as_object().expect("requests").iter().next().expect("one");
    assert_eq!(
        (&request["method"], &request["params"]["message"]),
        (&json!("elicitation/create"), &json!("Which region?"))
    );
    let said = json!({question: {"action": "decline"}});
    there.result("tasks/update", json!({"taskId": handle, "inputResponses": said})).await;
    look("input_required").await;
    // To stop waiting is not to stop the task.
    there.result("tasks/cancel", json!({"taskId": handle})).await;
    let said = json!({question: {"action": "accept", "content": {"answer": "eu"}}});
    there.result("tasks/update", json!({"taskId": handle, "inputResponses": said})).await;
    let done = look("completed").await;
    assert_eq!(done["result"]["structuredContent"]["result"], "eu");
    // One that has ended needs no waiting.
    let ended = here.tool("wait_task", json!({"task_id": id(&asked)})).await;
    assert_eq!(ended["result"], "eu");
    let unknown = there.ask("tasks/get", json!({"taskId": "wait-x"})).await;
    assert_eq!(unknown["error"]["code"], -32602, "{unknown}");
    // A client that cannot poll is not made to.
    let plain = Wire::modern(&server);
    let answer = plain.ask("tasks/get", json!({"taskId": handle})).await;
    assert_eq!(answer["error"]["code"], -32021, "{answer}");
}

async fn who_waits_hears_of_progress(store: Store) {
    let server = open(&store).await;
    // A task that goes on until it was heard.
    let heard_enough = Arc::new(AtomicBool::new(false));
    let enough = Arc::clone(&heard_enough);
    let talk = move |run: Run, _: Value| talk(run, Arc::clone(&enough));
    let _worker = Worker::new(&server.client).handler("talk", talk).start().await.expect("a worker");
    for wire in [Wire::modern(&server), Wire::legacy(&server, None).await] {
        heard_enough.store(false, Ordering::Relaxed);
        let task = wire.tool("submit_task", json!({"handler": "talk"})).await;
        let params =
            json!({"name": "wait_task", "arguments": {"task_id": id(&task)}, "_meta": {"progressToken": "p"}});
        let mut messages = Messages::of(wire.post("tools/call", params).await);
        let mut heard = Vec::new();
        let ended = loop {
            let message = messages.next().await.expect("an answer");
            if message["method"] != "notifications/progress" {
                break message;
            }
            assert_eq!(message["params"]["progressToken"], "p");
            let words = message["params"]["message"].as_str().expect("words").to_owned();
            assert!(words.starts_with("step ") && words.ends_with(": thinking talking"), "{words}");
            heard.push(message["params"]["progress"].as_f64().expect("a number"));
            heard_enough.store(heard.len() > 2, Ordering::Relaxed);
        };
        assert_eq!(ended["result"]["structuredContent"]["state"], "completed", "{ended}");
        assert!(heard.len() > 2 && heard.is_sorted_by(|a, b| a < b), "{heard:?}");
    }
}

async fn talk(run: Run, enough: Arc<AtomicBool>) -> Result<u32, TaskError> {
    for number in 1.. {
        if enough.load(Ordering::Relaxed) {
            return Ok(number);
        }
        run.progress("thinking", number, 0, "talking");
        run.step(format!("step {number}"), async || Ok::<_, TaskError>(())).await?;
    }
    Ok(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_other_origins_and_other_names_are_refused() {
    let store = Store::sqlite();
    let settings = ServerSettings { cors_origins: vec!["https://ide.example".into()], ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    let own = format!("http://{}", server.address);
    let discover = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    for (header, value, allowed) in [
        ("origin", own.as_str(), true),
        ("origin", "https://ide.example", true),
        ("origin", "https://evil.example", false),
        ("origin", "http://ide.example", false),
        ("origin", "null", false),
        ("origin", "", false),
        ("host", "localhost:7171", true),
        ("host", "evil.example", false),
        ("host", "127.0.0.1.evil.example:7171", false),
    ] {
        for method in [Method::POST, Method::GET, Method::DELETE] {
            let request = server
                .request(method.clone(), "/mcp")
                .header("accept", "application/json, text/event-stream")
                .header(header, value);
            let request = if method == Method::POST { request.json(&discover) } else { request };
            let status = request.send().await.expect("an answer").status();
            match allowed {
                true => {
                    assert!(status != 403 && !status.is_server_error(), "{method} {header}: {value}: {status}")
                }
                false => assert_eq!(status, 403, "{method} {header}: {value}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rubbish_is_refused_in_a_form_that_programs_read() {
    let store = Store::sqlite();
    let server = open(&store).await;
    let post = |body: &str| server.request(Method::POST, "/mcp").body(body.to_owned());
    let takes = "application/json, text/event-stream";
    let message = r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}"#;
    let json = "application/json";
    // What is wrong with the head of a request is a problem.
    for (request, status, code) in [
        (
            post(message).header("accept", takes).header("content-type", "text/plain"),
            415,
            "unsupported_media_type",
        ),
        (post(message).header("accept", takes), 415, "unsupported_media_type"),
        (post(message).header("accept", takes).header("content-type", "x/y+json"), 415, "unsupported_media_type"),
        (post("").header("accept", takes), 415, "unsupported_media_type"),
        (post(message).header("accept", "text/html").header("content-type", json), 406, "not_acceptable"),
        (post(message).header("accept", takes).header("content-type", json), 400, "invalid_parameter"),
        (server.request(Method::GET, "/mcp"), 406, "not_acceptable"),
        (server.request(Method::GET, "/mcp").header("accept", takes), 400, "invalid_parameter"),
        (
            server.request(Method::GET, "/mcp").header("accept", takes).header("mcp-protocol-version", MODERN),
            405,
            "method_not_allowed",
        ),
        (server.request(Method::DELETE, "/mcp"), 400, "invalid_parameter"),
        (server.request(Method::PUT, "/mcp"), 405, "method_not_allowed"),
        (server.request(Method::DELETE, "/mcp").header("mcp-session-id", "a.b"), 404, "not_found"),
    ] {
        Answer::of(request).await.is_problem(status, code);
    }
    // What is no message, or not one that can be read, is an error of JSON-RPC.
    for (body, code, id) in [
        ("", -32700, Value::Null),
        ("{", -32700, Value::Null),
        ("rubbish", -32700, Value::Null),
        ("[]", -32600, Value::Null),
        ("3", -32600, Value::Null),
        (r#"{"jsonrpc": "1.0", "id": 7, "method": "tools/list"}"#, -32600, json!(7)),
        (r#"{"jsonrpc": "2.0", "id": "x", "methud": "tools/list"}"#, -32600, json!("x")),
        (r#"[{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]"#, -32600, Value::Null),
    ] {
        for revision in [MODERN, LEGACY] {
            let request = post(body).header("accept", takes).header("content-type", json);
            let answer = Answer::of(request.header("mcp-protocol-version", revision)).await;
            assert_eq!((answer.status.as_u16(), answer.header("content-type")), (400, json), "{body}");
            let error = (&answer.body["jsonrpc"], &answer.body["id"], &answer.body["error"]["code"]);
            assert_eq!(error, (&json!("2.0"), &id, &json!(code)), "{body}: {}", answer.body);
            assert!(answer.body["error"]["message"].is_string(), "{body}");
        }
    }
    let request = r#"{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 5}}"#;
    let answer = Answer::of(post(request).header("accept", takes).header("content-type", json)).await;
    assert_eq!((answer.status.as_u16(), &answer.body["error"]["code"]), (400, &json!(-32602)), "{}", answer.body);
    // A method that there is, with params that cannot be read, is not one that there is not.
    for wire in [Wire::modern(&server), Wire::legacy(&server, None).await] {
        for (method, params) in [
            ("tools/call", json!({"name": "get_task", "arguments": []})),
            ("tools/call", json!({"name": "get_task", "arguments": "x"})),
            ("tools/call", json!({})),
            ("resources/read", json!({"uri": 5})),
        ] {
            let answer = wire.ask(method, params.clone()).await;
            assert_eq!(answer["error"]["code"], -32602, "{method} {params}: {answer}");
            assert!(answer["error"]["message"].as_str().expect("words").contains("cannot be read"), "{answer}");
        }
        let answer = wire.ask("tools/cull", json!({})).await;
        assert_eq!(answer["error"]["code"], -32601, "{answer}");
        assert!(answer["error"]["message"].as_str().expect("words").contains("tools/cull"), "{answer}");
    }
    let listen = Wire::modern(&server).ask("subscriptions/listen", json!({"notifications": 5})).await;
    assert_eq!(listen["error"]["code"], -32602, "{listen}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_bounded_as_on_every_other_route() {
    let store = Store::sqlite();
    let rates = [("default".to_owned(), Rate { per_second: 0.001, burst: 6 })].into();
    let settings = ServerSettings { max_body: 10_000, rates, ..Default::default() };
    let server = Server::start(store.open().await, settings).await;
    let wire = Wire::modern(&server);
    let large =
        wire.post("tools/call", json!({"name": "submit_task", "arguments": {"input": "x".repeat(10_000)}})).await;
    assert_eq!(large.status(), 413);
    let text = server.request(Method::POST, "/mcp").body("hello").send().await.expect("an answer");
    assert_eq!(text.status(), 415);
    let put = server.request(Method::PUT, "/mcp").send().await.expect("an answer");
    assert_eq!(put.status(), 405);
    let no_session =
        server.request(Method::GET, "/mcp").header("accept", "text/event-stream").header("mcp-session-id", "x.y");
    assert_eq!(no_session.send().await.expect("an answer").status(), 404);
    let rated = async { while wire.post("tools/list", json!({})).await.status() != 429 {} };
    tokio::time::timeout(PATIENCE, rated).await.expect("it is refused in the end");
}
