//! What a run tells: progress once, events with the record they belong to, kinds, text as it comes, usage.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::{Client, Effect, Event, NewTask, Run, State, TaskError, Worker, WorkerHandle};
use serde_json::json;
use tokio::sync::Notify;

on_every_store!(
    progress_told_before_a_crash_is_not_told_again,
    progress_told_before_a_wait_is_not_told_again,
    progress_of_a_long_task_is_told_after_a_crash_too,
    what_a_step_tells_stands_with_its_record,
    usage_is_shown_in_the_task,
);

fn said(events: &[Event], message: &str) -> usize {
    events.iter().filter(|event| event.data["message"] == message).count()
}

/// Says what it is about to do and does it; the first worker hangs in the step named `hangs`.
async fn talk(run: Run, steps: u32, hangs: Option<(u32, Arc<Notify>)>) -> Result<(), TaskError> {
    for number in 1..=steps {
        run.progress("thinking", number, steps, &format!("about to do {number}"));
        let here = hangs.as_ref().filter(|(at, _)| *at == number).map(|(_, hangs)| Arc::clone(hangs));
        run.step("work", || {
            let here = here.clone();
            async move {
                if let Some(hangs) = here {
                    hangs.notify_one();
                    std::future::pending::<()>().await;
                }
                Ok::<_, TaskError>(())
            }
        })
        .await?;
    }
    Ok(())
}

async fn talker(client: &Client, steps: u32, hangs: Option<(u32, Arc<Notify>)>) -> WorkerHandle {
    Worker::new(client)
        .handler("talk", move |run: Run, (): ()| talk(run, steps, hangs.clone()))
        .start()
        .await
        .expect("starts")
}

async fn crashes_at(bed: &Bed, steps: u32, at: u32) -> Vec<Event> {
    let hangs = Arc::new(Notify::new());
    let other = bed.another_client_or_same().await;
    let lost = talker(&other, steps, Some((at, Arc::clone(&hangs)))).await;
    let id = bed.client.submit(NewTask::new("talk", &())).await.expect("accepted").id;
    hangs.notified().await;
    let mut events = bed.client.events(id, 0).await.expect("the task is there");
    loop {
        let event = events.next().await.expect("the store answers").expect("it goes on");
        if event.data["message"] == format!("about to do {at}") {
            break;
        }
    }
    lost.abort();
    let worker = talker(&bed.client, steps, None).await;
    bed.client.clock().advance(Duration::from_secs(60));
    assert_eq!(bed.ended(id).await.state, State::Completed);
    worker.stop().await;
    bed.events(id).await
}

async fn progress_told_before_a_crash_is_not_told_again(bed: Bed) {
    let events = crashes_at(&bed, 3, 2).await;
    for number in 1..=3 {
        assert_eq!(said(&events, &format!("about to do {number}")), 1, "{number}");
    }
}

async fn progress_of_a_long_task_is_told_after_a_crash_too(bed: Bed) {
    // More events than come along with a claim: the journal is read later.
    let events = crashes_at(&bed, 50, 40).await;
    for number in 1..=50 {
        assert_eq!(said(&events, &format!("about to do {number}")), 1, "{number}");
    }
}

async fn progress_told_before_a_wait_is_not_told_again(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("wait", |run: Run, (): ()| async move {
            for number in 1..=3 {
                run.progress("waiting", number, 3, &format!("waiting for {number}"));
                run.signal::<()>("go").await?;
            }
            Ok::<_, TaskError>(())
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("wait", &())).await.expect("accepted").id;
    for number in 1..=3 {
        let waits = |event: &Event| event.kind == "task.waiting";
        bed.after(id, number, waits).await;
        bed.client.signal(id, "go", &()).await.expect("sent");
    }
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let events = bed.events(id).await;
    for number in 1..=3 {
        assert_eq!(said(&events, &format!("waiting for {number}")), 1, "{number}");
    }
    worker.stop().await;
}

#[tokio::test]
async fn progress_names_its_tool() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            run.progress_with_tool("tool_call", 1, 0, Some("check_disk"), "Checking the disk");
            Ok::<_, TaskError>(())
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.progress.expect("kept").tool.as_deref(), Some("check_disk"));
    let events = bed.events(id).await;
    assert!(events.iter().any(|event| event.kind == "progress" && event.data["tool"] == "check_disk"));
    worker.stop().await;
}

