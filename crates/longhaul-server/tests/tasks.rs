//! Submitting, reading, listing, waiting, steering: the requests that most clients make.

mod common;

use common::{Answer, PATIENCE, Server, Store};
use longhaul::{NewTask, Run, TaskError, Worker};
use longhaul_server::ServerSettings;
use reqwest::Method;
use serde_json::value::RawValue;
use serde_json::{Value, json};

on_every_store!(
    a_submit_is_answered_with_the_task_and_its_path,
    the_same_key_and_body_is_the_same_task_and_another_body_is_refused,
    a_batch_answers_each_task_on_its_own,
    a_full_queue_says_no_and_names_itself,
    lists_are_paged_and_filtered,
    a_number_that_is_too_large_for_most_is_listed_as_it_is,
    wait_says_whether_the_task_has_ended,
    people_answer_approve_and_signal,
    an_agents_state_is_read_and_changed_by_version,
    a_failed_task_is_resumed_forked_and_deleted,
    schedules_are_made_paused_and_removed,
    a_paused_queue_rests,
    every_answer_has_an_id_and_a_place_in_a_trace,
    what_is_not_there_is_a_problem,
);

async fn serving(store: &Store) -> Server {
    Server::start(store.open().await, ServerSettings::default()).await
}

async fn a_submit_is_answered_with_the_task_and_its_path(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let body = json!({"handler": "echo", "input": {"a": [1, 2.50]}, "priority": 9, "queue": "default",
        "tags": {"team": "shop"}, "timeout": "5m", "max_attempts": 2});
    let answer = server.post("/v1/tasks", body).await;
    assert_eq!(answer.status, 202);
    let task = &answer.body;
    let id = task["id"].as_str().expect("an id");
    assert_eq!(answer.header("location"), format!("/v1/tasks/{id}"));
    assert_eq!((&task["task_id"], &task["state"], &task["priority"]), (&task["id"], &json!("pending"), &json!(9)));
    let ended = server.ended(id).await;
    assert_eq!((&ended["state"], &ended["result"]), (&json!("completed"), &json!({"a": [1, 2.5]})));
    // What was told at once is what the store says.
    for same in ["id", "handler", "queue", "priority", "input", "tags", "created_at", "deadline", "parent_id"] {
        assert_eq!(task[same], ended[same], "{same}");
    }
    let keys = |task: &Value| task.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(task), keys(&ended));

    let id = server.submit(json!({"handler": "echo", "user_input": "hello"})).await;
    let ended = server.ended(&id).await;
    assert_eq!(
        (&ended["input"], &ended["user_input"], &ended["result"]),
        (&json!("hello"), &json!("hello"), &json!("hello"))
    );
}

async fn the_same_key_and_body_is_the_same_task_and_another_body_is_refused(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let submit = async |body: Value| {
        Answer::of(server.request(Method::POST, "/v1/tasks").header("Idempotency-Key", "k-1").json(&body)).await
    };
    let first = submit(json!({"handler": "echo", "input": {"a": 1, "b": 2}})).await;
    let again = submit(json!({"input": {"b": 2, "a": 1}, "handler": "echo", "priority": 5})).await;
    assert_eq!((again.status.as_u16(), &again.body["id"]), (202, &first.body["id"]));
    let other = submit(json!({"handler": "echo", "input": {"a": 2}})).await;
    other.is_problem(422, "key_conflict");
    assert_eq!(other.body["task_id"], first.body["id"]);
    submit(json!({"handler": "echo", "key": "k-2"})).await.is_problem(422, "invalid_field");
    let both = submit(json!({"input": {"b": 2, "a": 1}, "handler": "echo", "key": "k-1"})).await;
    assert_eq!((both.status.as_u16(), &both.body["id"]), (202, &first.body["id"]));

    let body = json!({"handler": "echo", "input": "twice", "dedupe_window": "10m"});
    assert_eq!(server.submit(body.clone()).await, server.submit(body).await);
}

