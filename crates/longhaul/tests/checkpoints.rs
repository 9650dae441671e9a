//! Snapshots and state: going on without replaying, refusing what cannot be trusted.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::{CheckpointPolicy, NewTask, OnRefused, Run, State, StatePatch, TaskError, Worker};

type Notes = Arc<Mutex<Vec<String>>>;

fn note(notes: &Notes, text: String) {
    notes.lock().expect("no panic").push(text);
}

/// Counts to ten in steps, with a snapshot after every third, and fails once after `fail_at`.
async fn count(notes: Notes, version: u32, run: Run, fail_at: u32) -> Result<u32, TaskError> {
    let policy = CheckpointPolicy::default();
    let from = run.resume::<u32>(version, policy).await?;
    note(&notes, format!("from {from:?}"));
    let mut at = from.unwrap_or(0);
    while at < 10 {
        at = run
            .step("count", || {
                note(&notes, format!("effect {}", at + 1));
                async move { Ok::<_, TaskError>(at + 1) }
            })
            .await?;
        if at % 3 == 0 {
            run.checkpoint(version, at, &at, policy).await?;
        }
        if at == fail_at && run.attempts() == 0 {
            return Err(TaskError::retryable("stumble", "once"));
        }
    }
    Ok(at)
}

async fn counted(bed: &Bed, fail_at: u32) -> (longhaul::Task, Vec<String>) {
    let notes = Notes::default();
    let shared = Arc::clone(&notes);
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("count", move |run, fail_at| count(Arc::clone(&shared), 1, run, fail_at))
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("count", &fail_at)).await.expect("accepted").id;
    let task = bed.ended(id).await;
    worker.stop().await;
    let notes = notes.lock().expect("no panic").clone();
    (task, notes)
}

#[tokio::test]
async fn a_task_goes_on_from_its_newest_snapshot_and_repeats_no_recorded_step() {
    let bed = Bed::memory().await;
    let (task, notes) = counted(&bed, 8).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "10"));
    let effects: Vec<String> = (1..=10).map(|number| format!("effect {number}")).collect();
    let seen: Vec<String> = notes.iter().filter(|note| note.starts_with("effect")).cloned().collect();
    assert_eq!(seen, effects, "every effect once");
    assert_eq!(
        notes.iter().filter(|note| note.starts_with("from")).collect::<Vec<_>>(),
        ["from None", "from Some(6)"]
    );
}

