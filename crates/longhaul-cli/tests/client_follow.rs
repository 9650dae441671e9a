//! `watch`, `wait` and `events`: every event once and in order, whatever happens to the connection; and how
//! they end.

mod standin;

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use serde_json::json;
use standin::{Reply, Request, StandIn, event, stderr, stdout};

fn after(request: &Request) -> u64 {
    request.header("last-event-id").map_or(0, |id| id.parse().expect("a number"))
}

fn is_stream(request: &Request) -> bool {
    request.target == "/v1/tasks/t/events"
}

/// What lines say after their time.
fn said(text: &str) -> Vec<&str> {
    text.lines().map(|line| line.split_once(' ').expect("a time first").1).collect()
}

/// Answers streams by `answer`, which is given the number after which to go on and how many streams there
/// were before; everything else with a task that runs.
fn server(answer: impl Fn(u64, usize) -> Reply + Send + Sync + 'static) -> StandIn {
    let streams = std::sync::atomic::AtomicUsize::new(0);
    StandIn::start(move |request, _| {
        if is_stream(request) {
            return answer(after(request), streams.fetch_add(1, std::sync::atomic::Ordering::SeqCst));
        }
        Reply::json(200, r#"{"id": "t", "state": "running", "last_seq": 3}"#)
    })
}

const OVER: fn() -> Reply = || Reply::Whole { status: 204, headers: vec![], body: String::new() };

/// A task of four events.
fn history() -> Vec<String> {
    vec![
        event(1, "task.submitted", json!({})),
        event(2, "task.started", json!({})),
        event(3, "step.completed", json!({"result": "ok"})),
        event(4, "task.completed", json!({"result": {"done": true}})),
    ]
}

const LINES: [&str; 4] =
    ["task.submitted", "task.started", "step.completed ok", r#"task.completed {"done":true}"#];

#[test]
fn watch_prints_a_line_for_each_event_and_ends_with_the_task() {
    let server = server(|after, _| if after == 4 { OVER() } else { Reply::Events(history()) });
    let output = server.run(&["watch", "t"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(said(&stdout(&output)), LINES);
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_stream_that_is_cut_anywhere_goes_on_after_the_last_whole_event() {
    let whole = history().concat();
    // Cut in a number, in the middle of data, before and after the end of an event.
    for cut in [
        0,
        2,
        10,
        whole.find("\n\n").expect("an end") + 1,
        whole.find("\n\n").expect("an end") + 2,
        whole.len() - 3,
    ] {
        let text = whole.clone();
        let server = server(move |after, before| match (after, before) {
            (4, _) => OVER(),
            (_, 0) => Reply::Events(vec![text[..cut].to_owned()]),
            // A proxy may answer for a server that restarts.
            (_, 1) => Reply::Whole { status: 503, headers: vec![], body: String::new() },
            (_, 2) => Reply::Cut,
            (after, _) => Reply::Events(history()[usize::try_from(after).expect("small")..].to_vec()),
        });
        let output = server.run(&["watch", "t"]);
        assert_eq!(output.status.code(), Some(0), "cut at {cut}: {}", stderr(&output));
        assert_eq!(said(&stdout(&output)), LINES, "cut at {cut}");
    }
}

#[test]
fn events_that_come_twice_are_shown_once_and_one_that_is_left_out_is_asked_for() {
    let server = server(|after, before| match (after, before) {
        (4, _) => OVER(),
        (_, 0) => Reply::Events(vec![history()[0].clone(), history()[0].clone(), history()[2].clone()]),
        _ => Reply::Events(history()),
    });
    let output = server.run(&["watch", "t"]);
    assert_eq!(said(&stdout(&output)), LINES, "{}", stderr(&output));
    let asked: Vec<u64> = server.asked().iter().filter(|request| is_stream(request)).map(after).collect();
    assert_eq!(asked, [0, 1, 4]);
}

#[test]
fn a_task_that_was_resumed_after_it_failed_is_not_over() {
    let events = || {
        vec![
            event(1, "task.submitted", json!({})),
            event(2, "task.failed", json!({"error": {"code": "x", "message": "no"}})),
            event(3, "task.resumed", json!({"by": "me"})),
            event(4, "task.completed", json!({"result": 7})),
        ]
    };
    // Whoever reads a history at the moment of the failure sees the stream end there.
    let server = server(move |after, _| match after {
        0 => Reply::Events(events()[..2].to_vec()),
        4 => OVER(),
        after => Reply::Events(events()[usize::try_from(after).expect("small")..].to_vec()),
    });
    let output = server.run(&["watch", "t"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output).lines().count(), 4);
}

#[test]
fn a_task_that_failed_or_was_cancelled_is_exit_code_1_and_says_why() {
    for (kind, told) in
        [("task.failed", "task t failed: no route [step_failed]"), ("task.cancelled", "task t was cancelled")]
    {
        let data = if kind == "task.failed" {
            json!({"error": {"code": "step_failed", "message": "no route"}})
        } else {
            json!({"reason": "r"})
        };
        let server = server(
            move |after, _| if after == 1 { OVER() } else { Reply::Events(vec![event(1, kind, data.clone())]) },
        );
        let output = server.run(&["watch", "t"]);
        assert_eq!(output.status.code(), Some(1), "{kind}");
        assert_eq!(stderr(&output), format!("longhaul: {told}\n"));
    }
}

#[test]
fn json_is_each_event_as_the_server_wrote_it() {
    let server = server(|after, _| if after == 4 { OVER() } else { Reply::Events(history()) });
    let output = server.run(&["watch", "t", "--json"]);
    let lines: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    let sent: Vec<String> =
        history().iter().map(|event| event.lines().nth(1).expect("data")["data: ".len()..].to_owned()).collect();
    assert_eq!(lines, sent);
}

#[test]
fn events_without_follow_ends_at_what_there_is() {
    // The stream stays open: nothing but the number of the newest event can end it.
    let server = StandIn::start(|request, _| {
        if !is_stream(request) {
            return Reply::json(200, r#"{"id": "t", "state": "running", "last_seq": 2}"#);
        }
        let mut events = history()[..2].to_vec();
        events.drain(..usize::try_from(after(request)).expect("small"));
        Reply::Events(events.into_iter().chain(std::iter::once(": heartbeat\n\n".to_owned())).collect())
    });
    assert_eq!(said(&stdout(&server.run(&["events", "t"]))), &LINES[..2]);
    assert_eq!(said(&stdout(&server.run(&["events", "t", "--after", "1"]))), &LINES[1..2]);
    assert_eq!(stdout(&server.run(&["events", "t", "--after", "2"])), "");
    assert_eq!(stdout(&server.run(&["events", "t", "--after", "99"])), "");
}

#[test]
fn a_server_that_does_not_come_back_is_given_up_with_exit_code_3() {
    let server = server(|_, before| if before == 0 { Reply::Events(history()[..1].to_vec()) } else { Reply::Cut });
    let output = server.run(&["watch", "t", "--reconnect-for", "300ms"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert_eq!(said(&stdout(&output)), &LINES[..1]);
}

#[test]
fn a_server_that_only_repeats_itself_is_given_up_too() {
    let server = server(|_, _| Reply::Events(history()));
    let output = server.run(&["watch", "t", "--reconnect-for", "300ms"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert_eq!(said(&stdout(&output)), LINES, "and each event is shown once");
}

#[test]
fn a_task_that_is_gone_is_exit_code_2() {
    let server = StandIn::start(|_, _| Reply::problem(404, "not_found", "there is no task t"));
    for command in ["watch", "wait", "events"] {
        let output = server.run(&[command, "t"]);
        assert_eq!(
            (output.status.code(), stderr(&output).as_str()),
            (Some(2), "longhaul: there is no task t [not_found]\n"),
            "{command}"
        );
    }
}

#[test]
fn wait_prints_the_result_when_the_task_has_ended_and_forgives_a_restart() {
    let server = StandIn::start(|_, before| match before {
        0 => Reply::json(202, r#"{"id": "t", "state": "running"}"#),
        1 => Reply::Cut,
        _ => Reply::json(200, r#"{"id": "t", "state": "completed", "result": "all good", "error": null}"#),
    });
    let output = server.run(&["wait", "t"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "all good\n"), "{}", stderr(&output));
    let asked: Vec<String> = server.asked().into_iter().map(|request| request.target).collect();
    assert_eq!(asked[0], "/v1/tasks/t/wait?timeout=0s", "whether there is such a task is known at once");
    assert_eq!(asked[1], "/v1/tasks/t/wait?timeout=30s");
    let server = StandIn::start(|_, _| {
        Reply::json(
            200,
            r#"{"id": "t", "state": "failed", "result": null, "error": {"code": "denied", "message": "Ann said no"}}"#,
        )
    });
    let output = server.run(&["wait", "t"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""));
    assert_eq!(stderr(&output), "longhaul: task t failed: Ann said no [denied]\n");
}

#[test]
fn waiting_for_longer_than_wanted_is_exit_code_5() {
    let server = StandIn::start(|_, _| Reply::json(202, r#"{"id": "t", "state": "waiting"}"#));
    let output = server.run(&["wait", "t", "--timeout", "50ms"]);
    assert_eq!(output.status.code(), Some(5));
    assert!(stderr(&output).contains("it is waiting and goes on"), "{}", stderr(&output));
}

#[test]
fn submit_can_wait_and_follow() {
    let server = StandIn::start(|request, _| match request.target.as_str() {
        "/v1/tasks" => Reply::json(202, r#"{"id": "t", "state": "pending"}"#),
        "/v1/tasks/t/events" if after(request) == 4 => OVER(),
        "/v1/tasks/t/events" => Reply::Events(history()),
        _ => Reply::json(200, r#"{"id": "t", "state": "completed", "result": {"n": 1}}"#),
    });
    let output = server.run(&["submit", "h", "{}", "--wait"]);
    assert_eq!(
        (output.status.code(), stdout(&output).as_str(), stderr(&output).as_str()),
        (Some(0), "{\"n\":1}\n", "submitted t\n")
    );
    let output = server.run(&["submit", "h", "{}", "--follow"]);
    assert_eq!(said(&stdout(&output)), LINES);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), "submitted t\n"));
}

#[test]
fn ctrl_c_ends_the_looking_with_130_and_says_that_the_task_goes_on() {
    for command in ["watch", "wait"] {
        // Holds the answer back until the test is over; `watch` shows one event before.
        let server = StandIn::start(|request, before| {
            if is_stream(request) && after(request) == 0 {
                return Reply::Events(vec![history()[0].clone()]);
            }
            if before > 0 || request.target.contains("/wait") {
                std::thread::park();
            }
            Reply::json(200, r#"{"id": "t", "state": "running", "last_seq": 1}"#)
        });
        let mut child = server
            .longhaul(&[command, "t"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        // It hears signals once it waits for an answer that does not come.
        let waits = |asked: &Request| if command == "watch" { after(asked) == 1 } else { true };
        let begun = std::time::Instant::now();
        while !server.asked().iter().any(waits) {
            assert!(begun.elapsed().as_secs() < 60, "{command} asks nothing");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let sent = std::process::Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .status()
            .expect("kill runs");
        assert!(sent.success());
        let status = child.wait().expect("it ends");
        let mut told = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut told).expect("text");
        assert_eq!(status.code(), Some(130), "{command}: {told}");
        assert_eq!(told, "longhaul: interrupted; the task goes on: longhaul watch t\n");
    }
}

#[test]
fn a_reader_that_goes_away_ends_it_without_a_panic() {
    // More than a pipe holds, so that a write must fail.
    let server = StandIn::start(|request, _| {
        if !is_stream(request) {
            return Reply::json(200, r#"{"id": "t", "state": "running", "last_seq": 20000}"#);
        }
        Reply::Events(
            (after(request) + 1..=20_000)
                .map(|seq| event(seq, "progress", json!({"message": "x".repeat(40)})))
                .collect(),
        )
    });
    let mut child = server
        .longhaul(&["events", "t"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut first = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut first).expect("a line");
    assert!(first.contains("progress"));
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}