async fn a_batch_answers_each_task_on_its_own(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let tasks = json!([
        {"handler": "echo", "input": 1},
        {"handler": "nobody_has_this", "input": 2},
        {"handler": "echo", "priority": 77},
        {"handler": "echo", "input": 4, "key": "four"},
        {"handler": "echo", "input": 4, "key": "four"},
    ]);
    let answer = server.post("/v1/tasks:batch", json!({"tasks": tasks})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let results = answer.body["results"].as_array().expect("results");
    let statuses: Vec<_> = results.iter().map(|result| result["status"].as_u64().expect("a status")).collect();
    assert_eq!(statuses, [202, 404, 422, 202, 202]);
    assert_eq!(results[1]["error"]["code"], "unknown_handler");
    assert_eq!(results[3]["task"]["id"], results[4]["task"]["id"]);
    server.ended(results[0]["task"]["id"].as_str().expect("an id")).await;
}

async fn a_full_queue_says_no_and_names_itself(store: Store) {
    let server = serving(&store).await;
    server.client.announce(&["later"]).await.expect("announced");
    let queue = longhaul::QueueSettings { max_pending: 2, ..Default::default() };
    let settings = longhaul::Settings { queues: [("small".to_owned(), queue)].into(), ..Default::default() };
    server.client.configure(&settings).await.expect("set");
    let body = json!({"handler": "later", "queue": "small"});
    for _ in 0..2 {
        server.submit(body.clone()).await;
    }
    let full = server.post("/v1/tasks", body).await;
    full.is_problem(429, "queue_full");
    assert_eq!(full.body["queue"], "small");
    assert!(full.header("retry-after").parse::<u64>().expect("seconds") >= 1);
}

async fn lists_are_paged_and_filtered(store: Store) {
    let server = serving(&store).await;
    server.client.announce(&["a", "b"]).await.expect("announced");
    let mut ids = Vec::new();
    for number in 0..7 {
        let handler = if number % 2 == 0 { "a" } else { "b" };
        let body =
            json!({"handler": handler, "input": format!("needle {number}%"), "tags": {"n": number.to_string()}});
        ids.push(server.submit(body).await);
    }
    let list = async |query: &str| {
        let answer = server.get(&format!("/v1/tasks?{query}")).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let tasks = answer.body["tasks"].as_array().expect("tasks").clone();
        let ids: Vec<String> = tasks.iter().map(|task| task["id"].as_str().expect("an id").to_owned()).collect();
        (ids, answer.body["next_cursor"].as_str().map(str::to_owned))
    };
    let (mut found, mut query) = (Vec::new(), "order=created_at&limit=3".to_owned());
    loop {
        let (page, next) = list(&query).await;
        found.extend(page);
        let Some(next) = next else { break };
        query = format!("order=created_at&limit=3&cursor={next}");
    }
    assert_eq!(found, ids);
    let newest: Vec<_> = ids.iter().rev().cloned().collect();
    assert_eq!(list("").await.0, newest);
    assert_eq!(list("handler=b").await.0.len(), 3);
    assert_eq!(list("tag=n%3D4").await.0, [ids[4].clone()]);
    assert_eq!(list("q=NEEDLE%205%25").await.0, [ids[5].clone()]);
    assert_eq!(list("q=needle%20_").await.0.len(), 0, "wildcards are letters");
    assert_eq!(list("state=completed").await.0.len(), 0);
    for wrong in ["state=odd", "limit=0", "limit=x", "cursor=%21", "order=up", "tag=x", "parent=1"] {
        server.get(&format!("/v1/tasks?{wrong}")).await.is_problem(400, "invalid_parameter");
    }
}

async fn a_number_that_is_too_large_for_most_is_listed_as_it_is(store: Store) {
    let server = serving(&store).await;
    server.client.announce(&["a"]).await.expect("announced");
    let input = RawValue::from_string("[1e400]".to_owned()).expect("it is JSON");
    let id = server.client.submit(NewTask::with_raw("a", input)).await.expect("accepted by the library").id;
    let worker = Worker::new(&server.client).handler("a", |run: Run, input: Box<RawValue>| async move {
        run.step("same", async || Ok::<_, TaskError>(input.clone())).await.map(drop)
    });
    let worker = worker.start().await.expect("starts");
    server.client.wait(id, PATIENCE).await.expect("it ends");
    let of_task = ["", "/steps", "/export"].map(|of| format!("/v1/tasks/{id}{of}"));
    for path in ["/v1/tasks".to_owned()].iter().chain(&of_task) {
        let answer = server.request(Method::GET, path).send().await.expect("answered");
        assert_eq!(answer.status(), 200, "{path}");
        assert!(answer.text().await.expect("a text").contains("[1e400]"), "{path}");
    }
    worker.stop().await;
}

async fn wait_says_whether_the_task_has_ended(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "signal", "input": "go"})).await;
    let answer = server.get(&format!("/v1/tasks/{id}/wait?timeout=10ms")).await;
    assert_eq!(answer.status, 202);
    let sent = server.post(&format!("/v1/tasks/{id}/signals/go"), json!({"now": true})).await;
    assert_eq!(sent.status, 202, "{}", sent.body);
    assert_eq!(server.ended(&id).await["result"], json!({"now": true}));
    server.get(&format!("/v1/tasks/{id}/wait?timeout=soon")).await.is_problem(400, "invalid_parameter");
}

