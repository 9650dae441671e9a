//! Sagas: what was done is undone when it has to be, exactly that, last completed first.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::{Effect, NewTask, Run, State, TaskError, TaskId, Worker, WorkerHandle};
use serde_json::json;
use tokio::sync::Notify;

/// What was done to the outside, in order.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<Vec<String>>>);

impl Ledger {
    fn write(&self, line: impl Into<String>) {
        self.0.lock().expect("not poisoned").push(line.into());
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().expect("not poisoned").clone()
    }
}

const STEPS: [&str; 4] = ["create_dns", "create_cert", "deploy_container", "monitoring"];

/// The deployment of the documents: four steps with an undo each. `fail` names the step that
/// fails for good, `stuck` the undo that does.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
struct Deploy {
    fail: Option<String>,
    stuck: Option<String>,
}

async fn deploy(run: Run, input: Deploy, ledger: Ledger) -> Result<usize, TaskError> {
    let saga = run.saga();
    for name in STEPS {
        let (input, done, undone) = (input.clone(), ledger.clone(), ledger.clone());
        let fails = input.fail.as_deref() == Some(name);
        let stuck = input.stuck.as_deref() == Some(name);
        saga.step(name, move || {
            let done = done.clone();
            async move {
                if fails {
                    return Err(TaskError::fatal("broken", format!("{name} is broken")));
                }
                done.write(name);
                Ok(name.to_owned())
            }
        })
        .undo(move |result: String| {
            let undone = undone.clone();
            async move {
                if stuck {
                    return Err(TaskError::retryable("stuck", "cannot be removed"));
                }
                undone.write(format!("undo {result}"));
                Ok(())
            }
        })
        .undo_retry(at_once(2))
        .await?;
    }
    Ok(STEPS.len())
}

async fn start(bed: &Bed, ledger: &Ledger) -> WorkerHandle {
    let ledger = ledger.clone();
    Worker::new(&bed.client)
        .handler("deploy", move |run: Run, input: Deploy| deploy(run, input, ledger.clone()))
        .start()
        .await
        .expect("starts")
}

async fn submit(bed: &Bed, fail: Option<&str>, stuck: Option<&str>) -> TaskId {
    let input = Deploy { fail: fail.map(str::to_owned), stuck: stuck.map(str::to_owned) };
    bed.client.submit(NewTask::new("deploy", &input)).await.expect("accepted").id
}

on_every_store!(
    success_runs_every_step_and_undoes_nothing,
    a_failure_at_each_position_undoes_exactly_what_was_completed_in_reverse,
    an_undo_that_fails_for_good_is_shown_and_the_rest_is_still_undone,
    a_resumed_saga_starts_undone_steps_again_under_new_keys,
    a_cancel_while_running_undoes,
    a_cancel_while_waiting_undoes,
    a_deadline_while_waiting_undoes,
    a_handlers_timeout_is_the_deadline_of_tasks_without_one,
    steps_at_the_same_time_are_all_waited_for_before_undoing,
    undoing_goes_on_where_a_lost_worker_left_it,
    a_step_in_doubt_is_settled_before_undo_passes_it,
    a_step_in_doubt_that_has_no_undo_is_settled_too,
    usage_is_not_forgotten_where_another_run_undoes,
);

async fn success_runs_every_step_and_undoes_nothing(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed, &ledger).await;
    let id = submit(&bed, None, None).await;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(ledger.lines(), STEPS);
    worker.stop().await;
}

async fn a_failure_at_each_position_undoes_exactly_what_was_completed_in_reverse(bed: Bed) {
    for (position, failing) in STEPS.iter().enumerate() {
        let ledger = Ledger::default();
        let worker = start(&bed, &ledger).await;
        let id = submit(&bed, Some(failing), None).await;
        let task = bed.ended(id).await;
        let error = task.error.expect("says why");
        assert_eq!((task.state, error.code.as_str()), (State::Failed, "step_failed"));
        assert_eq!(error.details["step"], *failing);
        assert_eq!(error.cause.expect("the cause").code, "broken");
        let done = STEPS[..position].iter().map(|&name| name.to_owned());
        let undone: Vec<String> = STEPS[..position].iter().rev().map(|name| format!("undo {name}")).collect();
        assert_eq!(ledger.lines(), done.chain(undone).collect::<Vec<_>>());
        let told = bed.kinds(id).await.contains(&"saga.compensated".to_owned());
        assert_eq!(told, position > 0, "nothing done, nothing undone");
        assert_eq!(task.attempts, 1, "the run that failed, and not the undoing");
        worker.stop().await;
    }
}

