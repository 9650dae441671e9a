//! Saga manifests run by a worker: order, groups, placeholders, undo, verify.

mod common;

use common::{Folder, PATIENCE};
use longhaul::{Client, NewTask, State, Task, Worker};
use longhaul_agent::{Host, register};
use serde_json::{Value, json};

/// Runs the folder's saga `s` with this input to its end.
async fn run(folder: &Folder, input: Value) -> Task {
    run_deciding(folder, input, None).await.0
}

/// The same, and decides what is asked; gives the data of what was asked too.
async fn run_deciding(folder: &Folder, input: Value, approve: Option<bool>) -> (Task, Vec<Value>) {
    let loaded = folder.load();
    assert_eq!(loaded.problems, []);
    let client = Client::open("memory:").await.expect("a store in memory");
    let worker =
        register(Worker::new(&client), loaded.manifests, &Host::new(&client, None)).start().await.expect("starts");
    let id = client.submit(NewTask::new("s", &input)).await.expect("accepted").id;
    let mut events = client.events(id, 0).await.expect("the task is there");
    let mut asked = Vec::new();
    let end = async {
        while let Some(event) = events.next().await.expect("the store answers") {
            if event.kind != "approval.requested" {
                continue;
            }
            let approval = event.data["id"].as_str();
            match approve {
                Some(true) => drop(client.approve(id, approval, None, None).await.expect("approved")),
                Some(false) => drop(client.deny(id, approval, Some("not today")).await.expect("denied")),
                None => {}
            }
            asked.push(event.data);
        }
    };
    tokio::time::timeout(PATIENCE, end).await.expect("the task ends");
    let task = client.task(id).await.expect("the task is there");
    worker.stop().await;
    (task, asked)
}

