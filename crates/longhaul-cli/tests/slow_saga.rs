//! Sagas and races under `kill -9`: the final picture is the same wherever the kill falls.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use common::{Bed, PATIENCE, WorkerProcess};
use longhaul::{NewTask, State, TaskId};
use serde_json::json;

const STEPS: [&str; 4] = ["create_dns", "create_cert", "deploy_container", "monitoring"];

/// What a deployment does that fails at `fail` (none: not at all), in order.
fn expected(fail: Option<usize>) -> Vec<String> {
    let done = &STEPS[..fail.unwrap_or(STEPS.len())];
    let undone = done.iter().rev().filter(|_| fail.is_some()).map(|name| format!("undo {name}"));
    done.iter().map(|&name| name.to_owned()).chain(undone).collect()
}

/// The effects of each task, in the order of the ledger: step and idempotency key.
fn effects(bed: &Bed, id: TaskId) -> Vec<String> {
    let prefix = format!("effect {id} {id}/");
    let ledger = bed.ledger();
    let mine = ledger.lines().iter().filter_map(|line| line.strip_prefix(&prefix));
    mine.map(|rest| rest.rsplit_once(' ').expect("key and fence").0.to_owned()).collect()
}

/// One deployment by `handler` per outcome and per point at which its worker can be killed; all hang
/// at their point, the worker is killed, another one finishes them.
async fn killed_around_every_step_and_undo(
    bed: Bed,
    handler: &str,
    worker: impl Fn(&Bed, usize) -> WorkerProcess,
) {
    let mut cases = Vec::new();
    for fail in [None, Some(0), Some(1), Some(2), Some(3)] {
        for effect in expected(fail) {
            for when in ["before", "after"] {
                let hang = format!("{when} {effect}");
                let input = json!({"fail": fail.map_or("", |index| STEPS[index]), "hang": hang});
                let id = bed.client.submit(NewTask::new(handler, &input)).await.expect("accepted").id;
                cases.push((id, fail, when, effect.clone()));
            }
        }
    }
    assert_eq!(cases.len(), 8 + 2 * (2 + 4 + 6), "every point");
    let mut first = worker(&bed, cases.len());
    bed.until("every hang", |ledger| ledger.hangs() == cases.len()).await;
    first.kill();
    let second = worker(&bed, cases.len());
    for (id, fail, when, killed) in &cases {
        let task = bed.ended(*id).await;
        let name = format!("fails at {fail:?}, killed {when} {killed}");
        assert_eq!(task.state, if fail.is_some() { State::Failed } else { State::Completed }, "{name}");
        let mut wanted = expected(*fail);
        if *when == "after" {
            // Between the effect and its record: the one place where an effect can happen twice,
            // under one key.
            let at = wanted.iter().position(|effect| effect == killed).expect("one of them");
            wanted.insert(at, killed.clone());
        }
        assert_eq!(effects(&bed, *id), wanted, "{name}");
        if let Some(index) = *fail {
            let error = task.error.expect("says why");
            assert_eq!(error.details["step"], STEPS[index], "{name}");
            let undone: Vec<&str> = STEPS[..index].iter().rev().copied().collect();
            assert_eq!(error.details["undone"], json!(undone), "{name}");
        }
    }
    let ids: Vec<TaskId> = cases.iter().map(|(id, ..)| *id).collect();
    bed.check_histories(&ids).await;
    drop(second);
}

