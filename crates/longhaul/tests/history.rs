//! What a task did and left behind, as a program reads it.

mod common;

use common::{Bed, at_once};
use longhaul::run::CheckpointPolicy;
use longhaul::{Effect, Error, NewTask, Risk, Run, State, StepState, TaskError, TaskId, Worker};

on_every_store!(
    steps_and_waits_are_listed_as_they_went,
    an_export_has_everything_of_a_task_and_another_tenant_gets_nothing,
    a_message_reaches_a_task_that_asks_for_it,
    checkpoints_are_listed_with_their_size,
    what_is_stored_is_read_without_waiting_for_more,
);

async fn submit(bed: &Bed, handler: &str) -> TaskId {
    bed.client.submit(NewTask::new(handler, &())).await.expect("accepted").id
}

async fn what_is_stored_is_read_without_waiting_for_more(bed: Bed) {
    bed.client.announce(&["work"]).await.expect("announced");
    let id = submit(&bed, "work").await;
    let mut events = bed.client.events(id, 0).await.expect("the task is there");
    let mut kinds = Vec::new();
    let read = async {
        while let Some(event) = events.next_stored().await.expect("the store answers") {
            kinds.push(event.kind);
        }
    };
    // Nobody works on the task: `next` would wait for ever.
    tokio::time::timeout(std::time::Duration::from_secs(30), read).await.expect("it does not wait");
    assert_eq!(kinds, ["task.submitted"]);
    bed.client.cancel(id, None).await.expect("cancelled");
    let last = events.next_stored().await.expect("the store answers").expect("there is more now");
    assert!(last.seq > 1, "{last:?}");
}

async fn steps_and_waits_are_listed_as_they_went(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("work", |run: Run, (): ()| async move {
            run.step("look", async || Ok::<_, TaskError>(1)).effect(Effect::Read).await?;
            run.approve("Go on?", Risk::WriteLocal).await?;
            run.step("break", async || Err::<(), _>(TaskError::retryable("e", "no"))).retry(at_once(2)).await
        })
        .start()
        .await
        .expect("starts");
    let task = NewTask::new("work", &()).max_attempts(1);
    let id = bed.client.submit(task).await.expect("accepted").id;
    bed.waiting_for(id, "approval").await;
    let steps = bed.client.steps(id).await.expect("read");
    let seen: Vec<(&str, &str, StepState)> =
        steps.iter().map(|step| (step.name.as_str(), &*step.kind, step.state)).collect();
    assert_eq!(seen, [("look", "step", StepState::Completed), ("approve", "approval", StepState::Pending)]);
    bed.client.approve(id, None, None, None).await.expect("approved");
    assert_eq!(bed.ended(id).await.state, State::Failed);
    let steps = bed.client.steps(id).await.expect("read");
    let seen: Vec<(&str, StepState, u32)> =
        steps.iter().map(|step| (step.name.as_str(), step.state, step.attempt)).collect();
    assert_eq!(
        seen,
        [("look", StepState::Completed, 1), ("approve", StepState::Completed, 0), ("break", StepState::Failed, 2)]
    );
    assert_eq!((steps[0].effect, steps[2].effect), (Some(Effect::Read), Some(Effect::Idempotent)));
    assert!(steps.iter().all(|step| step.started_at <= step.finished_at && step.finished_at.is_some()));
    worker.stop().await;
}

async fn an_export_has_everything_of_a_task_and_another_tenant_gets_nothing(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("work", |run: Run, (): ()| async move {
            run.step("look", async || Ok::<_, TaskError>(1)).await?;
            run.ask("Which?").await
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, "work").await;
    bed.waiting_for(id, "question").await;
    bed.client.answer(id, None, "this").await.expect("answered");
    bed.ended(id).await;
    let export = serde_json::to_value(bed.client.export(id).await.expect("exported")).expect("JSON");
    assert_eq!((&export["task"]["state"], &export["task"]["result"]), (&"completed".into(), &"this".into()));
    assert_eq!(export["events"][0]["type"], "task.submitted");
    assert_eq!(export["events"].as_array().map(Vec::len), export["task"]["last_seq"].as_u64().map(|n| n as usize));
    assert_eq!((&export["steps"][0]["name"], &export["asks"][0]["status"]), (&"look".into(), &"answered".into()));
    assert_eq!((&export["state"], &export["checkpoints"]), (&serde_json::Value::Null, &serde_json::json!([])));
    let theirs = bed.client.for_tenant("acme");
    assert!(matches!(theirs.export(id).await, Err(Error::NotFound(_))));
    assert!(matches!(theirs.steps(id).await, Err(Error::NotFound(_))));
    assert!(matches!(theirs.checkpoint_list(id).await, Err(Error::NotFound(_))));
    assert!(matches!(theirs.message(id, "hello").await, Err(Error::NotFound(_))));
    worker.stop().await;
}

async fn a_message_reaches_a_task_that_asks_for_it(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("listen", |run: Run, (): ()| async move { run.signal::<String>("message").await })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, "listen").await;
    bed.client.message(id, "use the other host").await.expect("sent");
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("a result").get(), r#""use the other host""#);
    assert!(bed.kinds(id).await.contains(&"signal.received".to_owned()));
    assert!(matches!(bed.client.message(id, "too late").await, Err(Error::Control(_))));
    let next = submit(&bed, "listen").await;
    let huge = "x".repeat(2 * 1024 * 1024);
    assert!(matches!(bed.client.message(next, &huge).await, Err(Error::Control(_))), "its size is limited");
    bed.client.message(next, "go").await.expect("sent");
    bed.ended(next).await;
    worker.stop().await;
}

async fn checkpoints_are_listed_with_their_size(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("loop", |run: Run, (): ()| async move {
            for n in 0..3_u32 {
                run.step("think", async || Ok::<_, TaskError>(n)).await?;
                run.checkpoint(1, n, &n, CheckpointPolicy::default()).await?;
            }
            Ok::<_, TaskError>(())
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, "loop").await;
    bed.ended(id).await;
    let checkpoints = bed.client.checkpoint_list(id).await.expect("read");
    assert_eq!(checkpoints.len(), 3);
    assert!(checkpoints.iter().all(|checkpoint| checkpoint.valid && checkpoint.why_not.is_none()));
    assert!(checkpoints.is_sorted_by(|one, next| one.id > next.id), "newest first");
    assert!(checkpoints.iter().all(|checkpoint| checkpoint.bytes == 1));
    let steps = bed.client.steps(id).await.expect("read");
    assert_eq!(steps.iter().filter(|step| step.name == "think").count(), 3);
    worker.stop().await;
}
