//! Workers killed with `kill -9`, at named points and at random, on both stores: nothing is lost,
//! and nothing that was recorded is done again.

mod common;

use std::time::{Duration, Instant};

use common::{Bed, PATIENCE, steps};
use longhaul::State;
use serde_json::json;

/// Kills the worker of a task that hangs at `place`; another worker finishes it.
async fn killed_at(bed: &Bed, place: &str, effects_of_the_hanging_step: usize) {
    let id = bed.submit(json!({"steps": 3, "hang": place, "hang_step": 1})).await;
    let before = bed.ledger().hangs();
    let mut first = bed.worker(4, 1.0);
    bed.until("the hang", |ledger| ledger.hangs() > before).await;
    if place == "end" {
        // A handler is given a result a moment before that is on record: the next step waits for it, the hang does not.
        bed.until_recorded(id, "step2").await;
    }
    first.kill();
    let second = bed.worker(4, 1.0);
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "3"), "killed at {place}");
    assert!(task.fence > 1);
    let effects = bed.ledger().effects_by_key();
    let of = |step: u32| effects[&format!("{id}/step{step}")];
    assert_eq!((of(0), of(2)), (1, 1), "killed at {place}: steps that were recorded, or not begun");
    assert_eq!(of(1), effects_of_the_hanging_step, "killed at {place}");
    let recorded = bed.recorded(&[id]).await;
    bed.ledger().check_no_recorded_step_ran_again(&recorded);
    bed.check_histories(&[id]).await;
    drop(second);
}