async fn killed_in_rust(bed: Bed) {
    killed_around_every_step_and_undo(bed, "deploy", |bed, slots| bed.worker(slots, 1.0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saga_ends_the_same_wherever_its_worker_is_killed_on_sqlite() {
    killed_in_rust(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saga_ends_the_same_wherever_its_worker_is_killed_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        killed_in_rust(bed).await;
    }
}

/// What every step and undo of the manifest runs: an effect, and a hang where it is told to, in the
/// first run only.
const ACT: &str = r#"#!/bin/sh
name=$1 hang=$2 fail=$3
if [ "$name" = "$fail" ]; then
    echo "$name is broken" >&2
    exit 3
fi
hang_if() {
    if [ "$hang" = "$1 $name" ] && [ "$LONGHAUL_FENCE" = 1 ]; then
        echo "hang $LONGHAUL_TASK_ID $LONGHAUL_FENCE ." >> "$LEDGER"
        sleep 600
    fi
}
hang_if before
echo "effect $LONGHAUL_TASK_ID $LONGHAUL_IDEMPOTENCY_KEY $LONGHAUL_FENCE ." >> "$LEDGER"
hang_if after
"#;

/// The same deployment as a manifest of commands.
async fn killed_as_a_manifest(bed: Bed) {
    let manifests = bed.folder().join("manifests");
    std::fs::create_dir(&manifests).expect("a folder");
    let act = manifests.join("act");
    std::fs::write(&act, ACT).expect("written");
    std::fs::set_permissions(&act, std::fs::Permissions::from_mode(0o755)).expect("may be run");
    let mut manifest = "[saga]\nname = \"deploy_app\"\n".to_owned();
    for step in STEPS {
        manifest += &format!(
            r#"
[[step]]
name = "{step}"
command = ["./act", "{step}", "{{{{input.hang}}}}", "{{{{input.fail}}}}"]
undo = ["./act", "undo {step}", "{{{{input.hang}}}}", ""]
attempts = 1
timeout = "15m"
env = ["LEDGER"]
"#
        );
    }
    std::fs::write(manifests.join("deploy_app.toml"), manifest).expect("written");
    killed_around_every_step_and_undo(bed, "deploy_app", |bed, slots| bed.manifest_worker(&manifests, slots, 1.0))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifests_saga_ends_the_same_wherever_its_worker_is_killed_on_sqlite() {
    killed_as_a_manifest(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifests_saga_ends_the_same_wherever_its_worker_is_killed_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        killed_as_a_manifest(bed).await;
    }
}

/// Tasks that race a timer against a signal and join steps with a wait, while workers are killed, until a
/// thousand rounds were replayed.
async fn races_and_joins_while_workers_are_killed(bed: Bed) {
    const TASKS: usize = 60;
    const ROUNDS: u32 = 6;
    let mut ids: Vec<TaskId> = Vec::new();
    let began = Instant::now();
    let mut told = Rounds::default();
    while told.replayed() < 1_000 {
        let tasks = (0..TASKS).map(|_| NewTask::new("branches", &ROUNDS)).collect();
        let accepted = bed.client.submit_many(tasks).await.expect("the store answers");
        ids.extend(accepted.into_iter().map(|answer| answer.expect("accepted").id));
        kill_workers_until_all_are_done(&bed, &ids, began).await;
        told = Rounds::of(&bed.ledger());
    }
    assert_eq!(told.said.len(), ids.len() * ROUNDS as usize * 2, "every round was told");
    for (round, told) in &told.said {
        assert_eq!(told.len(), 1, "{round} went differently in a replay: {told:?}");
    }
    let branches = |kind: &str| told.said.values().flatten().filter(|told| told.starts_with(kind)).count();
    assert!(branches("timer") > 10 && branches("signal") > 10, "both branches were taken");
    bed.check_histories(&ids).await;
}

async fn kill_workers_until_all_are_done(bed: &Bed, ids: &[TaskId], began: Instant) {
    let mut worker = bed.worker(ids.len(), 0.6);
    let mut kills = 0;
    while bed.count(State::Completed).await < ids.len() {
        assert!(began.elapsed() < PATIENCE, "{} done after {kills} kills", bed.count(State::Completed).await);
        for &id in ids {
            if rand::random_ratio(1, 12) {
                // Refused once the task has ended.
                let _ = bed.client.signal(id, "go", &rand::random::<u32>()).await;
            }
        }
        tokio::time::sleep(Duration::from_millis(rand::random_range(20..400))).await;
        if kills < 12 {
            worker.kill();
            worker = bed.worker(ids.len(), 0.6);
            kills += 1;
        }
    }
}

/// What the tasks said of each round, and how often.
#[derive(Default)]
struct Rounds {
    said: BTreeMap<String, BTreeSet<String>>,
    lines: usize,
}

impl Rounds {
    fn of(ledger: &common::Ledger) -> Self {
        let mut rounds = Self::default();
        for line in ledger.lines() {
            let mut words = line.splitn(4, ' ');
            let (Some(what), Some(id), Some(round), Some(rest)) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                continue;
            };
            if matches!(what, "race" | "joined") {
                rounds.said.entry(format!("{what} {id} {round}")).or_default().insert(rest.to_owned());
                rounds.lines += 1;
            }
        }
        rounds
    }

    fn replayed(&self) -> usize {
        self.lines - self.said.len()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn races_and_joins_go_the_same_way_in_every_replay_on_sqlite() {
    races_and_joins_while_workers_are_killed(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn races_and_joins_go_the_same_way_in_every_replay_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        races_and_joins_while_workers_are_killed(bed).await;
    }
}