/// A saga whose commands are `./do`, which writes its arguments to `ledger` and prints them.
fn folder(steps: &str) -> Folder {
    let folder = Folder::new();
    folder.script("do", r#"echo "$*" >> ledger; case "$1" in fail*) exit 1;; esac; printf '{"made": "%s"}' "$1""#);
    folder.script("see", r#"printf '%s ' "$1" >> ledger; cat >> ledger; echo >> ledger"#);
    folder.write("s.toml", &format!("[saga]\nname = \"s\"\n{steps}"));
    folder
}

fn ledger(folder: &Folder) -> Vec<String> {
    let text = std::fs::read_to_string(folder.file("ledger")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn json_of(line: &str) -> Value {
    serde_json::from_str(line.split_once(' ').expect("a name").1).expect("JSON")
}

#[tokio::test]
async fn steps_run_in_order_and_see_the_results_before_them() {
    let folder = folder(
        r#"
[[step]]
name = "dns"
command = ["./do", "dns-{{input.app}}"]
[[step]]
name = "cert"
command = ["./do", "cert", "{{steps.dns.result.made}}"]
[[step]]
name = "look"
command = ["./see", "look"]
"#,
    );
    let task = run(&folder, json!({"app": "shop"})).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    let lines = ledger(&folder);
    assert_eq!(lines[..2], ["dns-shop", "cert dns-shop"]);
    let steps = json!({"dns": {"result": {"made": "dns-shop"}}, "cert": {"result": {"made": "cert"}}});
    assert_eq!(json_of(&lines[2]), json!({"input": {"app": "shop"}, "steps": steps}));
    let result: Value = serde_json::from_str(task.result.expect("a result").get()).expect("JSON");
    assert_eq!(result["steps"]["cert"]["result"]["made"], "cert");
    assert_eq!(result["steps"]["look"]["result"], Value::Null);
    assert_eq!(task.progress.expect("progress").message, "Step 3 of 3: look");
}

#[tokio::test]
async fn a_failure_undoes_exactly_what_was_done_last_first() {
    let folder = folder(
        r#"
[[step]]
name = "dns"
command = ["./do", "dns"]
undo = ["./see", "undo-dns-{{result.made}}-{{steps.dns.result.made}}"]
[[step]]
name = "nothing_to_undo"
command = ["./do", "plain"]
[[step]]
name = "cert"
command = ["./do", "cert"]
undo = ["./see", "undo-cert"]
[[step]]
name = "container"
command = ["./do", "fail"]
undo = ["./do", "never"]
attempts = 1
[[step]]
name = "later"
command = ["./do", "later"]
"#,
    );
    let task = run(&folder, json!(1)).await;
    assert_eq!(task.state, State::Failed);
    let lines = ledger(&folder);
    assert_eq!(lines[..4], ["dns", "plain", "cert", "fail"]);
    assert!(lines[4].starts_with("undo-cert ") && lines[5].starts_with("undo-dns-dns-dns "), "{lines:#?}");
    assert_eq!(lines.len(), 6);
    let told = json_of(&lines[4]);
    assert_eq!((&told["input"], &told["result"]), (&json!(1), &json!({"made": "cert"})));
    assert_eq!(told["steps"]["dns"]["result"]["made"], "dns");
}

#[tokio::test]
async fn steps_of_a_group_run_at_the_same_time_and_the_next_waits_for_all() {
    let folder = folder(
        r#"
[[step]]
name = "one"
command = ["./meet", "one", "two"]
group = "g"
[[step]]
name = "two"
command = ["./meet", "two", "one"]
group = "g"
[[step]]
name = "after"
command = ["./do", "after", "{{steps.one.result}}", "{{steps.two.result}}"]
"#,
    );
    // Each waits until the other is there, so they end only when they run together.
    folder.script("meet", "touch \"met-$1\"; until test -e \"met-$2\"; do sleep 0.01; done; echo \"$1\"");
    let task = run(&folder, Value::Null).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    assert_eq!(ledger(&folder), ["after one two"]);
}

#[tokio::test]
async fn a_failed_step_of_a_group_is_the_cause_and_the_others_are_waited_for() {
    let folder = folder(
        r#"
[[step]]
name = "slow"
command = ["./slow"]
group = "g"
undo = ["./do", "undo-slow"]
[[step]]
name = "bad"
command = ["./bad"]
group = "g"
attempts = 1
"#,
    );
    folder.script("slow", "until test -e bad-done; do sleep 0.01; done; sleep 0.1; echo slow-done >> ledger");
    folder.script("bad", "touch bad-done; echo broken >&2; exit 1");
    let task = run(&folder, Value::Null).await;
    let error = task.error.expect("an error");
    assert_eq!(task.state, State::Failed);
    assert!(
        format!("{error}").contains("step bad failed after 1 attempt: ./bad ended with exit code 1: broken"),
        "{error}"
    );
    assert_eq!(ledger(&folder)[0], "slow-done");
}

#[tokio::test]
async fn a_missing_value_fails_the_step_and_says_so() {
    let folder = folder("[[step]]\nname = \"dns\"\ncommand = [\"./do\", \"{{input.app}}\"]\n");
    let task = run(&folder, json!({"name": "shop"})).await;
    let error = task.error.expect("an error");
    assert!(format!("{error}").contains("{{input.app}} has no value: input has only name"), "{error}");
    assert_eq!(ledger(&folder), [""; 0], "nothing was started, and nothing was tried again");
}

#[tokio::test]
async fn a_step_that_takes_too_long_is_killed_with_what_it_started_and_tried_again() {
    let folder = folder("[[step]]\nname = \"slow\"\ncommand = [\"./slow\"]\ntimeout = \"300ms\"\nattempts = 2\n");
    folder.script("slow", "if test -e pid; then echo second; else sleep 60 & echo $! > pid; wait; fi");
    let task = run(&folder, Value::Null).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    let pid = std::fs::read_to_string(folder.file("pid")).expect("written");
    common::until("the sleeper ends", || !common::alive(&pid)).await;
}

#[tokio::test]
async fn verify_settles_what_is_in_doubt() {
    for (says, made) in [(r#"{"done": true, "result": "found"}"#, "once"), (r#"{"done": false}"#, "twice")] {
        let folder = folder(
            r#"
[[step]]
name = "page"
command = ["./page"]
verify = ["./verify"]
effect = "irreversible"
"#,
        );
        folder.script("page", "echo page >> ledger; test -e again && exit 0; touch again; kill -9 $$");
        folder.script("verify", &format!("echo '{says}'"));
        let task = run(&folder, Value::Null).await;
        assert_eq!(task.state, State::Completed, "{:?}", task.error);
        let result: Value = serde_json::from_str(task.result.expect("a result").get()).expect("JSON");
        let (found, times) = if made == "once" { (json!("found"), 1) } else { (Value::Null, 2) };
        assert_eq!((&result["steps"]["page"]["result"], ledger(&folder).len()), (&found, times));
    }
}

const TO_BE_APPROVED: &str = r#"
[[step]]
name = "dns"
command = ["./do", "dns"]
undo = ["./do", "undo-dns"]
[[step]]
name = "live"
approve = "Put {{input.app}} live on {{steps.dns.result.made}}?"
command = ["./do", "live", "{{input.app}}"]
"#;

#[tokio::test]
async fn a_step_with_an_approval_waits_for_it_and_shows_what_will_be_done() {
    let folder = folder(TO_BE_APPROVED);
    let (task, asked) = run_deciding(&folder, json!({"app": "shop"}), Some(true)).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    assert_eq!(ledger(&folder), ["dns", "live shop"]);
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0]["what"], "Put shop live on dns?");
    let shown = asked[0]["subject"].to_string();
    assert!(shown.contains(r#"["./do","live","shop"]"#) && shown.contains("external_action"), "{shown}");
}

#[tokio::test]
async fn an_approval_does_not_serve_a_step_that_was_changed_since() {
    let folder = folder(TO_BE_APPROVED);
    let client = Client::open("memory:").await.expect("a store in memory");
    let start = async || {
        let worker = register(Worker::new(&client), folder.load().manifests, &Host::new(&client, None));
        worker.start().await.expect("starts")
    };
    // Waits for the approval that has so many before it, and gives its id.
    let asked = async |id, before: usize| {
        let mut events = client.events(id, 0).await.expect("the task is there");
        let mut seen = Vec::new();
        let find = async {
            while seen.len() <= before {
                let event = events.next().await.expect("the store answers").expect("it goes on");
                if event.kind == "approval.requested" {
                    seen.push(event.data["id"].as_str().expect("an id").to_owned());
                }
            }
        };
        tokio::time::timeout(PATIENCE, find).await.expect("it is asked");
        seen.remove(before)
    };
    let worker = start().await;
    let id = client.submit(NewTask::new("s", &json!({"app": "shop"}))).await.expect("accepted").id;
    let first = asked(id, 0).await;
    worker.stop().await;
    client.approve(id, Some(&first), None, None).await.expect("approved");
    let changed = TO_BE_APPROVED.replace(r#""live", "{{input.app}}""#, r#""live", "--force", "{{input.app}}""#);
    folder.write("s.toml", &format!("[saga]\nname = \"s\"\n{changed}"));
    let worker = start().await;
    let second = asked(id, 1).await;
    assert_eq!(ledger(&folder), ["dns"], "nothing was done with the old approval");
    client.approve(id, Some(&second), None, None).await.expect("approved");
    let task = client.wait(id, PATIENCE).await.expect("the task ends");
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    assert_eq!(ledger(&folder), ["dns", "live --force shop"]);
    worker.stop().await;
}

#[tokio::test]
async fn a_denial_fails_the_saga_and_undoes_it() {
    let folder = folder(TO_BE_APPROVED);
    let (task, _) = run_deciding(&folder, json!({"app": "shop"}), Some(false)).await;
    assert_eq!(task.state, State::Failed);
    assert_eq!(ledger(&folder), ["dns", "undo-dns"]);
    let error = task.error.expect("an error");
    assert!(error.to_string().contains("denied") && error.to_string().contains("not today"), "{error}");
}

#[tokio::test]
async fn a_step_of_a_group_is_not_begun_when_another_failed_while_it_waited_for_its_approval() {
    let folder = folder(
        r#"
[[step]]
name = "waits"
approve = "May I?"
command = ["./do", "waits"]
group = "g"
[[step]]
name = "bad"
command = ["./do", "fail"]
group = "g"
attempts = 1
"#,
    );
    let (task, asked) = run_deciding(&folder, Value::Null, None).await;
    assert_eq!((task.state, asked.len()), (State::Failed, 1));
    assert_eq!(task.error.expect("an error").details["step"], "bad");
    assert_eq!(ledger(&folder), ["fail"]);
}

#[tokio::test]
async fn steps_of_a_group_can_wait_for_approvals_of_their_own() {
    let step = |name: &str| {
        format!(
            "[[step]]\nname = \"{name}\"\napprove = \"May I?\"\ncommand = [\"./do\", \"{name}\"]\ngroup = \"g\"\n"
        )
    };
    let folder = folder(&[step("one"), step("two")].concat());
    let (task, asked) = run_deciding(&folder, Value::Null, Some(true)).await;
    assert_eq!((task.state, asked.len()), (State::Completed, 2), "{:?}", task.error);
    let mut lines = ledger(&folder);
    lines.sort();
    assert_eq!(lines, ["one", "two"]);
}

#[tokio::test]
async fn the_time_of_a_saga_ends_it_and_undoes_it() {
    let folder = Folder::new();
    folder.script("do", "echo \"$*\" >> ledger; test \"$1\" != slow || sleep 60");
    let steps = r#"
[[step]]
name = "dns"
command = ["./do", "dns"]
undo = ["./do", "undo-dns"]
[[step]]
name = "slow"
command = ["./do", "slow"]
"#;
    folder.write("s.toml", &format!("[saga]\nname = \"s\"\ntimeout = \"2s\"\n{steps}"));
    let task = run(&folder, Value::Null).await;
    assert_eq!((task.state, task.error.expect("an error").code.as_str()), (State::Failed, "deadline_exceeded"));
    assert_eq!(ledger(&folder), ["dns", "slow", "undo-dns"]);
}