async fn what_a_step_tells_stands_with_its_record(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("h", |run: Run, (): ()| async move {
            let freed: u32 = run
                .step("clean", || async { Ok::<_, TaskError>(20) })
                .effect(Effect::Irreversible)
                .kind("tool")
                .tells(|freed| {
                    let executed = ("tool.executed".to_owned(), json!({"tool": "clean", "freed": freed}));
                    vec![executed, ("task.completed".to_owned(), json!({"not": "for handlers"}))]
                })
                .await?;
            run.step("think", || async { Ok::<_, TaskError>(()) }).kind("model").await?;
            match run.attempts() {
                0 => Err(TaskError::retryable("stumble", "once")),
                _ => Ok(freed),
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let events = bed.events(id).await;
    let told: Vec<_> = events.iter().filter(|event| event.kind == "tool.executed").collect();
    assert_eq!(told.len(), 1, "once in the task's life");
    assert_eq!((told[0].step.as_deref(), &told[0].data["freed"]), (Some("clean"), &json!(20)));
    let next = &events[told[0].seq as usize];
    assert_eq!((next.kind.as_str(), next.step.as_deref()), ("step.completed", Some("clean")));
    assert_eq!((next.time, next.run), (told[0].time, told[0].run), "one transaction");
    assert_eq!(events.iter().filter(|event| event.kind == "task.completed").count(), 1);
    let kinds: Vec<String> = bed
        .client
        .steps(id)
        .await
        .expect("there")
        .into_iter()
        .map(|step| format!("{} {}", step.kind, step.name))
        .collect();
    assert_eq!(kinds, ["tool clean", "model think"]);
    worker.stop().await;
}

async fn usage_is_shown_in_the_task(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, fails: bool| async move {
            run.usage(&json!({"llm_tokens": 10}));
            run.step("think", || async { Ok::<_, TaskError>(()) }).await?;
            run.usage(&json!({"llm_tokens": 30}));
            run.signal::<()>("go").await?;
            run.usage(&json!({"llm_tokens": 50}));
            if fails { Err(TaskError::fatal("told", "it was told to fail")) } else { Ok(()) }
        })
        .start()
        .await
        .expect("starts");
    for fails in [false, true] {
        let id = bed.client.submit(NewTask::new("h", &fails)).await.expect("accepted").id;
        let task = bed.waiting_for(id, "signal").await;
        assert_eq!(task.usage, Some(json!({"llm_tokens": 30})));
        bed.client.signal(id, "go", &()).await.expect("sent");
        assert_eq!(bed.ended(id).await.usage, Some(json!({"llm_tokens": 50})));
    }
    worker.stop().await;
}

#[tokio::test]
async fn text_reaches_who_watches_as_it_comes_and_nobody_else() {
    let bed = Bed::memory().await;
    let go = Arc::new(Notify::new());
    let gate = Arc::clone(&go);
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let gate = Arc::clone(&gate);
            async move {
                run.step_with("think", |context| {
                    let (run, gate) = (run.clone(), Arc::clone(&gate));
                    async move {
                        gate.notified().await;
                        run.live(&context, 1, 0, "Hel");
                        run.live(&context, 2, 0, "Hello");
                        run.live(&context, 2, 5, " you");
                        Ok::<_, TaskError>("Hello you".to_owned())
                    }
                })
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let mut live = bed.client.live(id);
    let mut theirs = bed.client.for_tenant("acme").live(id);
    go.notify_one();
    let mut heard = Vec::new();
    for _ in 0..3 {
        let piece = live.next().await.expect("it comes");
        assert_eq!((piece.run, piece.step.as_str()), (1, "think"));
        heard.push((piece.attempt, piece.after, piece.text));
    }
    assert_eq!(heard, [(1, 0, "Hel".to_owned()), (2, 0, "Hello".to_owned()), (2, 5, " you".to_owned())]);
    bed.ended(id).await;
    let unheard = tokio::time::timeout(Duration::ZERO, theirs.next()).await;
    assert!(unheard.is_err(), "another tenant hears nothing");
    worker.stop().await;
}
