//! Deferred steps: given at once, written with the next commit, run again after a crash before that.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, at_once};
use futures_util::future::{Either, select};
use longhaul::run::{CheckpointPolicy, Step};
use longhaul::{
    Client, Effect, NewTask, Run, State, StepContext, StepState, TaskError, TaskId, Worker, WorkerHandle,
};
use tokio::sync::Notify;

on_every_store!(
    what_is_recorded_next_is_written_behind_the_deferred,
    a_crash_runs_what_was_not_written_again_under_the_same_key,
    whatever_ends_a_run_writes_what_was_deferred,
    a_failure_that_is_undone_keeps_what_was_deferred,
    a_replay_gives_what_arrived_and_what_was_deferred_in_the_order_of_the_first_time,
    a_flush_a_checkpoint_and_a_patch_write_what_was_deferred,
);

/// The keys of effects, in order.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<Vec<String>>>);

impl Effects {
    fn note(&self, context: &StepContext) {
        self.0.lock().expect("not poisoned").push(context.idempotency_key.clone());
    }

    fn of(&self, id: TaskId) -> Vec<String> {
        let prefix = format!("{id}/");
        let all = self.0.lock().expect("not poisoned");
        all.iter().filter_map(|key| key.strip_prefix(&prefix)).map(str::to_owned).collect()
    }

    fn step<'a>(&self, run: &'a Run, name: &str) -> Step<'a, String> {
        let effects = self.clone();
        run.step_with(name, move |context| {
            effects.note(&context);
            async move { Ok::<_, TaskError>(context.step) }
        })
    }
}

/// Where a handler stops for the test: it says that it is there, and goes on when told to.
#[derive(Clone, Default)]
struct Stop {
    here: Arc<Notify>,
    go: Arc<Notify>,
}

impl Stop {
    async fn hold(&self) {
        self.here.notify_one();
        self.go.notified().await;
    }
}

async fn completed(client: &Client, id: TaskId) -> Vec<String> {
    let steps = client.steps(id).await.expect("there");
    let completed = steps.into_iter().filter(|step| step.state == StepState::Completed);
    completed.map(|step| step.name).collect()
}

async fn what_is_recorded_next_is_written_behind_the_deferred(bed: Bed) {
    let (effects, stop) = (Effects::default(), Stop::default());
    let (noted, held) = (effects.clone(), stop.clone());
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (effects, stop) = (noted.clone(), held.clone());
            async move {
                for _ in 0..5 {
                    effects.step(&run, "look").effect(Effect::Read).deferred(true).kind("model").await?;
                }
                stop.hold().await;
                effects.step(&run, "pay").effect(Effect::Irreversible).deferred(true).await?;
                stop.hold().await;
                effects.step(&run, "look").deferred(true).await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    stop.here.notified().await;
    assert_eq!(effects.of(id).len(), 5, "all five were run");
    assert!(completed(&bed.client, id).await.is_empty(), "nothing is written yet");
    stop.go.notify_one();
    bed.after(id, 6, |event| event.kind == "step.completed").await;
    let written = completed(&bed.client, id).await;
    assert_eq!(written, ["look", "look#2", "look#3", "look#4", "look#5", "pay"]);
    stop.go.notify_one();
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), r#""look#6""#);
    let events = bed.events(id).await;
    let steps: Vec<String> = events
        .iter()
        .filter_map(|event| {
            event.step.as_ref().map(|step| format!("{} {step}", event.kind.trim_start_matches("step.")))
        })
        .collect();
    let mut wanted = Vec::new();
    for step in ["look", "look#2", "look#3", "look#4", "look#5", "pay", "look#6"] {
        wanted.extend([format!("started {step}"), format!("completed {step}")]);
    }
    assert_eq!(steps, wanted);
    let (look, pay) = (&bed.client.steps(id).await.expect("there")[0], &events[events.len() - 5]);
    assert_eq!((look.kind.as_ref(), pay.step.as_deref()), ("model", Some("pay")));
    assert!(look.finished_at.expect("ended") <= pay.time, "it ended when it did, not when it was written");
    worker.stop().await;
}

async fn start(client: &Client, effects: &Effects, stop: Option<Stop>) -> WorkerHandle {
    let effects = effects.clone();
    Worker::new(client)
        .retry(at_once(3))
        // What is held here never ends by itself.
        .drain(Duration::from_millis(50))
        .handler("h", move |run: Run, (): ()| {
            let (effects, stop) = (effects.clone(), stop.clone());
            async move {
                effects.step(&run, "first").await?;
                effects.step(&run, "second").deferred(true).await?;
                effects.step(&run, "third").deferred(true).await?;
                if let Some(stop) = stop {
                    stop.hold().await;
                }
                effects.step(&run, "last").await
            }
        })
        .start()
        .await
        .expect("starts")
}

async fn a_crash_runs_what_was_not_written_again_under_the_same_key(bed: Bed) {
    let (effects, stop) = (Effects::default(), Stop::default());
    let other = bed.another_client_or_same().await;
    let lost = start(&other, &effects, Some(stop.clone())).await;
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    stop.here.notified().await;
    lost.abort();
    let worker = start(&bed.client, &effects, None).await;
    bed.client.clock().advance(Duration::from_secs(60));
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(effects.of(id), ["first", "second", "third", "second", "third", "last"]);
    worker.stop().await;
}

