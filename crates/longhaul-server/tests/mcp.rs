//! The MCP server: its tools, on both revisions, by what goes over the wire.

mod common;
mod mcp_wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Answer, PATIENCE, Server, Store};
use longhaul::{Role, Run, TaskError, Worker};
use longhaul_server::{Rate, ServerSettings};
use mcp_wire::{LEGACY, MODERN, Messages, Wire, fact, id, open, shared, token};
use reqwest::Method;
use serde_json::{Value, json};

on_every_store!(
    a_task_is_submitted_waited_for_and_found_again,
    questions_and_approvals_are_answered,
    what_a_tool_gives_is_what_its_schema_says,
    a_role_goes_as_far_as_its_name_says,
    waiting_can_be_a_task_of_the_protocol_that_any_server_knows,
    who_waits_hears_of_progress,
);

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