async fn an_undo_that_fails_for_good_is_shown_and_the_rest_is_still_undone(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed, &ledger).await;
    let id = submit(&bed, Some("monitoring"), Some("create_cert")).await;
    let task = bed.ended(id).await;
    let error = task.error.expect("says why");
    assert_eq!((task.state, error.code.as_str()), (State::Failed, "compensation_failed"));
    assert_eq!(error.details["undone"], json!(["deploy_container", "create_dns"]));
    assert_eq!(error.details["not_undone"][0]["step"], "create_cert");
    assert_eq!(error.details["not_undone"][0]["error"]["code"], "stuck");
    assert_eq!(error.cause.expect("the original error").details["step"], "monitoring");
    assert_eq!(
        ledger.lines()[3..],
        ["undo deploy_container", "undo create_dns"],
        "the rest is undone although one was not"
    );
    assert!(bed.kinds(id).await.contains(&"saga.compensation_failed".to_owned()));
    worker.stop().await;
}

async fn a_resumed_saga_starts_undone_steps_again_under_new_keys(bed: Bed) {
    let keys = Ledger::default();
    let seen = keys.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (seen, again) = (seen.clone(), seen.clone());
            async move {
                let (first, second) = (seen.clone(), seen.clone());
                run.saga()
                    .step_with("make", move |context| {
                        first.write(context.idempotency_key);
                        async { Ok::<_, TaskError>(()) }
                    })
                    .undo_with(move |context, ()| {
                        second.write(context.idempotency_key);
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await?;
                if again.lines().len() < 3 {
                    return Err(TaskError::fatal("no", "not the first time"));
                }
                Ok(())
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    bed.client.resume(id).await.expect("opened again");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(keys.lines(), [format!("{id}/make"), format!("{id}/undo make"), format!("{id}/make~2")]);
    assert!(!bed.client.resume(id).await.expect("nothing happens").changed);
    worker.stop().await;
}

/// A saga that did one thing and then waits for a signal.
async fn half_done(bed: &Bed, ledger: &Ledger, input: &NewTask) -> (WorkerHandle, TaskId) {
    let ledger = ledger.clone();
    let worker = Worker::new(&bed.client)
        .handler("half", move |run: Run, (): ()| {
            let (done, undone) = (ledger.clone(), ledger.clone());
            async move {
                run.saga()
                    .step("make", move || {
                        done.write("make");
                        async { Ok::<_, TaskError>(1) }
                    })
                    .undo(move |_: i32| {
                        undone.write("undo make");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await?;
                run.signal::<()>("go").await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(input.clone()).await.expect("accepted").id;
    (worker, id)
}

async fn a_cancel_while_running_undoes(bed: Bed) {
    let (ledger, reached) = (Ledger::default(), Arc::new(Notify::new()));
    let (written, arrived) = (ledger.clone(), Arc::clone(&reached));
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (undone, arrived) = (written.clone(), Arc::clone(&arrived));
            async move {
                let made = run.saga().step("make", || async { Ok::<_, TaskError>(()) });
                made.undo(move |()| {
                    undone.write("undo make");
                    async { Ok::<_, TaskError>(()) }
                })
                .await?;
                arrived.notify_one();
                std::future::pending::<Result<(), TaskError>>().await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    reached.notified().await;
    bed.client.cancel(id, Some("enough")).await.expect("cancelled");
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Cancelled, "cancelled"));
    assert_eq!(ledger.lines(), ["undo make"]);
    worker.stop().await;
}

async fn a_cancel_while_waiting_undoes(bed: Bed) {
    let ledger = Ledger::default();
    let (worker, id) = half_done(&bed, &ledger, &NewTask::new("half", &())).await;
    bed.waiting_for(id, "signal").await;
    bed.client.cancel(id, None).await.expect("cancelled");
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    assert_eq!(ledger.lines(), ["make", "undo make"]);
    worker.stop().await;
}

async fn a_deadline_while_waiting_undoes(bed: Bed) {
    let ledger = Ledger::default();
    let day = Duration::from_secs(86_400);
    let (worker, id) = half_done(&bed, &ledger, &NewTask::new("half", &()).timeout(day)).await;
    bed.waiting_for(id, "signal").await;
    bed.client.clock().advance(day);
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "deadline_exceeded"));
    assert_eq!(ledger.lines(), ["make", "undo make"]);
    worker.stop().await;
}

async fn a_handlers_timeout_is_the_deadline_of_tasks_without_one(bed: Bed) {
    let hour = Duration::from_secs(3_600);
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move { run.signal::<()>("never").await })
        .timeout("h", hour)
        .start()
        .await
        .expect("starts");
    let own = NewTask::new("h", &()).timeout(hour * 3);
    let own = bed.client.submit(own).await.expect("accepted").id;
    let none = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.waiting_for(own, "signal").await;
    let waiting = bed.waiting_for(none, "signal").await;
    let deadline = waiting.deadline.expect("by its handler");
    assert_eq!(deadline.duration_since(waiting.created_at).as_secs(), 3_600);
    bed.client.clock().advance(hour);
    assert_eq!(bed.ended(none).await.error.expect("says why").code, "deadline_exceeded");
    assert_eq!(bed.client.task(own).await.expect("there").state, State::Waiting);
    worker.stop().await;
}

async fn steps_at_the_same_time_are_all_waited_for_before_undoing(bed: Bed) {
    let ledger = Ledger::default();
    let written = ledger.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let written = written.clone();
            async move {
                let saga = run.saga();
                let failed = Arc::new(Notify::new());
                let step = |name: &'static str| {
                    let (failed, undone) = (Arc::clone(&failed), written.clone());
                    saga.step(name, move || {
                        let failed = Arc::clone(&failed);
                        async move {
                            if name == "bad" {
                                failed.notify_waiters();
                                return Err(TaskError::fatal("bad", "it is bad"));
                            }
                            failed.notified().await;
                            Ok(())
                        }
                    })
                    .undo(move |()| {
                        undone.write(format!("undo {name}"));
                        async { Ok::<_, TaskError>(()) }
                    })
                };
                // The two good ones wait for the bad one to begin, and end after it has failed.
                saga.all([step("one"), step("two"), step("bad")]).await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let error = bed.ended(id).await.error.expect("says why");
    assert_eq!(error.details["step"], "bad");
    let mut undone = ledger.lines();
    undone.sort();
    assert_eq!(undone, ["undo one", "undo two"]);
    worker.stop().await;
}

async fn undoing_goes_on_where_a_lost_worker_left_it(bed: Bed) {
    let ledger = Ledger::default();
    let hanging = Arc::new(Notify::new());
    // The first worker undoes the last step and then hangs in the undo of the one before.
    let (written, hangs) = (ledger.clone(), Arc::clone(&hanging));
    let other = bed.another_client_or_same().await;
    let lost = worker_that_fails_after_three(&other, written, Some(hangs)).await;
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    hanging.notified().await;
    // Dropped without a word, as by a crash; the lease has to run out.
    drop(lost);
    let worker = worker_that_fails_after_three(&bed.client, ledger.clone(), None).await;
    bed.client.clock().advance(Duration::from_secs(60));
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Failed);
    assert_eq!(
        ledger.lines(),
        ["a", "b", "c", "undo c", "undo b begins", "undo b begins", "undo b", "undo a"],
        "what was undone is not undone again"
    );
    worker.stop().await;
}

async fn worker_that_fails_after_three(
    client: &longhaul::Client,
    ledger: Ledger,
    hang: Option<Arc<Notify>>,
) -> WorkerHandle {
    Worker::new(client)
        .handler("h", move |run: Run, (): ()| {
            let (ledger, hang) = (ledger.clone(), hang.clone());
            async move {
                for name in ["a", "b", "c"] {
                    let (done, undone, hang) = (ledger.clone(), ledger.clone(), hang.clone());
                    run.saga()
                        .step(name, move || {
                            done.write(name);
                            async { Ok::<_, TaskError>(()) }
                        })
                        .undo(move |()| {
                            let (undone, hang) = (undone.clone(), hang.clone());
                            async move {
                                if name == "b" {
                                    undone.write("undo b begins");
                                    if let Some(hang) = hang {
                                        hang.notify_one();
                                        std::future::pending::<()>().await;
                                    }
                                }
                                undone.write(format!("undo {name}"));
                                Ok::<_, TaskError>(())
                            }
                        })
                        .await?;
                }
                Err::<(), _>(TaskError::fatal("enough", "that was enough"))
            }
        })
        .start()
        .await
        .expect("starts")
}

async fn a_step_in_doubt_is_settled_before_undo_passes_it(bed: Bed) {
    let ledger = Ledger::default();
    let written = ledger.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (one, two) = (written.clone(), written.clone());
            async move {
                run.saga()
                    .step("first", || async { Ok::<_, TaskError>(()) })
                    .undo(move |()| {
                        one.write("undo first");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await?;
                run.saga()
                    .step("second", || async { Err::<(), _>(TaskError::in_doubt("cut", "the line was cut")) })
                    .effect(Effect::Compensable)
                    .undo(move |()| {
                        two.write("undo second");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.waiting_for(id, "in_doubt").await;
    bed.client.cancel(id, None).await.expect("cancelled");
    // It is not known whether the second happened: nothing is undone before that is said.
    bed.waiting_for(id, "in_doubt").await;
    assert!(ledger.lines().is_empty());
    let done = longhaul::Decision::Done(serde_json::value::to_raw_value(&()).expect("JSON"));
    bed.client.decide(id, "second", done, None).await.expect("decided");
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    assert_eq!(ledger.lines(), ["undo second", "undo first"]);
    worker.stop().await;
}

async fn a_step_in_doubt_that_has_no_undo_is_settled_too(bed: Bed) {
    let ledger = Ledger::default();
    let written = ledger.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let ledger = written.clone();
            async move {
                run.saga()
                    .step("first", || async { Ok::<_, TaskError>(()) })
                    .undo(move |()| {
                        ledger.write("undo first");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await?;
                run.step("charge", || async { Err::<(), _>(TaskError::in_doubt("cut", "the line was cut")) })
                    .effect(Effect::Irreversible)
                    .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.waiting_for(id, "in_doubt").await;
    bed.client.cancel(id, None).await.expect("cancelled");
    bed.waiting_for(id, "in_doubt").await;
    assert!(ledger.lines().is_empty());
    bed.client.decide(id, "charge", longhaul::Decision::Retry, None).await.expect("it did not happen");
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    assert_eq!(ledger.lines(), ["undo first"]);
    worker.stop().await;
}

async fn usage_is_not_forgotten_where_another_run_undoes(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            for tokens in [10, 20, 30] {
                run.usage(&serde_json::json!({"llm_tokens": tokens}));
                let step = run.step(format!("think {tokens}"), || async { Ok::<_, TaskError>(()) });
                if tokens == 10 { step.undo(|()| async { Ok::<_, TaskError>(()) }).await? } else { step.await? }
            }
            run.signal::<()>("go").await
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let used = bed.waiting_for(id, "signal").await.usage;
    assert_eq!(used, Some(serde_json::json!({"llm_tokens": 30})));
    bed.client.cancel(id, None).await.expect("cancelled");
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.usage), (State::Cancelled, used));
    assert!(bed.kinds(id).await.contains(&"saga.compensated".to_owned()));
    worker.stop().await;
}