async fn whatever_ends_a_run_writes_what_was_deferred(bed: Bed) {
    let (effects, stop) = (Effects::default(), Stop::default());
    // Handed back by a worker that stops.
    let worker = start(&bed.client, &effects, Some(stop.clone())).await;
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    stop.here.notified().await;
    worker.stop().await;
    let worker = start(&bed.client, &effects, None).await;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(effects.of(id), ["first", "second", "third", "last"]);
    worker.stop().await;

    // Suspended, then retried, then failed, then resumed by request.
    let noted = effects.clone();
    let worker = Worker::new(&bed.client)
        .retry(at_once(2))
        .handler("ends", move |run: Run, (): ()| {
            let effects = noted.clone();
            async move {
                effects.step(&run, "a").deferred(true).await?;
                run.signal::<()>("go").await?;
                effects.step(&run, "b").deferred(true).await?;
                if run.attempts() == 0 && run.fence() < 4 {
                    return Err(TaskError::retryable("stumble", "once"));
                }
                effects.step(&run, "c").deferred(true).await?;
                if run.attempts() == 1 {
                    return Err(TaskError::fatal("fall", "for good"));
                }
                effects.step(&run, "d").deferred(true).await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("ends", &()).max_attempts(3)).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    assert_eq!(completed(&bed.client, id).await, ["a"], "a suspend writes it");
    bed.client.signal(id, "go", &()).await.expect("sent");
    assert_eq!(bed.ended(id).await.error.expect("fails").code, "fall");
    bed.client.resume(id).await.expect("opened again");
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    assert_eq!(effects.of(id), ["a", "b", "c", "d"]);
    worker.stop().await;
}

async fn a_failure_that_is_undone_keeps_what_was_deferred(bed: Bed) {
    let effects = Effects::default();
    let noted = effects.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let effects = noted.clone();
            async move {
                // What can be undone is never deferred.
                effects.step(&run, "make").deferred(true).undo(|_| async { Ok::<_, TaskError>(()) }).await?;
                effects.step(&run, "think").deferred(true).await?;
                if run.fence() == 1 {
                    return Err(TaskError::fatal("fall", "for good"));
                }
                Ok(())
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.error.expect("fails").details["undone"], serde_json::json!(["make"]));
    bed.client.resume(id).await.expect("opened again");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(effects.of(id), ["make", "think", "make~2"], "only what was undone is done again");
    worker.stop().await;
}

async fn a_replay_gives_what_arrived_and_what_was_deferred_in_the_order_of_the_first_time(bed: Bed) {
    let client = bed.client.clone();
    let worker = Worker::new(&bed.client)
        .retry(at_once(2))
        .handler("race", move |run: Run, (): ()| {
            let client = client.clone();
            async move {
                // The signal stands in the log before the record of the step, which is given first
                // unless the run has heard of the signal by then.
                let step = run
                    .step("send", || {
                        let (client, id) = (client.clone(), run.id());
                        async move {
                            client
                                .signal(id, "go", &())
                                .await
                                .map_err(|error| TaskError::fatal("signal", error.to_string()))?;
                            Ok::<_, TaskError>("step".to_owned())
                        }
                    })
                    .deferred(true);
                let signal = run.signal::<()>("go");
                let first = match select(step.into_future(), signal.into_future()).await {
                    Either::Left((given, _)) => given?,
                    Either::Right((given, _)) => {
                        given?;
                        "signal".to_owned()
                    }
                };
                let noted = run.step("note", || async { Ok::<_, TaskError>(first.clone()) }).await?;
                if noted != first {
                    return Err(TaskError::fatal("diverged", format!("{noted} came first, now it is {first}")));
                }
                match run.attempts() {
                    0 => Err(TaskError::retryable("again", "replay it")),
                    _ => Ok(first),
                }
            }
        })
        .start()
        .await
        .expect("starts");
    let mut ids = Vec::new();
    for _ in 0..30 {
        ids.push(bed.client.submit(NewTask::new("race", &()).max_attempts(2)).await.expect("accepted").id);
    }
    for id in ids {
        let task = bed.ended(id).await;
        assert_eq!(task.state, State::Completed, "{:?}", task.error);
    }
    worker.stop().await;
}

async fn a_flush_a_checkpoint_and_a_patch_write_what_was_deferred(bed: Bed) {
    let stop = Stop::default();
    let held = stop.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let stop = held.clone();
            async move {
                let effects = Effects::default();
                run.flush().await?;
                effects.step(&run, "a").deferred(true).await?;
                run.flush().await?;
                stop.hold().await;
                effects.step(&run, "b").deferred(true).await?;
                run.checkpoint(1, 1, &(), CheckpointPolicy::default()).await?;
                stop.hold().await;
                effects.step(&run, "c").deferred(true).await?;
                run.patch(longhaul::StatePatch { set_goal: Some("g".into()), ..Default::default() }).await?;
                stop.hold().await;
                Ok::<_, TaskError>(())
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    for written in [vec!["a"], vec!["a", "b"], vec!["a", "b", "c", "patch"]] {
        stop.here.notified().await;
        assert_eq!(completed(&bed.client, id).await, written);
        stop.go.notify_one();
    }
    assert_eq!(bed.ended(id).await.state, State::Completed);
    worker.stop().await;
}