async fn people_answer_approve_and_signal(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "ask", "input": "Which region?"})).await;
    let path = format!("/v1/tasks/{id}/questions");
    let asked = server.until(&path, |body| body["questions"][0].is_object()).await;
    assert_eq!(asked["questions"][0]["question"], "Which region?");
    let qid = asked["questions"][0]["id"].as_str().expect("an id");
    server.post(&format!("{path}/none"), json!({"answer": "x"})).await.is_problem(404, "not_found");
    let answered = server.post(&format!("{path}/{qid}"), json!({"answer": "eu"})).await;
    assert_eq!(answered.status, 200, "{}", answered.body);
    assert_eq!(server.ended(&id).await["result"], "eu");
    assert_eq!(server.get(&path).await.body["questions"][0]["answer"], "eu");

    let id = server.submit(json!({"handler": "approve", "input": "Go live?"})).await;
    let path = format!("/v1/tasks/{id}/approvals");
    let open = server.until("/v1/approvals", |body| body["approvals"][0].is_object()).await;
    let approval = &open["approvals"][0];
    assert_eq!(
        (&approval["task_id"], &approval["status"], &approval["risk"]),
        (&json!(id), &json!("pending"), &json!("external_action"))
    );
    let aid = approval["id"].as_str().expect("an id");
    let wrong = server.post(&format!("{path}/{aid}"), json!({"decision": "approve", "digest": "other"})).await;
    wrong.is_problem(409, "wrong_state");
    let decided = server.post(&format!("{path}/{aid}"), json!({"decision": "approve", "reason": "tested"})).await;
    assert_eq!((decided.status.as_u16(), &decided.body["reason"]), (200, &json!("tested")), "{}", decided.body);
    assert_eq!(server.ended(&id).await["result"], "approved");
    server.post(&format!("{path}/{aid}"), json!({"decision": "deny"})).await.is_problem(409, "wrong_state");
}

async fn an_agents_state_is_read_and_changed_by_version(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let plain = server.submit(json!({"handler": "echo"})).await;
    server.get(&format!("/v1/tasks/{plain}/state")).await.is_problem(404, "not_found");
    let id = server.submit(json!({"handler": "state", "input": "free disk space"})).await;
    let path = format!("/v1/tasks/{id}/state");
    let state = server.until(&path, |body| body["version"].is_u64()).await;
    assert_eq!(state["state"]["goal"], "free disk space");
    let version = state["version"].as_u64().expect("a version");
    assert_eq!(server.get(&path).await.header("etag"), format!("\"{version}\""));
    let patch = async |tag: &str, body: Value| {
        Answer::of(server.request(Method::PATCH, &path).header("If-Match", tag).json(&body)).await
    };
    let facts = json!({"add_facts": [{"key": "disk", "value": 91, "source": "df"}]});
    let changed = patch(&format!("\"{version}\""), facts.clone()).await;
    assert_eq!(
        (changed.status.as_u16(), &changed.body["version"]),
        (200, &json!(version + 1)),
        "{}",
        changed.body
    );
    let stale = patch(&format!("\"{version}\""), facts.clone()).await;
    stale.is_problem(412, "version_conflict");
    assert_eq!(stale.body["version"], version + 1);
    patch("*", json!({"goal": "x"})).await.is_problem(422, "invalid_field");
    patch("x", facts.clone()).await.is_problem(400, "invalid_parameter");
    server.post(&format!("/v1/tasks/{id}/signals/end"), json!(null)).await;
    let last = server.ended(&id).await["last_seq"].clone();
    patch("*", facts).await.is_problem(409, "wrong_state");
    assert_eq!(server.get(&format!("/v1/tasks/{id}")).await.body["last_seq"], last, "the final event is the last");
}

