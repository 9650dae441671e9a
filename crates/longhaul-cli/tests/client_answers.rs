//! What client commands make of a server's answers: exit codes, stdout and stderr, and what they send.

mod standin;

use std::io::Write;
use std::process::Stdio;

use serde_json::json;
use standin::{Reply, StandIn, longhaul, stderr, stdout};

#[test]
fn every_answer_of_the_server_has_its_exit_code_and_its_sentence() {
    for (status, code) in [
        (400, 2),
        (404, 2),
        (409, 2),
        (412, 2),
        (413, 2),
        (422, 2),
        (401, 4),
        (403, 4),
        (429, 4),
        (500, 3),
        (503, 3),
    ] {
        let server = StandIn::start(move |_, _| Reply::problem(status, "some_code", "it is not to be"));
        let output = server.run(&["show", "t"]);
        assert_eq!(output.status.code(), Some(code), "{status}: {}", stderr(&output));
        assert!(stderr(&output).starts_with("longhaul: it is not to be [some_code]"), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn a_server_that_is_not_there_is_told_at_once_with_what_to_do() {
    // Nobody listens on this port: its service died out long ago.
    let nobody = "http://127.0.0.1:1";
    for command in ["show", "watch", "wait", "cancel"] {
        let output = longhaul(&[command, "t", "--server", nobody]).output().expect("it starts");
        assert_eq!(output.status.code(), Some(3), "{command}");
        assert!(stderr(&output).contains("start it with 'longhaul up'"), "{command}: {}", stderr(&output));
    }
}

#[test]
fn a_full_queue_is_told_with_the_time_to_come_back() {
    let server = StandIn::start(|_, _| {
        Reply::problem(429, "queue_full", "queue 'default' is full").with("retry-after", "7")
    });
    let output = server.run(&["submit", "h", "{}"]);
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(stderr(&output), "longhaul: queue 'default' is full [queue_full]; try again in 7 s\n");
    assert_eq!(server.asked().len(), 1, "it is not tried behind the user's back");
}

#[test]
fn the_token_comes_from_the_environment_or_a_file_and_a_missing_one_is_told() {
    let server = StandIn::start(|request, _| match request.header("authorization") {
        Some("Bearer lh_right") => Reply::json(200, r#"{"queues": []}"#),
        _ => Reply::problem(401, "unauthorized", "a token is needed"),
    });
    let output = server.run(&["queues"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&output).contains("set LONGHAUL_TOKEN"), "{}", stderr(&output));
    let output = server.longhaul(&["queues"]).env("LONGHAUL_TOKEN", "lh_right").output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("token");
    std::fs::write(&file, "lh_right\n").expect("written");
    let output = server.longhaul(&["queues"]).env("LONGHAUL_TOKEN_FILE", &file).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = server.longhaul(&["queues"]).env("LONGHAUL_TOKEN_FILE", "/no/such").output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("LONGHAUL_TOKEN_FILE: /no/such cannot be read"), "{}", stderr(&output));
}

#[test]
fn a_redirect_is_not_followed_with_the_token() {
    let server = StandIn::start(|_, _| Reply::json(307, "").with("location", "http://elsewhere.example/"));
    let output = server.longhaul(&["ps"]).env("LONGHAUL_TOKEN", "lh_x").output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("to http://elsewhere.example/; give --server its final URL"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn submit_sends_what_was_said_and_prints_the_id_alone() {
    let server = StandIn::start(|_, _| Reply::json(202, r#"{"id": "0198", "b": 1.0, "a": 2}"#));
    let output = server.run(&[
        "submit",
        "deploy",
        r#"{"app": "shop"}"#,
        "--priority",
        "9",
        "--queue",
        "urgent",
        "--timeout",
        "7d",
        "--key",
        "k-1",
        "--webhook",
        "https://x.example/h",
        "--tag",
        "team=a",
        "--tag",
        "env=prod=1",
        "--concurrency-key",
        "db",
        "--max-attempts",
        "2",
        "--run-at",
        "2026-12-24T18:00:00Z",
    ]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "0198\n"), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
    let asked = &server.asked()[0];
    assert_eq!((asked.method.as_str(), asked.target.as_str()), ("POST", "/v1/tasks"));
    assert_eq!(asked.header("idempotency-key"), Some("k-1"));
    assert_eq!(
        asked.json(),
        json!({"handler": "deploy", "input": {"app": "shop"}, "priority": 9, "queue": "urgent", "timeout": "168h",
               "webhook": {"url": "https://x.example/h"}, "tags": {"team": "a", "env": "prod=1"},
               "concurrency_key": "db", "max_attempts": 2, "run_at": "2026-12-24T18:00:00Z"})
    );
    let output = server.run(&["submit", "ask", "Disk is full", "--json"]);
    assert_eq!(stdout(&output), "{\"id\": \"0198\", \"b\": 1.0, \"a\": 2}\n", "as the server wrote it");
    assert_eq!(server.asked()[1].json(), json!({"handler": "ask", "input": "Disk is full"}));
}

#[test]
fn input_comes_from_stdin_too() {
    let server = StandIn::start(|_, _| Reply::json(202, r#"{"id": "0198"}"#));
    let mut child = server
        .longhaul(&["submit", "ask", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    child.stdin.take().expect("piped").write_all(b"two\nlines\n").expect("written");
    assert!(child.wait().expect("it ends").success());
    assert_eq!(server.asked()[0].json()["input"], "two\nlines");
}

#[test]
fn a_submit_whose_answer_is_lost_is_sent_again_under_the_same_key() {
    let server =
        StandIn::start(|_, before| if before == 0 { Reply::Cut } else { Reply::json(202, r#"{"id": "0198"}"#) });
    let output = server.run(&["submit", "h", "{}"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "0198\n"), "{}", stderr(&output));
    let asked = server.asked();
    assert_eq!(asked.len(), 2);
    assert!(asked[0].header("idempotency-key").is_some_and(|key| !key.is_empty()));
    assert_eq!(asked[0].header("idempotency-key"), asked[1].header("idempotency-key"));
}

#[test]
fn what_is_not_safe_to_repeat_is_sent_once() {
    let server = StandIn::start(|_, _| Reply::Cut);
    let output = server.run(&["signal", "t", "go", "{}"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(stderr(&output).contains("the request may have been done"), "{}", stderr(&output));
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn wrong_usage_is_told_before_anything_is_sent() {
    let server = StandIn::start(|_, _| Reply::json(200, "{}"));
    for args in [
        &["submit", "h", "{}", "--priority", "10"][..],
        &["submit", "h", "{}", "--timeout", "soon"],
        &["submit", "h", "{}", "--tag", "novalue"],
        &["submit", "h", "{}", "--tag", "a=1", "--tag", "a=2"],
        &["submit", "h", "{}", "--run-at", "tomorrow"],
        &["submit", "h", "@/no/such/file"],
        &["submit", "h", "{}", "--key", "line\nbreak"],
        &["decide", "t", "s", "retry", "--result", "1"],
        &["state", "t", "--patch", "not json"],
        &["show", ".."],
        &["show", ""],
        &["ps", "--state", "asleep"],
        &["schedules", "set", "n", "--handler", "h", "--input", "{}"],
        &["ps", "--server", "localhost:1"],
        &["nonsense"],
    ] {
        let output = server.run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    assert!(server.asked().is_empty());
}

#[test]
fn every_command_asks_what_the_contract_says() {
    for (args, method, target, body) in [
        (&["show", "t"][..], "GET", "/v1/tasks/t", None),
        (&["why", "t"], "GET", "/v1/tasks/t/why", None),
        (&["steps", "t"], "GET", "/v1/tasks/t/steps", None),
        (&["export", "t"], "GET", "/v1/tasks/t/export", None),
        (&["delete", "t"], "DELETE", "/v1/tasks/t", None),
        (&["cancel", "t"], "POST", "/v1/tasks/t/cancel", Some(json!({"undo": false}))),
        (
            &["cancel", "t", "--undo", "--reason", "r"],
            "POST",
            "/v1/tasks/t/cancel",
            Some(json!({"undo": true, "reason": "r"})),
        ),
        (&["resume", "t"], "POST", "/v1/tasks/t/resume", Some(json!({}))),
        (&["undo", "t", "--reason", "r"], "POST", "/v1/tasks/t/undo", Some(json!({"reason": "r"}))),
        (&["fork", "t", "--from-step", "s"], "POST", "/v1/tasks/t/fork", Some(json!({"from_step": "s"}))),
        (
            &["fork", "t", "--from-step", "s", "--input", "[1]"],
            "POST",
            "/v1/tasks/t/fork",
            Some(json!({"from_step": "s", "input": [1]})),
        ),
        (&["priority", "t", "0"], "POST", "/v1/tasks/t/priority", Some(json!({"priority": 0}))),
        (&["message", "t", "hi"], "POST", "/v1/tasks/t/messages", Some(json!({"text": "hi"}))),
        (&["signal", "t", "a b", "{\"x\": 1}"], "POST", "/v1/tasks/t/signals/a%20b", Some(json!({"x": 1}))),
        (
            &["decide", "t", "s#2", "done", "--result", "7"],
            "POST",
            "/v1/tasks/t/steps/s%232/decision",
            Some(json!({"decision": "done", "result": 7})),
        ),
        (
            &["decide", "t", "s", "fail", "--reason", "r"],
            "POST",
            "/v1/tasks/t/steps/s/decision",
            Some(json!({"decision": "fail", "reason": "r"})),
        ),
        (
            &["approve", "t", "a1", "--reason", "r"],
            "POST",
            "/v1/tasks/t/approvals/a1",
            Some(json!({"decision": "approve", "reason": "r"})),
        ),
        (&["deny", "t", "a1"], "POST", "/v1/tasks/t/approvals/a1", Some(json!({"decision": "deny"}))),
        (
            &["answer", "t", "42", "--question", "q1"],
            "POST",
            "/v1/tasks/t/questions/q1",
            Some(json!({"answer": "42"})),
        ),
        (&["approvals"], "GET", "/v1/approvals", None),
        (&["state", "t"], "GET", "/v1/tasks/t/state", None),
        (&["artifacts", "t"], "GET", "/v1/tasks/t/artifacts", None),
        (&["artifact", "t", "a"], "GET", "/v1/tasks/t/artifacts/a", None),
        (&["queues"], "GET", "/v1/queues", None),
        (&["queues", "pause", "q"], "POST", "/v1/queues/q/pause", Some(json!({}))),
        (&["queues", "resume", "q"], "POST", "/v1/queues/q/resume", Some(json!({}))),
        (&["workers"], "GET", "/v1/workers", None),
        (&["schedules", "list"], "GET", "/v1/schedules", None),
        (&["schedules", "show", "n"], "GET", "/v1/schedules/n", None),
        (&["schedules", "pause", "n"], "POST", "/v1/schedules/n/pause", Some(json!({}))),
        (&["schedules", "resume", "n"], "POST", "/v1/schedules/n/resume", Some(json!({}))),
        (&["schedules", "delete", "n"], "DELETE", "/v1/schedules/n", None),
        (
            &[
                "schedules",
                "set",
                "n",
                "--every",
                "10m",
                "--handler",
                "h",
                "--input",
                "{}",
                "--missed",
                "run-once",
            ],
            "PUT",
            "/v1/schedules/n",
            Some(json!({"every": "10m", "missed": "run_once", "task": {"handler": "h", "input": {}}})),
        ),
        (
            &[
                "schedules",
                "set",
                "n",
                "--cron",
                "0 9 * * *",
                "--time-zone",
                "UTC",
                "--handler",
                "h",
                "--input",
                "x",
                "--priority",
                "7",
            ],
            "PUT",
            "/v1/schedules/n",
            Some(
                json!({"cron": "0 9 * * *", "time_zone": "UTC", "task": {"handler": "h", "input": "x", "priority": 7}}),
            ),
        ),
        (&["webhooks", "deliveries", "t"], "GET", "/v1/tasks/t/deliveries", None),
        (&["webhooks", "redeliver", "t", "d"], "POST", "/v1/tasks/t/deliveries/d/redeliver", Some(json!({}))),
        (
            &["ps", "--state", "failed", "--tag", "a=b c", "--q", "x&y", "--limit", "3", "--oldest"],
            "GET",
            "/v1/tasks?state=failed&tag=a%3Db%20c&q=x%26y&order=created_at&limit=3",
            None,
        ),
    ] {
        // Every list there is, and what a task has.
        let all = r#"{"id": "t2", "state": "completed", "version": 3, "sentence": "because", "steps": [], "approvals": [], "artifacts": [],
            "queues": [], "workers": [], "schedules": [], "deliveries": [], "tasks": [], "next_cursor": null}"#;
        let server = StandIn::start(move |_, _| Reply::json(200, all));
        let output = server.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        let asked = server.asked();
        assert_eq!(asked.len(), 1, "{args:?}");
        assert_eq!((asked[0].method.as_str(), asked[0].target.as_str()), (method, target), "{args:?}");
        match body {
            Some(body) => assert_eq!(asked[0].json(), body, "{args:?}"),
            None => assert_eq!(asked[0].body, "", "{args:?}"),
        }
        if args[0] == "artifact" {
            continue;
        }
        let server = StandIn::start(move |_, _| Reply::json(200, all));
        let output = server.run(&[args, &["--json"]].concat());
        assert_eq!(stdout(&output), format!("{all}\n"), "{args:?} with --json gives the server's JSON as it is");
    }
}

#[test]
fn the_only_open_approval_or_question_is_found_and_of_several_none_is_chosen() {
    let answers = |open: &'static str, questions: &'static str| {
        StandIn::start(move |request, _| match (request.method.as_str(), request.target.as_str()) {
            ("GET", "/v1/tasks/t/approvals") => Reply::json(200, open),
            ("GET", "/v1/tasks/t/questions") => Reply::json(200, questions),
            _ => Reply::json(200, "{}"),
        })
    };
    let one = answers(
        r#"{"approvals": [{"id": "old", "status": "used"}, {"id": "a1", "status": "pending", "reason": "Go live?"}]}"#,
        r#"{"questions": [{"id": "q0", "question": "?", "answer": "x"}, {"id": "q1", "question": "Which?", "answer": null}]}"#,
    );
    let output = one.run(&["approve", "t"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("Go live?"), "what was approved is told: {}", stderr(&output));
    assert_eq!(one.asked()[1].target, "/v1/tasks/t/approvals/a1");
    assert_eq!(one.run(&["answer", "t", "eu"]).status.code(), Some(0));
    assert_eq!(one.asked()[3].target, "/v1/tasks/t/questions/q1");
    let many = answers(
        r#"{"approvals": [{"id": "a1", "status": "pending"}, {"id": "a2", "status": "pending"}]}"#,
        r#"{"questions": []}"#,
    );
    let output = many.run(&["deny", "t"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("a1") && stderr(&output).contains("a2"), "{}", stderr(&output));
    assert_eq!(many.run(&["answer", "t", "eu"]).status.code(), Some(2));
    assert!(many.asked().iter().all(|asked| asked.method == "GET"), "nothing was decided");
}

#[test]
fn a_change_of_state_by_someone_else_in_between_is_not_overwritten() {
    let server = StandIn::start(|request, _| match request.method.as_str() {
        "GET" => Reply::json(200, r#"{"version": 3, "state": {}}"#).with("etag", "\"3\""),
        _ if request.header("if-match") == Some("\"3\"") => Reply::json(200, r#"{"version": 4, "state": {}}"#),
        _ => Reply::problem(412, "version_changed", "the state has version 3"),
    });
    let output = server.run(&["state", "t", "--patch", r#"{"set_goal": "x"}"#]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(server.asked()[1].json(), json!({"set_goal": "x"}));
    let output = server.run(&["state", "t", "--patch", r#"{"set_goal": "x"}"#, "--if-version", "2"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("longhaul state t"), "{}", stderr(&output));
}

#[test]
fn ps_is_a_table_without_colours_on_a_pipe_and_all_follows_the_cursors() {
    let server = StandIn::start(|request, _| {
        let task = |id: &str, state: &str| {
            json!({"id": id, "state": state, "handler": "h", "queue": "default", "priority": 5, "input": "a\u{1b}[31mb\nc",
                   "created_at": "2026-01-02T12:00:00Z", "error": null, "result": null, "progress": null, "waiting_for": null})
        };
        let second = request.target.contains("cursor=c%2F2");
        let tasks =
            if second { vec![task("t3", "failed")] } else { vec![task("t1", "running"), task("t2", "pending")] };
        let next = if second { json!(null) } else { json!("c/2") };
        Reply::json(200, json!({"tasks": tasks, "next_cursor": next}).to_string())
    });
    let output = server.run(&["ps"]);
    let table = stdout(&output);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    assert!(lines[0].starts_with("ID  STATE    HANDLER  QUEUE    PRIO  AGE"), "{table}");
    assert!(lines[1].starts_with("t1  running  h        default  5"), "{table}");
    assert!(!table.contains('\u{1b}'), "text of others cannot drive the terminal: {table}");
    assert!(stderr(&output).contains("--all"), "{}", stderr(&output));
    let output = server.run(&["ps", "--all", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one document");
    let ids: Vec<&str> =
        all["tasks"].as_array().expect("a list").iter().filter_map(|task| task["id"].as_str()).collect();
    assert_eq!((ids, &all["next_cursor"]), (vec!["t1", "t2", "t3"], &json!(null)));
}

#[test]
fn an_artifact_is_written_whole_or_not_at_all() {
    let server = StandIn::start(|request, _| match request.target.as_str() {
        "/v1/tasks/t/artifacts/whole" => Reply::json(200, "some bytes"),
        _ => Reply::Half("half".to_owned()),
    });
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("out");
    let path = file.display().to_string();
    assert_eq!(stdout(&server.run(&["artifact", "t", "whole"])), "some bytes");
    assert_eq!(server.run(&["artifact", "t", "whole", "-o", &path]).status.code(), Some(0));
    assert_eq!(std::fs::read_to_string(&file).expect("written"), "some bytes");
    let output = server.run(&["artifact", "t", "broken", "-o", &path]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert_eq!(std::fs::read_to_string(&file).expect("still there"), "some bytes");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left over");
}

#[test]
fn a_part_of_an_artifact_is_asked_for_as_a_range() {
    let server = StandIn::start(|request, _| Reply::json(206, request.header("range").unwrap_or("none")));
    assert_eq!(stdout(&server.run(&["artifact", "t", "a", "--range", "0-999"])), "bytes=0-999");
    assert_eq!(stdout(&server.run(&["artifact", "t", "a", "--range", "-500"])), "bytes=-500");
    let output = server.run(&["artifact", "t", "a", "--range", "lines"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("0-999, 1000- or -500"), "{}", stderr(&output));
    let output = server.run(&["artifact", "t", "a", "--range", "5-2"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "not everything instead");
    assert!(stderr(&output).contains("write 2-5"), "{}", stderr(&output));
}

#[test]
fn an_answer_that_is_not_longhauls_is_told_as_such() {
    let server = StandIn::start(|_, _| Reply::Whole { status: 200, headers: vec![], body: "<html>".to_owned() });
    let output = server.run(&["ps"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(stderr(&output).contains("is it Longhaul?"), "{}", stderr(&output));
}