#[tokio::test]
async fn a_long_log_is_read_only_from_the_snapshot_on() {
    let bed = Bed::memory().await;
    let notes = Notes::default();
    let shared = Arc::clone(&notes);
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("long", move |run: Run, (): ()| {
            let notes = Arc::clone(&shared);
            async move {
                let policy = CheckpointPolicy { max_count: 2, ..CheckpointPolicy::default() };
                let mut at = run.resume::<u32>(1, policy).await?.unwrap_or(0);
                note(&notes, format!("from {at}"));
                while at < 200 {
                    at = run.step("tick", || async { Ok::<_, TaskError>(at + 1) }).await?;
                    run.checkpoint(1, at, &at, policy).await?;
                    if at == 150 && run.attempts() == 0 {
                        return Err(TaskError::retryable("stumble", "once"));
                    }
                }
                Ok::<_, TaskError>(at)
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("long", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("a result").get(), "200");
    assert_eq!(*notes.lock().expect("no panic"), ["from 0", "from 150"]);
    worker.stop().await;
}

#[tokio::test]
async fn a_snapshot_of_another_version_is_refused_with_the_reason_and_the_journal_serves() {
    let bed = Bed::memory().await;
    let notes = Notes::default();
    let shared = Arc::clone(&notes);
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        // The second run is of a newer program with another form of snapshot.
        .handler("count", move |run: Run, fail_at| {
            let version = 1 + run.attempts();
            count(Arc::clone(&shared), version, run, fail_at)
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("count", &8u32)).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("a result").get(), "10");
    let refused: Vec<_> =
        bed.events(id).await.into_iter().filter(|event| event.kind == "checkpoint.refused").collect();
    assert_eq!(refused.len(), 2, "both snapshots");
    assert!(refused[0].data["why"].as_str().expect("a reason").contains("version"));
    let notes = notes.lock().expect("no panic").clone();
    assert_eq!(notes.iter().filter(|note| note.starts_with("effect")).count(), 10, "every effect once: {notes:?}");
    worker.stop().await;
}

#[tokio::test]
async fn a_snapshot_that_is_too_old_is_refused() {
    let bed = Bed::memory().await;
    let notes = Notes::default();
    let shared = Arc::clone(&notes);
    let client = bed.client.clone();
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("count", move |run: Run, fail_at| {
            if run.attempts() == 1 {
                client.clock().advance(Duration::from_secs(25 * 3600));
            }
            count(Arc::clone(&shared), 1, run, fail_at)
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("count", &4u32)).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Completed);
    let notes = notes.lock().expect("no panic").clone();
    assert!(notes.iter().filter(|note| note.starts_with("from")).all(|note| note == "from None"), "{notes:?}");
    worker.stop().await;
}

/// Takes a snapshot, waits for a signal, and says whether it went on from the snapshot.
async fn snap_and_wait(run: Run, policy: CheckpointPolicy) -> Result<bool, TaskError> {
    let resumed = run.resume::<u32>(1, policy).await?.is_some();
    if !resumed {
        run.step("look", || async { Ok::<_, TaskError>(()) }).await?;
        run.checkpoint(1, 1, &1, policy).await?;
    }
    run.signal::<()>("go").await?;
    Ok(resumed)
}

#[tokio::test]
async fn time_spent_waiting_does_not_make_a_snapshot_old() {
    let bed = Bed::memory().await;
    let policy = CheckpointPolicy { max_age: Duration::from_secs(60), ..CheckpointPolicy::default() };
    let worker = Worker::new(&bed.client)
        .handler("wait", move |run: Run, (): ()| snap_and_wait(run, policy))
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("wait", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.clock().advance(Duration::from_secs(3600));
    bed.client.signal(id, "go", &()).await.expect("sent");
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "true"));
    worker.stop().await;
}

#[tokio::test]
async fn a_refused_snapshot_fails_the_task_that_wants_it_so() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("wait", |run: Run, (): ()| async move {
            let policy = CheckpointPolicy { on_refused: OnRefused::Fail, ..CheckpointPolicy::default() };
            // The second run is of a newer program with another form of snapshot.
            let version = u32::try_from(run.fence()).expect("small");
            if run.resume::<u32>(version, policy).await?.is_none() {
                run.checkpoint(version, 1, &1, policy).await?;
            }
            run.signal::<()>("go").await
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("wait", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.signal(id, "go", &()).await.expect("sent");
    let task = bed.ended(id).await;
    let error = task.error.expect("says why");
    assert_eq!((task.state, error.code.as_str()), (State::Failed, "checkpoint_refused"));
    assert!(error.message.contains("version"), "{}", error.message);
    assert!(bed.kinds(id).await.contains(&"checkpoint.refused".to_owned()));
    worker.stop().await;
}

#[tokio::test]
async fn what_failed_before_a_refused_snapshot_is_tried_again_from_the_journal() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("h", |run: Run, (): ()| async move {
            let (version, policy) = (run.attempts(), CheckpointPolicy::default());
            assert_eq!(run.resume::<u32>(version, policy).await?, None, "its form is another each time");
            let attempts = run.attempts();
            let tried = run
                .step("try", move || async move {
                    if attempts == 0 { Err(TaskError::fatal("not_yet", "later")) } else { Ok(attempts) }
                })
                .deferred(true)
                .await;
            run.checkpoint(version, 1, &1, policy).await?;
            run.step("after", || async { Ok::<_, TaskError>(()) }).await?;
            tried.map_err(|error| TaskError::retryable("again", error.message))
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("it gets there").get(), "1");
    worker.stop().await;
}

#[tokio::test]
async fn a_snapshot_is_refused_while_what_was_done_is_undone() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            let own = run.clone();
            run.step("make", || async { Ok::<_, TaskError>(1u32) })
                .undo(move |_| {
                    let run = own.clone();
                    async move { run.checkpoint(1, 1, &1, CheckpointPolicy::default()).await }
                })
                .await?;
            Err::<(), _>(TaskError::fatal("fall", "for good"))
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let error = bed.ended(id).await.error.expect("says why");
    assert_eq!(error.code, "compensation_failed");
    assert_eq!(error.details["not_undone"][0]["error"]["code"], "checkpoint_refused");
    worker.stop().await;
}

#[tokio::test]
async fn a_run_and_others_change_the_state_and_lose_nothing() {
    let bed = Bed::memory().await;
    let (ready, mut heard) = tokio::sync::mpsc::channel(1);
    let (go_on, gate) = tokio::sync::watch::channel(false);
    let worker = Worker::new(&bed.client)
        .handler("plan", move |run: Run, (): ()| {
            let (ready, mut gate) = (ready.clone(), gate.clone());
            async move {
                let plan =
                    |entry: &str| StatePatch { add_questions: vec![entry.to_owned()], ..Default::default() };
                run.patch(plan("mine 1")).await?;
                let _ = ready.send(()).await;
                let _ = gate.wait_for(|open| *open).await;
                run.patch(plan("mine 2")).await?;
                Ok::<_, TaskError>(run.state().open_questions)
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("plan", &())).await.expect("accepted").id;
    heard.recv().await.expect("the first patch is on disk");
    let theirs = StatePatch { add_questions: vec!["theirs".into()], ..StatePatch::default() };
    let stale = bed.client.patch_state(id, theirs.clone(), Some(0)).await;
    assert!(stale.is_err(), "the version is 1 by now");
    assert_eq!(bed.client.patch_state(id, theirs, Some(1)).await.expect("taken"), 2);
    go_on.send_replace(true);
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("a result").get(), r#"["mine 1","theirs","mine 2"]"#);
    let (version, state) = bed.client.state(id).await.expect("the store answers").expect("a state");
    assert_eq!((version, state.open_questions.len()), (3, 3));
    let versions: Vec<u64> = bed
        .events(id)
        .await
        .iter()
        .filter(|event| event.kind == "state.patched")
        .filter_map(|event| event.data["version"].as_u64())
        .collect();
    assert_eq!(versions, [1, 2, 3]);
    worker.stop().await;
}

#[tokio::test]
async fn an_event_of_ones_own_is_published_once() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("clean", |run: Run, (): ()| async move {
            run.progress("thinking", 1, 2, "Looking at the disk");
            run.publish("disk.cleaned", &serde_json::json!({"freed_gb": 20})).await?;
            if run.attempts() == 0 {
                return Err(TaskError::retryable("stumble", "once"));
            }
            assert!(
                run.publish("task.completed", &()).await.is_err(),
                "the engine's own types are not for handlers"
            );
            Ok(())
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("clean", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let events = bed.events(id).await;
    assert_eq!(events.iter().filter(|event| event.kind == "disk.cleaned").count(), 1);
    let progress = events.iter().filter(|event| event.data["status"] == "thinking").count();
    assert_eq!(progress, 1, "progress of the past is not told again");
    worker.stop().await;
}