async fn a_failed_task_is_resumed_forked_and_deleted(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    let id = server.submit(json!({"handler": "fail"})).await;
    let ended = server.ended(&id).await;
    assert_eq!((&ended["state"], &ended["error"]["code"]), (&json!("failed"), &json!("broken")));
    let resumed = server.post(&format!("/v1/tasks/{id}/resume"), json!({})).await;
    assert_eq!(resumed.status, 200);
    server.ended(&id).await;
    server.post(&format!("/v1/tasks/{id}/cancel"), json!({})).await.is_problem(409, "wrong_state");
    server.post(&format!("/v1/tasks/{id}/undo"), json!({})).await.is_problem(409, "wrong_state");

    let done = server.submit(json!({"handler": "steps", "input": 3})).await;
    server.ended(&done).await;
    let steps = server.get(&format!("/v1/tasks/{done}/steps")).await;
    let names: Vec<_> =
        steps.body["steps"].as_array().expect("steps").iter().map(|step| step["name"].clone()).collect();
    assert_eq!(names, [json!("step 1"), json!("step 2"), json!("step 3")]);
    let fork = server.post(&format!("/v1/tasks/{done}/fork"), json!({"from_step": "step 2", "input": 4})).await;
    assert_eq!((fork.status.as_u16(), &fork.body["fork_of"]), (202, &json!(done)), "{}", fork.body);
    assert_eq!(server.ended(fork.body["id"].as_str().expect("an id")).await["result"], 4);
    let same = server.post(&format!("/v1/tasks/{done}/resume"), json!({})).await;
    assert_eq!((same.status.as_u16(), &same.body["state"]), (200, &json!("completed")));

    let gone = Answer::of(server.request(Method::DELETE, &format!("/v1/tasks/{done}"))).await;
    assert_eq!(gone.status, 204);
    server.get(&format!("/v1/tasks/{done}")).await.is_problem(404, "not_found");
}

async fn schedules_are_made_paused_and_removed(store: Store) {
    let server = serving(&store).await;
    server.client.announce(&["report"]).await.expect("announced");
    let put = async |name: &str, body: Value| {
        Answer::of(server.request(Method::PUT, &format!("/v1/schedules/{name}")).json(&body)).await
    };
    let body = json!({"cron": "30 2 * * *", "time_zone": "Europe/Berlin", "missed": "run_once",
        "task": {"handler": "report", "input": {"of": "yesterday"}}});
    let made = put("nightly", body).await;
    assert_eq!((made.status.as_u16(), &made.body["time_zone"]), (200, &json!("Europe/Berlin")), "{}", made.body);
    assert!(made.body["next_at"].is_string());
    put("odd", json!({"cron": "x", "task": {"handler": "report"}})).await.is_problem(422, "invalid_field");
    put("odd", json!({"task": {"handler": "report"}})).await.is_problem(422, "invalid_field");
    let paused = server.post("/v1/schedules/nightly/pause", json!({})).await;
    assert_eq!(paused.body["paused"], true);
    let every = put("often", json!({"every": "10m", "task": {"handler": "report"}})).await;
    assert_eq!(every.body["every"], "10m");
    let task = json!({"handler": "report", "input": 1, "timeout": "5m",
        "webhook": {"url": "http://127.0.0.1:9/", "events": ["task.*"]}});
    let whole = put("often", json!({"every": "10m", "task": task})).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    for field in ["timeout", "webhook"] {
        assert_eq!(whole.body["task"][field], task[field], "what was saved can be read, and saved again: {field}");
    }
    assert_eq!(server.get("/v1/schedules").await.body["schedules"].as_array().expect("a list").len(), 2);
    assert_eq!(server.get("/v1/schedules/often").await.body["name"], "often");
    let removed = Answer::of(server.request(Method::DELETE, "/v1/schedules/nightly")).await;
    assert_eq!(removed.status, 204);
    server.get("/v1/schedules/nightly").await.is_problem(404, "not_found");
    server.post("/v1/schedules/nightly/resume", json!({})).await.is_problem(404, "not_found");
}

