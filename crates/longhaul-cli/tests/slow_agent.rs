//! Agents of the real binary: end to end as people use them, under `kill -9` after every event, and with effects in doubt.

mod common;
mod endpoint;
mod node;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Bed, PATIENCE, WorkerProcess};
use endpoint::{Conversation, Endpoint, Says};
use longhaul::{Decision, Event, Events, NewTask, State, StepState, TaskId};
use node::{Node, Store};
use serde_json::json;
use serde_json::value::to_raw_value;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const OUT_OF_SPACE: &str = "I'm out of disk space. Fix it.";

/// Plans, looks, cleans, looks again and says what came of it.
fn fixes_the_disk(so_far: &Conversation<'_>) -> Says {
    match so_far.turn() {
        0 => Says::Calls(vec![
            (
                "update_plan",
                json!({"plan": ["Check the disk", "Clean the logs"], "current_step": "Check the disk"}),
            ),
            ("check_disk", json!({})),
        ]),
        1 => Says::Calls(vec![("clean_logs", json!({"days": 7}))]),
        2 => Says::Text(format!("Done. {}", so_far.result())),
        _ => Says::Text("There was nothing left to say.".to_owned()),
    }
}

// ------------------------------------------------------------------ as people use it

async fn the_disk_is_fixed(store: Store) {
    let endpoint = Endpoint::start(fixes_the_disk).await;
    let agents = store.folder().join("agents");
    let made = Command::new(env!("CARGO_BIN_EXE_longhaul")).arg("init").arg(&agents).output().expect("it runs");
    assert!(made.status.success(), "{made:?}");
    let node = Node::start_at(&store, &agents, "127.0.0.1:0", &[("OPENAI_BASE_URL", &endpoint.url)]).await;
    let logs = || {
        let mut names: Vec<String> = std::fs::read_dir(agents.join("sandbox/logs"))
            .expect("the sandbox")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    let all = logs();
    assert_eq!(all.len(), 4);

    let id = node.submit(json!({"handler": "devops", "input": OUT_OF_SPACE})).await;
    let approval = node.approval(&id).await;
    let asked = node.get(&format!("/v1/tasks/{id}/approvals")).await;
    assert_eq!(asked["approvals"][0]["tool"], "clean_logs");
    assert_eq!(asked["approvals"][0]["arguments"], json!({"days": 7}));
    assert_eq!(asked["approvals"][0]["risk"], "write_local");
    assert_eq!(logs(), all, "nothing is deleted before someone allows it");
    node.post(&format!("/v1/tasks/{id}/approvals/{approval}"), json!({"decision": "approve"})).await;
    let task = node.ended(&id).await;
    assert_eq!(task["state"], "completed", "{task}");
    let answer = task["result"].as_str().expect("an answer");
    assert!(answer.starts_with("Done. ") && answer.contains("freed_kb"), "{answer}");
    assert_eq!(task["usage"]["steps"], 3, "{task}");
    assert_eq!(logs(), ["today.log"]);
    let state = node.get(&format!("/v1/tasks/{id}/state")).await;
    assert_eq!(state["state"]["goal"], OUT_OF_SPACE);
    assert_eq!(state["state"]["plan"], json!(["Check the disk", "Clean the logs"]));

    let undo = node.post(&format!("/v1/tasks/{id}/undo"), json!({})).await;
    let undone = node.ended(undo["id"].as_str().expect("an id")).await;
    assert_eq!(undone["state"], "completed", "{undone}");
    assert_eq!(logs(), all, "what was deleted is back");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_fixes_the_disk_with_approval_and_undo_on_sqlite() {
    the_disk_is_fixed(Store::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_fixes_the_disk_with_approval_and_undo_on_postgres() {
    if let Some(store) = Store::postgres().await {
        the_disk_is_fixed(store).await;
    }
}

// ------------------------------------------------------------------ killed after every event

const STRATEGIES: [&str; 3] = ["every_step", "every_iteration", "on_state_change"];

/// Agents whose effects are lines of the file `ledger` beside them: `WHAT TASK KEY .`
fn agents(folder: &Path) -> PathBuf {
    let folder = folder.join("agents");
    std::fs::create_dir_all(&folder).expect("a folder");
    let program = |name: &str, script: &str| {
        let file = folder.join(name);
        std::fs::write(&file, format!("#!/bin/sh\nset -eu\n{script}\n")).expect("written");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("executable");
    };
    let line = r#"printf '%s %s %s .\n' NAME "$LONGHAUL_TASK_ID" "$LONGHAUL_IDEMPOTENCY_KEY" >> ledger"#;
    program("check", &format!("{}\necho 'disk usage: 97%'", line.replace("NAME", "check")));
    program("clean", &format!("{}\necho 'freed 2 GB'", line.replace("NAME", "clean")));
    program(
        "cleaned",
        r#"if grep -q "^clean $LONGHAUL_TASK_ID $LONGHAUL_IDEMPOTENCY_KEY \.$" ledger
then echo '{"done": true, "result": "freed 2 GB"}'; else echo '{"done": false}'; fi"#,
    );
    program(
        "charge",
        &format!("{}\nif [ -e hang ]; then sleep 600; fi\necho charged", line.replace("NAME", "charge")),
    );
    std::fs::write(folder.join("ledger"), "").expect("written");
    for strategy in STRATEGIES {
        let manifest = format!(
            r#"
[agent]
name = "{strategy}"
model = "scripted"
[agent.checkpoint]
strategy = "{strategy}"
[[tool]]
name = "check_disk"
description = "Shows how full the disk is"
command = ["./check"]
risk = "read_only"
sandbox = false
[[tool]]
name = "clean_logs"
description = "Deletes logs"
command = ["./clean"]
parameters = {{ type = "object", properties = {{ days = {{ type = "integer" }} }} }}
risk = "write_local"
effect = "irreversible"
verify = "cleaned"
sandbox = false
[[tool]]
name = "cleaned"
description = "Says whether logs were deleted"
command = ["./cleaned"]
parameters = {{ type = "object" }}
risk = "read_only"
sandbox = false
[[tool]]
name = "charge"
description = "Charges the card"
command = ["./charge"]
risk = "read_only"
effect = "irreversible"
sandbox = false
"#
        );
        std::fs::write(folder.join(format!("{strategy}.toml")), manifest).expect("written");
    }
    folder
}

/// The lines of the ledger about one task.
fn effects(agents: &Path, what: &str, id: TaskId) -> usize {
    let ledger = std::fs::read_to_string(agents.join("ledger")).expect("a ledger");
    let begin = format!("{what} {id} ");
    ledger.lines().filter(|line| line.starts_with(&begin) && line.ends_with(" .")).count()
}

/// What the cases of one store share.
struct Shared {
    bed: Bed,
    endpoint: Endpoint,
    agents: PathBuf,
}

impl Shared {
    async fn new(bed: Bed, script: endpoint::Script) -> Arc<Self> {
        let agents = agents(bed.folder());
        bed.client.announce(&STRATEGIES).await.expect("announced");
        Arc::new(Self { endpoint: Endpoint::start(script).await, agents, bed })
    }

    /// A worker process for the tasks of one queue.
    fn worker(&self, queue: &str) -> WorkerProcess {
        let child = Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["worker", "--store", &self.bed.url, "--workers", "2", "--lease", "2", "--queues", queue])
            .arg("--manifests")
            .arg(&self.agents)
            .env("OPENAI_BASE_URL", &self.endpoint.url)
            .env("LONGHAUL_ARTIFACTS", self.bed.folder().join("artifacts"))
            .env("LONGHAUL_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("the worker starts");
        WorkerProcess::of(child)
    }

    async fn submit(&self, agent: &str, queue: &str, goal: &str) -> TaskId {
        let mut task = NewTask::new(agent, &goal);
        queue.clone_into(&mut task.queue);
        self.bed.client.submit(task).await.expect("accepted").id
    }

    async fn next(&self, events: &mut Events) -> Option<Event> {
        tokio::time::timeout(PATIENCE, events.next()).await.expect("something happens").expect("the store answers")
    }

    async fn approve(&self, id: TaskId, asked: &Event) {
        let approval = asked.data["id"].as_str().expect("an id");
        self.bed.client.approve(id, Some(approval), None, None).await.expect("approved");
    }

    /// Model calls whose answer is on record.
    async fn thoughts(&self, id: TaskId) -> usize {
        let steps = self.bed.client.steps(id).await.expect("the task is there");
        steps.iter().filter(|step| step.kind == "model" && step.state == StepState::Completed).count()
    }
}

/// Runs one task, kills its worker once event number `after` is there, and lets another one finish it. Gives how
/// many events it had.
async fn killed_once(shared: Arc<Shared>, strategy: &'static str, after: u64) -> u64 {
    let name = format!("{strategy}, killed after event {after}");
    let queue = format!("{strategy}-{after}");
    let goal = format!("{OUT_OF_SPACE} ({queue})");
    let id = shared.submit(strategy, &queue, &goal).await;
    let mut events = shared.bed.client.events(id, 0).await.expect("the task is there");
    let mut worker = shared.worker(&queue);
    let mut asked = None;
    let mut last = 0;
    while let Some(event) = shared.next(&mut events).await {
        last = event.seq;
        let asks = event.kind == "approval.requested";
        if event.seq >= after {
            asked = Some(event).filter(|_| asks);
            break;
        }
        if asks {
            shared.approve(id, &event).await;
        }
    }
    worker.kill();
    let recorded = shared.thoughts(id).await;
    let paid = shared.endpoint.calls_by_turn(&goal);
    let second = shared.worker(&queue);
    if let Some(asked) = asked {
        shared.approve(id, &asked).await;
    }
    while let Some(event) = shared.next(&mut events).await {
        last = event.seq;
        if event.kind == "approval.requested" {
            shared.approve(id, &event).await;
        }
    }
    drop(second);
    let task = shared.bed.ended(id).await;
    assert_eq!(task.state, State::Completed, "{name}: {:?}", task.error);
    assert_eq!(task.result.expect("an answer").get(), r#""Done. freed 2 GB""#, "{name}");
    assert_eq!(effects(&shared.agents, "clean", id), 1, "{name}: the logs were cleaned once");
    assert!(effects(&shared.agents, "check", id) >= 1, "{name}");
    let calls = shared.endpoint.calls_by_turn(&goal);
    assert_eq!(calls.len(), 3, "{name}: {calls:?}");
    for turn in 0..recorded {
        assert_eq!(calls[&turn], paid[&turn], "{name}: turn {turn} was on record and was paid again: {calls:?}");
    }
    shared.bed.check_histories(&[id]).await;
    last
}

async fn killed_after_every_event(bed: Bed) {
    let shared = Shared::new(bed, fixes_the_disk).await;
    let mut cases = JoinSet::new();
    // More processes at once would only wait for each other.
    let room = Arc::new(Semaphore::new(4));
    let mut killed = 0;
    for strategy in STRATEGIES {
        // One that nobody disturbs: the kill comes after the last event.
        let events = killed_once(Arc::clone(&shared), strategy, u64::MAX).await;
        assert!(events > 20, "{strategy}: {events} events");
        for after in 1..events {
            let (shared, room) = (Arc::clone(&shared), Arc::clone(&room));
            killed += 1;
            cases.spawn(async move {
                let _permit = room.acquire_owned().await.expect("never closed");
                killed_once(shared, strategy, after).await
            });
        }
    }
    assert_eq!(cases.join_all().await.len(), killed);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_after_any_event_gives_the_same_answer_on_sqlite() {
    killed_after_every_event(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_after_any_event_gives_the_same_answer_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        killed_after_every_event(bed).await;
    }
}

// ------------------------------------------------------------------ in doubt

/// Charges the card once and says what came of it.
fn charges(so_far: &Conversation<'_>) -> Says {
    match so_far.turn() {
        0 => Says::Calls(vec![("charge", json!({}))]),
        _ => Says::Text(so_far.result().to_owned()),
    }
}

/// A worker dies between an effect that must not happen twice and its record; a person decides.
async fn decided(bed: Bed) {
    let shared = Shared::new(bed, charges).await;
    let client = &shared.bed.client;
    let cases = [
        (Decision::Retry, 2, "charged"),
        (Decision::Done(to_raw_value("charged, says the bank").expect("JSON")), 1, "charged, says the bank"),
        (Decision::Fail, 1, "charge failed"),
    ];
    for (decision, times, answer) in cases {
        let name = decision.name();
        std::fs::write(shared.agents.join("hang"), "").expect("written");
        let id = shared.submit("every_step", name, "Charge the card").await;
        let mut worker = shared.worker(name);
        let mut events = client.events(id, 0).await.expect("the task is there");
        let began = Instant::now();
        while effects(&shared.agents, "charge", id) == 0 {
            // The tool writes to a file, which nobody can be told of.
            assert!(began.elapsed() < PATIENCE, "{name}: the card is not charged");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        worker.kill();
        std::fs::remove_file(shared.agents.join("hang")).expect("removed");
        let second = shared.worker(name);
        loop {
            let event = shared.next(&mut events).await.expect("it waits before it ends");
            if event.kind == "task.waiting" {
                assert_eq!(event.data["kind"], "in_doubt", "{name}");
                break;
            }
        }
        assert_eq!(effects(&shared.agents, "charge", id), 1, "{name}: not tried again before someone decides");
        client.decide(id, "charge", decision.clone(), Some("checked")).await.expect("decided");
        let task = shared.bed.ended(id).await;
        assert_eq!(task.state, State::Completed, "{name}: {:?}", task.error);
        let said: String = serde_json::from_str(task.result.expect("an answer").get()).expect("a text");
        assert!(said.starts_with(answer), "{name}: {said}");
        assert_eq!(effects(&shared.agents, "charge", id), times, "{name}");
        drop(second);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_effect_in_doubt_waits_for_a_decision_on_sqlite() {
    decided(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_effect_in_doubt_waits_for_a_decision_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        decided(bed).await;
    }
}
