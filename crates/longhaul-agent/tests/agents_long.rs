//! A long run: 300 turns, a crash early and a crash late, on a database file.

mod agent;
mod provider;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent::{Reads, Stage, agent, anything, assert_pairs, calls, says};
use longhaul::state::Budget;
use longhaul::{Risk, State, TaskId};
use longhaul_agent::{Agent, AgentTool};
use provider::{Gate, PATIENCE};
use serde_json::{Value, json};

const EARLY: u64 = 30;
const LATE: u64 = 300;

/// The bytes of a copy of the store, which has no free pages.
async fn stored_bytes(stage: &Stage, folder: &std::path::Path, name: &str) -> u64 {
    let file = folder.join(name);
    stage.client.backup(&file).await.expect("copied");
    std::fs::metadata(&file).expect("a file").len()
}

/// The newest checkpoint's turn.
async fn kept_turn(stage: &Stage, id: TaskId) -> u64 {
    let newest = stage.client.checkpoint_list(id).await.expect("checkpoints").into_iter().next();
    newest.map_or(0, |checkpoint| u64::from(checkpoint.iteration))
}

#[tokio::test]
async fn a_long_run_goes_on_from_a_checkpoint_and_pays_for_no_turn_twice() {
    // Each of the two turns stops where it is, the first time.
    let stops: BTreeMap<u64, (Gate, Arc<AtomicBool>)> =
        [EARLY, LATE].map(|turn| (turn, (Gate::new(), Arc::default()))).into();
    let reached = stops.clone();
    let count = AgentTool::function("count", "Counts", anything(), move |arguments: Value, _| {
        let n = arguments["n"].as_u64().expect("a number");
        let stop = stops.get(&n).cloned();
        async move {
            if let Some((reached, met)) = stop
                && !met.swap(true, Ordering::SeqCst)
            {
                reached.open();
                std::future::pending::<()>().await;
            }
            Ok(json!(format!("counted {n} of many, and a few words that a tool may say about it")))
        }
    });
    let count = count.expect("a tool").risk(Risk::ReadOnly).timeout(PATIENCE);
    let budget = Budget {
        max_steps: 1_000,
        max_wall_time_ms: 3_600_000,
        max_llm_tokens: 1_000_000_000,
        ..Budget::default()
    };
    let counter = Agent { tools: vec![count], budget, ..agent("counter") };
    let folder = tempfile::tempdir().expect("a folder");
    let store = format!("sqlite:{}", folder.path().join("longhaul.db").display());
    let mut stage = Stage::on(&store, "memory:", [counter], |_, asked| {
        let last = asked.result().split_whitespace().nth(1).map_or(0, |n| n.parse().expect("a number"));
        if last < LATE { calls(&[("count", json!({"n": last + 1}))]) } else { says("Counted.") }
    })
    .await;
    let empty = stored_bytes(&stage, folder.path(), "empty.db").await;
    let id = stage.begin("Count to 300.").await;
    let mut per_turn = Vec::new();
    for (turn, (reached, _)) in &reached {
        reached.passed().await;
        let kept = kept_turn(&stage, id).await;
        assert!(kept > 0 && turn - kept <= turn / 4 + 10, "at turn {turn}, the newest checkpoint is of {kept}");
        stage.crash();
        per_turn.push((stored_bytes(&stage, folder.path(), &format!("{turn}.db")).await - empty) / turn);
        stage.work().await;
    }
    let task = stage.end(id).await;
    assert_eq!((task.state, task.usage.expect("usage")["steps"].as_u64()), (State::Completed, Some(LATE + 1)));
    assert!(per_turn[1] <= 2 * per_turn[0], "bytes per turn at turn {EARLY} and {LATE}: {per_turn:?}");
    let asked = stage.asked();
    assert_eq!(asked.len() as u64, LATE + 1, "every turn was paid once");
    let turns: Vec<usize> = asked.iter().map(|asked| asked.results().len()).collect();
    assert!(turns.windows(2).all(|pair| pair[1] == pair[0] + 1), "the conversation goes on: {turns:?}");
    asked.iter().for_each(assert_pairs);
    let refused = stage.events(id).await.into_iter().filter(|event| event.kind == "checkpoint.refused").count();
    assert_eq!(refused, 0);
}