async fn a_paused_queue_rests(store: Store) {
    let server = serving(&store).await;
    let _worker = server.worker().await;
    server.ended(&server.submit(json!({"handler": "echo"})).await).await;
    assert_eq!(server.post("/v1/queues/default/pause", json!({})).await.status, 200);
    let id = server.submit(json!({"handler": "echo"})).await;
    let queue = server.until("/v1/queues", |body| body["queues"][0]["paused"] == true).await;
    assert_eq!((&queue["queues"][0]["name"], &queue["queues"][0]["pending"]), (&json!("default"), &json!(1)));
    assert_eq!(server.get(&format!("/v1/tasks/{id}/why")).await.body["code"], "queue_paused");
    assert_eq!(server.post("/v1/queues/default/resume", json!({})).await.status, 200);
    assert_eq!(server.ended(&id).await["state"], "completed");
    let stats = server.get("/v1/stats").await.body;
    let workers = server.get("/v1/workers").await.body;
    assert_eq!(stats["workers"][0]["started_at"], workers["workers"][0]["started_at"], "the same here and there");
    assert!(stats["workers"][0]["started_at"].is_string(), "times are times: {stats}");
    assert_eq!(server.get("/v1/workers").await.body["workers"].as_array().expect("a list").len(), 1);
    let handlers = server.get("/v1/handlers").await.body;
    assert!(handlers["handlers"].as_array().expect("a list").iter().any(|handler| handler["name"] == "echo"));
}

async fn every_answer_has_an_id_and_a_place_in_a_trace(store: Store) {
    let server = serving(&store).await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let request = server.request(Method::GET, "/v1/queues");
    let request =
        request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01")).header("x-request-id", "mine-1");
    let answer = Answer::of(request).await;
    assert_eq!(answer.header("x-request-id"), "mine-1");
    assert!(answer.header("traceparent").starts_with(&format!("00-{trace}-")));
    let refused = server.get("/v1/tasks/none").await;
    assert!(!refused.header("x-request-id").is_empty() && !refused.header("traceparent").is_empty());
}

async fn what_is_not_there_is_a_problem(store: Store) {
    let server = serving(&store).await;
    let id = longhaul::TaskId::new();
    for path in [
        "",
        "/events",
        "/steps",
        "/checkpoints",
        "/state",
        "/artifacts",
        "/approvals",
        "/questions",
        "/why",
        "/wait",
        "/deliveries",
        "/export",
    ] {
        for id in [id.to_string(), "odd".to_owned(), "%00".to_owned(), "a%0d%0ab".to_owned()] {
            let answer = server.get(&format!("/v1/tasks/{id}{path}")).await;
            answer.is_problem(404, "not_found");
        }
    }
    for path in ["/cancel", "/resume", "/undo", "/stream-token"] {
        server.post(&format!("/v1/tasks/{id}{path}"), json!({})).await.is_problem(404, "not_found");
    }
    server.get("/nowhere").await.is_problem(404, "not_found");
    Answer::of(server.request(Method::PUT, "/v1/tasks")).await.is_problem(405, "method_not_allowed");
    server.post("/v1/tasks", json!({"handler": "nobody"})).await.is_problem(404, "unknown_handler");
    server.post("/v1/tasks", json!({})).await.is_problem(422, "invalid_field");
    server.post("/v1/tasks", json!({"input": "x"})).await.is_problem(404, "unknown_handler");
}
