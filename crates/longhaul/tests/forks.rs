//! Forks: a new task that shares the recorded prefix of another.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Bed;
use longhaul::{AskStatus, NewTask, Risk, Run, StatePatch, TaskError, TaskId, Worker, WorkerHandle};
use serde_json::value::{RawValue, to_raw_value};

on_every_store!(
    a_fork_takes_over_what_was_recorded_before_the_step_and_nothing_else,
    a_fork_never_undoes_what_it_took_over,
    a_fork_takes_over_no_approval,
    a_fork_has_the_state_of_its_prefix,
    a_fork_has_the_settings_of_the_original_and_as_much_time,
    only_a_task_that_ended_can_be_forked_and_only_from_a_step_it_has,
);

type Done = Arc<Mutex<Vec<String>>>;

fn lines(done: &Done) -> Vec<String> {
    done.lock().expect("not poisoned").clone()
}

fn raw(value: &impl serde::Serialize) -> Option<Box<RawValue>> {
    Some(to_raw_value(value).expect("JSON"))
}

/// Three steps with undos; fails after them when told to.
async fn start(bed: &Bed, done: &Done) -> WorkerHandle {
    let done = Arc::clone(done);
    Worker::new(&bed.client)
        .handler("h", move |run: Run, (word, fails): (String, bool)| {
            let done = Arc::clone(&done);
            async move {
                let mut all = Vec::new();
                for name in ["a", "b", "c"] {
                    let (word, did, undid) = (word.clone(), Arc::clone(&done), Arc::clone(&done));
                    let step = run.saga().step(name, move || {
                        let line = format!("{name} {word}");
                        did.lock().expect("not poisoned").push(line.clone());
                        async move { Ok::<_, TaskError>(line) }
                    });
                    let line = step.undo(move |line: String| {
                        undid.lock().expect("not poisoned").push(format!("undo {line}"));
                        async { Ok::<_, TaskError>(()) }
                    });
                    all.push(line.await?);
                }
                if fails {
                    return Err(TaskError::fatal("told", "it was told to fail"));
                }
                Ok(all)
            }
        })
        .start()
        .await
        .expect("starts")
}

async fn first(bed: &Bed) -> TaskId {
    let id = bed.client.submit(NewTask::new("h", &("one", false))).await.expect("accepted").id;
    bed.ended(id).await;
    id
}

async fn a_fork_takes_over_what_was_recorded_before_the_step_and_nothing_else(bed: Bed) {
    let done = Done::default();
    let worker = start(&bed, &done).await;
    let id = first(&bed).await;
    let fork = bed.client.fork(id, "c", raw(&("two", false))).await.expect("forked").id;
    let task = bed.ended(fork).await;
    assert_eq!(task.fork_of, Some(id));
    assert_eq!(task.result.expect("a result").get(), r#"["a one","b one","c two"]"#);
    assert_eq!(lines(&done), ["a one", "b one", "c one", "c two"]);
    worker.stop().await;
}

async fn a_fork_never_undoes_what_it_took_over(bed: Bed) {
    let done = Done::default();
    let worker = start(&bed, &done).await;
    let id = first(&bed).await;
    let fork = bed.client.fork(id, "c", raw(&("two", true))).await.expect("forked").id;
    let error = bed.ended(fork).await.error.expect("says why");
    assert_eq!(error.details["undone"], serde_json::json!(["c"]));
    assert_eq!(lines(&done)[3..], ["c two", "undo c two"]);
    worker.stop().await;
}

async fn a_fork_takes_over_no_approval(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("pay", |run: Run, (): ()| async move {
            run.approve("Pay?", Risk::ExternalAction).await?;
            run.step("pay", || async { Ok::<_, TaskError>(()) }).await
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("pay", &())).await.expect("accepted").id;
    bed.waiting_for(id, "approval").await;
    bed.client.approve(id, None, None, None).await.expect("approved");
    bed.ended(id).await;
    let fork = bed.client.fork(id, "pay", None).await.expect("forked").id;
    bed.waiting_for(fork, "approval").await;
    assert_eq!(bed.client.asks(fork).await.expect("read")[0].status, AskStatus::Pending);
    bed.client.deny(fork, None, None).await.expect("denied");
    assert_eq!(bed.ended(fork).await.error.expect("says why").code, "denied");
    worker.stop().await;
}

async fn a_fork_has_the_state_of_its_prefix(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            run.patch(StatePatch { set_goal: Some("first".into()), ..StatePatch::default() }).await?;
            run.step("cut", || async { Ok::<_, TaskError>(()) }).await?;
            let goal = run.state().goal;
            run.patch(StatePatch { set_goal: Some("second".into()), ..StatePatch::default() }).await?;
            Ok::<_, TaskError>(goal)
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.ended(id).await;
    let fork = bed.client.fork(id, "cut", None).await.expect("forked").id;
    assert_eq!(bed.ended(fork).await.result.expect("a result").get(), "\"first\"");
    let (version, state) = bed.client.state(fork).await.expect("read").expect("has one");
    assert_eq!((version, state.goal.as_str()), (2, "second"));
    worker.stop().await;
}

async fn a_fork_has_the_settings_of_the_original_and_as_much_time(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .queues(["q"])
        .handler("h", |run: Run, (): ()| async move {
            run.step("a", || async { Ok::<_, TaskError>(()) }).await?;
            Ok::<_, TaskError>(run.tags().clone())
        })
        .start()
        .await
        .expect("starts");
    let hour = Duration::from_secs(3_600);
    let task = NewTask::new("h", &()).queue("q").priority(7).tag("app", "shop");
    let task = task.concurrency_key("shop").max_attempts(9).timeout(hour);
    let id = bed.client.submit(task).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.result.as_ref().expect("a result").get(), r#"{"app":"shop"}"#, "a run shows its tags");
    bed.client.clock().advance(hour * 2);
    let fork = bed.client.fork(id, "a", None).await.expect("forked").id;
    let fork = bed.ended(fork).await;
    assert_eq!((fork.queue.as_str(), fork.priority, &fork.tags), ("q", task.priority, &task.tags));
    assert_eq!((fork.concurrency_key.as_deref(), fork.max_attempts), (Some("shop"), 9));
    let time = fork.deadline.expect("has one").duration_since(fork.created_at);
    assert_eq!(time.unsigned_abs(), hour);
    assert_eq!(fork.result.expect("a result").get(), r#"{"app":"shop"}"#);
    worker.stop().await;
}

async fn only_a_task_that_ended_can_be_forked_and_only_from_a_step_it_has(bed: Bed) {
    let done = Done::default();
    bed.client.announce(&["h"]).await.expect("known");
    let id = bed.client.submit(NewTask::new("h", &("one", false))).await.expect("accepted").id;
    let early = bed.client.fork(id, "a", None).await.expect_err("refused").to_string();
    assert!(early.contains("pending"), "{early}");
    let worker = start(&bed, &done).await;
    bed.ended(id).await;
    let unknown = bed.client.fork(id, "z", None).await.expect_err("refused").to_string();
    assert!(unknown.contains("no step 'z'"), "{unknown}");
    worker.stop().await;
}
