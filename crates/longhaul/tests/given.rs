//! A handler is given a step's result a moment before it is on disk; what follows from it is not begun before.

mod common;

use std::sync::Arc;

use common::Bed;
use longhaul::{Client, Effect, NewTask, Run, State, StepState, TaskError, TaskId, Worker};
use tokio::sync::Notify;

on_every_store!(
    an_effect_begins_when_every_result_before_it_is_on_disk,
    a_child_and_a_lock_are_asked_for_when_every_result_before_them_is_on_disk,
    a_result_is_recorded_although_the_handler_goes_on_with_something_else,
    a_last_result_and_the_end_are_told_in_one_transaction,
);

async fn recorded(client: &Client, id: TaskId) -> Vec<String> {
    let steps = client.steps(id).await.expect("there");
    let completed = steps.into_iter().filter(|step| step.state == StepState::Completed);
    completed.map(|step| step.name).collect()
}

async fn an_effect_begins_when_every_result_before_it_is_on_disk(bed: Bed) {
    let client = bed.client.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let client = client.clone();
            async move {
                let look = || {
                    let (client, id) = (client.clone(), run.id());
                    async move { Ok::<_, TaskError>(recorded(&client, id).await) }
                };
                run.step("first", async || Ok::<_, TaskError>(())).await?;
                let plain = run.step("plain", look).await?;
                let guarded = run.step("guarded", look).effect(Effect::Irreversible).await?;
                let undone = run.step("undone", look).undo(async |_: Vec<String>| Ok::<_, TaskError>(())).await?;
                Ok::<_, TaskError>((plain, guarded, undone))
            }
        })
        .start()
        .await
        .expect("a worker");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    let seen: (Vec<String>, Vec<String>, Vec<String>) =
        serde_json::from_str(task.result.expect("completed").get()).expect("lists");
    assert_eq!(seen.0, ["first"]);
    assert_eq!(seen.1, ["first", "plain"]);
    assert_eq!(seen.2, ["first", "plain", "guarded"]);
    worker.stop().await;
}

async fn a_child_and_a_lock_are_asked_for_when_every_result_before_them_is_on_disk(bed: Bed) {
    let client = bed.client.clone();
    let worker = Worker::new(&bed.client)
        .handler("child", move |run: Run, parent: TaskId| {
            let client = client.clone();
            async move {
                let seen = run.step("look", async || Ok::<_, TaskError>(recorded(&client, parent).await)).await?;
                Ok::<_, TaskError>(seen)
            }
        })
        .handler("parent", move |run: Run, (): ()| async move {
            run.step("first", async || Ok::<_, TaskError>(())).await?;
            let child = run.spawn(NewTask::new("child", &run.id())).await?;
            run.step("second", async || Ok::<_, TaskError>(())).await?;
            run.lock("host").await?;
            run.join::<Vec<String>>(child).await
        })
        .start()
        .await
        .expect("a worker");
    let id = bed.client.submit(NewTask::new("parent", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    let seen: Vec<String> = serde_json::from_str(task.result.expect("completed").get()).expect("a list");
    assert_eq!(seen.first().map(String::as_str), Some("first"));
    let kinds = bed.kinds(id).await;
    let place = |kind: &str, nth: usize| {
        kinds.iter().enumerate().filter(|(_, known)| *known == kind).nth(nth).map(|(at, _)| at)
    };
    // The step that made the child was completed second, "second" third.
    assert!(place("step.completed", 2) < place("lock.acquired", 0), "{kinds:?}");
    worker.stop().await;
}

async fn a_result_is_recorded_although_the_handler_goes_on_with_something_else(bed: Bed) {
    let go = Arc::new(Notify::new());
    let held = Arc::clone(&go);
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let go = Arc::clone(&held);
            async move {
                run.step("first", async || Ok::<_, TaskError>(())).await?;
                go.notified().await;
                Ok::<_, TaskError>(())
            }
        })
        .start()
        .await
        .expect("a worker");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.event(id, "step.completed").await;
    assert_eq!(bed.client.task(id).await.expect("there").state, State::Running);
    go.notify_one();
    assert_eq!(bed.ended(id).await.state, State::Completed);
    worker.stop().await;
}

async fn a_last_result_and_the_end_are_told_in_one_transaction(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", async |run: Run, (): ()| {
            run.step("only", async || Ok::<_, TaskError>(7)).effect(Effect::Irreversible).await
        })
        .start()
        .await
        .expect("a worker");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.ended(id).await;
    let events = bed.events(id).await;
    let time = |kind: &str| events.iter().find(|event| event.kind == kind).map(|event| event.time);
    // Events of one transaction have its time.
    assert!(time("task.completed").is_some());
    assert_eq!(time("step.completed"), time("task.completed"), "{events:?}");
    assert!(time("step.started") < time("step.completed"), "the intent came before");
    worker.stop().await;
}