async fn killed_at_every_point(bed: Bed) {
    killed_at(&bed, "start", 1).await;
    killed_at(&bed, "in_step", 1).await;
    // Between effect and record: the one place where an effect can happen twice, under one key.
    killed_at(&bed, "after_effect", 2).await;
    killed_at(&bed, "end", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_survives_a_kill_at_every_point_on_sqlite() {
    killed_at_every_point(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_survives_a_kill_at_every_point_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        killed_at_every_point(bed).await;
    }
}

/// 2,000 tasks of 5 steps; a worker is killed again and again while they run.
async fn killed_in_a_loop(bed: Bed) {
    const TASKS: usize = 2_000;
    let mut ids = bed.submit_many(1_000, json!({"steps": 5, "step_ms": 2})).await;
    ids.extend(bed.submit_many(1_000, json!({"steps": 5, "step_ms": 2})).await);
    let mut workers: Vec<_> = (0..3).map(|_| bed.worker(32, 0.6)).collect();
    let (began, mut kills) = (Instant::now(), 0);
    while bed.count(State::Completed).await < TASKS {
        assert!(began.elapsed() < PATIENCE, "{} done after {kills} kills", bed.count(State::Completed).await);
        // Kill in the middle of work: once a worker has done something since the last kill.
        let effects = bed.ledger().effects();
        if effects < TASKS * 5 {
            bed.until("progress", |ledger| ledger.effects() >= (effects + 200).min(TASKS * 5)).await;
            workers[kills % 3].kill();
            workers[kills % 3] = bed.worker(32, 0.6);
            kills += 1;
        } else {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    assert!(kills >= 10, "only {kills} kills");
    let effects = bed.ledger().effects_by_key();
    assert_eq!(effects.len(), TASKS * 5, "every step happened");
    let recorded = bed.recorded(&ids).await;
    assert_eq!(recorded.len(), TASKS * 5, "every step is on record, once");
    bed.ledger().check_no_recorded_step_ran_again(&recorded);
    let lost = bed.check_histories(&ids).await - TASKS;
    let twice = effects.values().filter(|&&count| count > 1).count();
    // Only what was under way in a run that was lost can have happened twice.
    assert!(twice <= lost, "{twice} effects happened twice, and {lost} runs were lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_survive_workers_killed_in_a_loop_on_sqlite() {
    killed_in_a_loop(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_survive_workers_killed_in_a_loop_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        killed_in_a_loop(bed).await;
    }
}

/// A worker that is stopped past its lease and continued: its task is finished elsewhere, and
/// nothing of it is accepted any more.
async fn stopped_past_its_lease(bed: Bed) {
    let id = bed.submit(json!({"steps": 3, "hang": "in_step", "hang_step": 1})).await;
    let mut first = bed.worker(1, 1.0);
    bed.until("the hang", |ledger| ledger.hangs() == 1).await;
    first.signal("-STOP");
    // Not in the middle of a write to a SQLite file, which would hold up everyone who shares it.
    while bed.client.announce(&["unused"]).await.is_err() {
        first.signal("-CONT");
        tokio::task::yield_now().await;
        first.signal("-STOP");
    }
    let second = bed.worker(4, 1.0);
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Completed);
    first.signal("-CONT");
    // It gives the task up by itself: its only slot is free for others.
    drop(second);
    let next = bed.submit(steps(2)).await;
    assert_eq!(bed.ended(next).await.state, State::Completed, "the continued worker works");
    let after = bed.client.task(id).await.expect("there");
    assert_eq!((after.fence, after.last_seq), (task.fence, task.last_seq), "nothing was added");
    bed.check_histories(&[id, next]).await;
    first.signal("-TERM");
    let asked = Instant::now();
    while !first.has_ended() {
        assert!(asked.elapsed() < Duration::from_secs(20), "it holds nothing any more, so it ends at once");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_stopped_past_its_lease_gives_up_by_itself_on_sqlite() {
    stopped_past_its_lease(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_stopped_past_its_lease_gives_up_by_itself_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        stopped_past_its_lease(bed).await;
    }
}

/// A task that kills its worker every time ends as poison; the tasks beside it are not harmed.
async fn a_killer_among_others(bed: Bed) {
    let killer = bed.submit(json!({"steps": 1, "kill": true})).await;
    let others = bed.submit_many(20, json!({"steps": 3, "step_ms": 5})).await;
    let mut worker = bed.worker(8, 0.5);
    let began = Instant::now();
    loop {
        let task = bed.client.task(killer).await.expect("there");
        if task.state.is_final() {
            let error = task.error.expect("says why");
            assert_eq!((task.state, error.code.as_str(), task.attempts), (State::Failed, "poison", 0));
            break;
        }
        assert!(began.elapsed() < PATIENCE, "the killer is still {}", task.state);
        if worker.has_ended() {
            worker = bed.worker(8, 0.5);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for id in others {
        let task = bed.ended(id).await;
        assert_eq!((task.state, task.attempts), (State::Completed, 0), "a neighbour lost nothing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_kills_its_worker_ends_as_poison_and_harms_no_other_on_sqlite() {
    a_killer_among_others(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_kills_its_worker_ends_as_poison_and_harms_no_other_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        a_killer_among_others(bed).await;
    }
}

/// SIGTERM: what runs goes on elsewhere, at no cost.
async fn drained(bed: Bed) {
    let ids = bed.submit_many(50, json!({"steps": 20, "step_ms": 20})).await;
    let mut first = bed.worker(50, 15.0);
    bed.until("work", |ledger| ledger.effects() > 100).await;
    first.signal("-TERM");
    let second = bed.worker(50, 15.0);
    let asked = Instant::now();
    while !first.has_ended() {
        assert!(asked.elapsed() < Duration::from_secs(20), "draining ends");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for id in &ids {
        let task = bed.ended(*id).await;
        assert_eq!((task.state, task.attempts), (State::Completed, 0));
        // The count of lost leases begins anew with every record, so it is the history that is asked.
        let mut events = bed.client.events(*id, 0).await.expect("readable");
        while let Some(event) = events.next().await.expect("readable") {
            let told = event.data["message"].as_str().unwrap_or_default();
            assert!(!told.starts_with("The worker was lost"), "a lease was lost: {event:?}");
        }
    }
    bed.check_histories(&ids).await;
    drop(second);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_told_to_stop_loses_nothing_on_sqlite() {
    drained(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_told_to_stop_loses_nothing_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        drained(bed).await;
    }
}

/// An empty queue costs next to nothing.
async fn idle(bed: Bed) {
    let id = bed.submit(steps(1)).await;
    let worker = bed.worker(64, 15.0);
    bed.ended(id).await;
    let (before, began) = (worker.cpu(), Instant::now());
    tokio::time::sleep(Duration::from_secs(10)).await;
    let used = worker.cpu() - before;
    let share = used.as_secs_f64() / began.elapsed().as_secs_f64();
    // A debug build, beside other tests: far from a busy loop, and 1 % in a release build.
    assert!(share < 0.05, "an idle worker uses {:.1} % of a core", share * 100.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_worker_is_no_busy_loop_on_sqlite() {
    idle(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_worker_is_no_busy_loop_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        idle(bed).await;
    }
}
