//! Steps: recorded once, replayed, tried again, in doubt when they must be.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::{Decision, Effect, NewTask, Run, State, TaskError, Worker};
use tokio::sync::{Notify, mpsc};

/// Counts how often effects happen.
type Count = Arc<AtomicU32>;

fn bump(count: &Count) -> u32 {
    count.fetch_add(1, Ordering::SeqCst) + 1
}

#[tokio::test]
async fn a_task_runs_its_steps_and_gives_the_result() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("sum", |run: Run, numbers: Vec<i64>| async move {
            let mut sum = 0;
            for number in numbers {
                sum = run.step("add", async || Ok::<_, TaskError>(sum + number)).await?;
            }
            Ok::<_, TaskError>(sum)
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("sum", &[1, 2, 3])).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "6"));
    assert_eq!(
        bed.kinds(id).await,
        [
            "task.submitted",
            "task.started",
            "step.started",
            "step.completed",
            "step.started",
            "step.completed",
            "step.started",
            "step.completed",
            "task.completed"
        ]
    );
    let steps: Vec<_> = bed.events(id).await.into_iter().filter_map(|event| event.step).collect();
    assert_eq!(steps, ["add", "add", "add#2", "add#2", "add#3", "add#3"]);
    worker.stop().await;
}

#[tokio::test]
async fn a_recorded_step_is_not_run_again_when_the_handler_is() {
    let bed = Bed::memory().await;
    let effects = Count::default();
    let counted = Arc::clone(&effects);
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("flaky", move |run: Run, (): ()| {
            let counted = Arc::clone(&counted);
            async move {
                let first = run.step("once", || async { Ok::<_, TaskError>(bump(&counted)) }).await?;
                if run.attempts() < 2 {
                    return Err(TaskError::retryable("not_yet", "not yet"));
                }
                Ok(first)
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("flaky", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.attempts, task.result.expect("a result").get()), (State::Completed, 2, "1"));
    assert_eq!(effects.load(Ordering::SeqCst), 1);
    let retries = bed.events(id).await.into_iter().filter(|event| event.data["status"] == "retrying").count();
    assert_eq!(retries, 2, "each retry is a progress event");
    worker.stop().await;
}

#[tokio::test]
async fn a_step_is_tried_as_often_as_it_may_and_the_error_says_so() {
    let bed = Bed::memory().await;
    let tries = Count::default();
    let counted = Arc::clone(&tries);
    let worker = Worker::new(&bed.client)
        .handler("broken", move |run: Run, (): ()| {
            let counted = Arc::clone(&counted);
            async move {
                run.step("call", || async {
                    bump(&counted);
                    Err::<(), _>(std::io::Error::other("no route"))
                })
                .retry(at_once(4))
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("broken", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    let error = task.error.expect("an error");
    assert_eq!((task.state, error.code.as_str()), (State::Failed, "step_failed"));
    assert_eq!((error.details["step"].as_str(), error.details["attempts"].as_u64()), (Some("call"), Some(4)));
    assert_eq!(error.cause.expect("the cause").message, "no route");
    assert_eq!(tries.load(Ordering::SeqCst), 4);
    worker.stop().await;
}

#[tokio::test]
async fn an_error_that_cannot_be_mended_is_not_tried_again() {
    let bed = Bed::memory().await;
    let tries = Count::default();
    let counted = Arc::clone(&tries);
    let worker = Worker::new(&bed.client)
        .handler("denied", move |run: Run, (): ()| {
            let counted = Arc::clone(&counted);
            async move {
                run.step("call", || async {
                    bump(&counted);
                    Err::<(), _>(TaskError::fatal("forbidden", "no"))
                })
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("denied", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    assert_eq!(tries.load(Ordering::SeqCst), 1);
    worker.stop().await;
}

#[tokio::test]
async fn a_step_that_takes_too_long_is_tried_again() {
    let bed = Bed::memory().await;
    let tries = Count::default();
    let counted = Arc::clone(&tries);
    let worker = Worker::new(&bed.client)
        .handler("slow", move |run: Run, (): ()| {
            let counted = Arc::clone(&counted);
            async move {
                run.step("wait", || async {
                    if bump(&counted) == 1 {
                        std::future::pending::<()>().await;
                    }
                    Ok::<_, TaskError>("in time".to_owned())
                })
                .timeout(Duration::from_millis(20))
                .retry(at_once(2))
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("slow", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(tries.load(Ordering::SeqCst), 2);
    worker.stop().await;
}

#[tokio::test]
async fn a_panic_is_the_tasks_error_and_not_the_workers() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("panics", |_run: Run, (): ()| async move {
            if true {
                panic!("oh no");
            }
            Ok::<_, TaskError>(())
        })
        .handler("fine", |_run: Run, (): ()| async move { Ok::<_, TaskError>(()) })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("panics", &())).await.expect("accepted").id;
    let task = bed.ended(id).await;
    let error = task.error.expect("an error");
    assert_eq!((task.state, task.attempts, error.code.as_str()), (State::Failed, 3, "panic"));
    assert!(error.message.contains("oh no"));
    let id = bed.client.submit(NewTask::new("fine", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    worker.stop().await;
}

#[tokio::test]
async fn two_steps_of_one_name_at_once_are_an_error_and_keys_tell_them_apart() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("same", |run: Run, keyed: bool| async move {
            let one = run.step("fetch", async || Ok::<_, TaskError>(1));
            let two = run.step("fetch", async || Ok::<_, TaskError>(2));
            let (one, two) = if keyed { (one.key("a"), two.key("b")) } else { (one, two) };
            let (one, two) = tokio::join!(one.into_future(), two.into_future());
            Ok::<_, TaskError>(one? + two?)
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("same", &false)).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.error.expect("an error").code, "ambiguous_step");
    let id = bed.client.submit(NewTask::new("same", &true)).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "3");
    worker.stop().await;
}

/// A handler that pays, and whose worker can be lost in the middle of paying.
fn pay(
    payments: Count,
    begun: mpsc::Sender<()>,
    verify: bool,
) -> impl Fn(Run, ()) -> futures_util::future::BoxFuture<'static, Result<u32, TaskError>> + Send + Sync {
    move |run: Run, (): ()| {
        let (payments, begun) = (Arc::clone(&payments), begun.clone());
        Box::pin(async move {
            let work = || async {
                let number = bump(&payments);
                if run.fence() == 1 {
                    let _ = begun.send(()).await;
                    std::future::pending::<()>().await;
                }
                Ok::<_, TaskError>(number)
            };
            let step = run.step("pay", work).effect(Effect::Irreversible);
            let step = if verify {
                step.verify(|_| async { Ok::<_, TaskError>(Some(payments.load(Ordering::SeqCst) * 100)) })
            } else {
                step
            };
            step.await
        })
    }
}

/// Loses the worker while it pays; gives the bed, the task, and a worker that takes over.
async fn lost_while_paying(verify: bool) -> (Bed, longhaul::TaskId, Count, longhaul::WorkerHandle) {
    let bed = Bed::memory().await;
    let payments = Count::default();
    let (begun, mut paying) = mpsc::channel(1);
    let make = || Worker::new(&bed.client).handler("pay", pay(Arc::clone(&payments), begun.clone(), verify));
    let first = make().start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("pay", &())).await.expect("accepted").id;
    paying.recv().await.expect("it pays");
    first.abort();
    bed.client.clock().advance(Duration::from_secs(16));
    let second = make().start().await.expect("starts");
    (bed, id, payments, second)
}

#[tokio::test]
async fn an_effect_in_doubt_waits_for_a_decision_and_is_not_repeated() {
    let (bed, id, payments, worker) = lost_while_paying(false).await;
    let task = bed.reaches(id, State::Waiting).await;
    let waiting = task.waiting_for.expect("it says for what");
    assert_eq!((waiting.kind.as_str(), waiting.id.as_str()), ("in_doubt", "pay"));
    assert_eq!(payments.load(Ordering::SeqCst), 1, "not repeated");
    let refused = bed.client.decide(id, "other", Decision::Retry, None).await;
    assert!(refused.is_err(), "only the step in doubt can be decided");
    let result = serde_json::value::to_raw_value(&7).expect("JSON");
    bed.client.decide(id, "pay", Decision::Done(result), Some("seen on the bank statement")).await.expect("taken");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "7");
    assert_eq!(payments.load(Ordering::SeqCst), 1);
    worker.stop().await;
}

#[tokio::test]
async fn a_decision_to_retry_runs_the_effect_once_more() {
    let (bed, id, payments, worker) = lost_while_paying(false).await;
    bed.reaches(id, State::Waiting).await;
    bed.client.decide(id, "pay", Decision::Retry, None).await.expect("taken");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "2");
    assert_eq!(payments.load(Ordering::SeqCst), 2);
    worker.stop().await;
}

#[tokio::test]
async fn a_decision_to_fail_ends_the_step_with_the_doubt_as_cause() {
    let (bed, id, _, worker) = lost_while_paying(false).await;
    bed.reaches(id, State::Waiting).await;
    bed.client.decide(id, "pay", Decision::Fail, Some("it bounced")).await.expect("taken");
    let error = bed.ended(id).await.error.expect("an error");
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("in_doubt", "it was decided that step 'pay' failed: it bounced")
    );
    assert_eq!(error.cause.expect("the doubt").code, "interrupted");
    worker.stop().await;
}

#[tokio::test]
async fn a_step_that_can_verify_its_effect_asks_no_one() {
    let (bed, id, payments, worker) = lost_while_paying(true).await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "100");
    assert_eq!(payments.load(Ordering::SeqCst), 1);
    worker.stop().await;
}

#[tokio::test]
async fn a_timeout_of_an_effect_that_must_not_happen_twice_is_in_doubt() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("pay", |run: Run, (): ()| async move {
            run.step("pay", std::future::pending::<Result<(), TaskError>>)
                .effect(Effect::Irreversible)
                .timeout(Duration::from_millis(5))
                .await
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("pay", &())).await.expect("accepted").id;
    let task = bed.reaches(id, State::Waiting).await;
    assert_eq!(task.waiting_for.expect("it says for what").kind, "in_doubt");
    worker.stop().await;
}

#[tokio::test]
async fn an_idempotent_effect_is_started_again_with_the_same_key() {
    let bed = Bed::memory().await;
    let (keys, mut seen) = mpsc::unbounded_channel();
    let make = || {
        let keys = keys.clone();
        Worker::new(&bed.client).handler("put", move |run: Run, (): ()| {
            let keys = keys.clone();
            async move {
                run.step_with("put", |context| {
                    let _ = keys.send((context.idempotency_key.clone(), context.fence));
                    async move {
                        if context.fence == 1 {
                            std::future::pending::<()>().await;
                        }
                        Ok::<_, TaskError>(())
                    }
                })
                .await
            }
        })
    };
    let first = make().start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("put", &())).await.expect("accepted").id;
    let (key, _) = seen.recv().await.expect("begun");
    first.abort();
    bed.client.clock().advance(Duration::from_secs(16));
    let second = make().start().await.expect("starts");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let (again, fence) = seen.recv().await.expect("begun again");
    assert_eq!(key, again);
    assert!(fence > 1);
    second.stop().await;
}

#[tokio::test]
async fn results_that_are_ready_together_are_given_one_at_a_time_in_the_same_order_again() {
    let bed = Bed::memory().await;
    let (orders, mut seen) = mpsc::unbounded_channel::<Vec<u32>>();
    let gate = Arc::new(Notify::new());
    let (open, told) = (Arc::clone(&gate), orders.clone());
    let worker = Worker::new(&bed.client)
        .retry(at_once(20))
        .handler("race", move |run: Run, (): ()| {
            let (open, told) = (Arc::clone(&open), told.clone());
            async move {
                // Three steps that end in an order of their own in the first run, and at once in
                // every replay.
                let order = std::sync::Mutex::new(Vec::new());
                let one = |number: u32, delay: u64| {
                    let (run, order, open) = (&run, &order, &open);
                    async move {
                        run.step("racer", || async {
                            open.notify_waiters();
                            tokio::time::sleep(Duration::from_millis(delay)).await;
                            Ok::<_, TaskError>(())
                        })
                        .key(number.to_string())
                        .await?;
                        order.lock().expect("no panic").push(number);
                        Ok::<_, TaskError>(())
                    }
                };
                tokio::try_join!(one(1, 9), one(2, 3), one(3, 6))?;
                let _ = told.send(order.into_inner().expect("no panic"));
                if run.attempts() < 9 {
                    return Err(TaskError::retryable("again", "replay"));
                }
                Ok(())
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("race", &()).max_attempts(20)).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let first = seen.recv().await.expect("a first run");
    assert_eq!(first, [2, 3, 1]);
    for _ in 0..9 {
        assert_eq!(seen.recv().await.expect("a replay"), first);
    }
    worker.stop().await;
}

#[tokio::test]
async fn select_takes_the_same_branch_in_every_replay() {
    let bed = Bed::memory().await;
    let (branches, mut seen) = mpsc::unbounded_channel::<&'static str>();
    let worker = Worker::new(&bed.client)
        .retry(at_once(20))
        .handler("choose", move |run: Run, (): ()| {
            let branches = branches.clone();
            async move {
                let slow = run.step("slow", || async {
                    if run.attempts() == 0 {
                        std::future::pending::<()>().await;
                    }
                    Ok::<_, TaskError>(())
                });
                let quick = run.step("quick", || async { Ok::<_, TaskError>(()) });
                let taken = tokio::select! {
                    done = slow.into_future() => done.map(|()| "slow"),
                    done = quick.into_future() => done.map(|()| "quick"),
                }?;
                let _ = branches.send(taken);
                run.step("after", || async { Ok::<_, TaskError>(()) }).await?;
                if run.attempts() < 10 {
                    return Err(TaskError::retryable("again", "replay"));
                }
                Ok(())
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("choose", &()).max_attempts(20)).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    for _ in 0..11 {
        assert_eq!(seen.recv().await.expect("a run"), "quick");
    }
    worker.stop().await;
}

#[tokio::test]
async fn a_panic_in_an_effect_that_must_not_happen_twice_is_in_doubt() {
    let bed = Bed::memory().await;
    let payments = Count::default();
    let counted = Arc::clone(&payments);
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("pay", move |run: Run, (): ()| {
            let counted = Arc::clone(&counted);
            async move {
                run.step("pay", || async {
                    bump(&counted);
                    assert!(counted.load(Ordering::SeqCst) > 1, "paid, and then this");
                    Ok::<_, TaskError>(())
                })
                .effect(Effect::Irreversible)
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("pay", &())).await.expect("accepted").id;
    bed.reaches(id, State::Waiting).await;
    assert_eq!(payments.load(Ordering::SeqCst), 1, "not repeated");
    worker.stop().await;
}

#[tokio::test]
async fn a_step_given_up_in_doubt_is_in_doubt_again_when_the_task_is_resumed() {
    let (bed, id, payments, worker) = lost_while_paying(false).await;
    bed.reaches(id, State::Waiting).await;
    bed.client.decide(id, "pay", Decision::Fail, None).await.expect("taken");
    assert_eq!(bed.ended(id).await.state, State::Failed);
    bed.client.resume(id).await.expect("taken");
    bed.reaches(id, State::Waiting).await;
    assert_eq!(payments.load(Ordering::SeqCst), 1, "not repeated");
    worker.stop().await;
}

#[tokio::test]
async fn an_effect_that_did_not_happen_is_tried_only_as_often_as_it_may() {
    let bed = Bed::memory().await;
    let tries = Count::default();
    let counted = Arc::clone(&tries);
    let worker = Worker::new(&bed.client)
        .handler("pay", move |run: Run, (): ()| {
            let counted = Arc::clone(&counted);
            async move {
                run.step("pay", || async {
                    bump(&counted);
                    Err::<(), _>(TaskError::in_doubt("reset", "the connection was lost"))
                })
                .effect(Effect::Irreversible)
                .retry(at_once(3))
                .verify(|_| async { Ok::<_, TaskError>(None) })
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("pay", &())).await.expect("accepted").id;
    let error = bed.ended(id).await.error.expect("an error");
    assert_eq!((error.code.as_str(), error.details["attempts"].as_u64()), ("step_failed", Some(3)));
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    worker.stop().await;
}

#[tokio::test]
async fn a_checkpoint_beside_a_step_is_an_error() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("both", |run: Run, (): ()| async move {
            let step = run.step("a", async || Ok::<_, TaskError>(1)).into_future();
            let snapshot = run.checkpoint(1, 1, &1, longhaul::run::CheckpointPolicy::default());
            let (step, snapshot) = tokio::join!(step, snapshot);
            step.and(snapshot.map(|()| 1))
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("both", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.error.expect("an error").code, "checkpoint_in_flight");
    worker.stop().await;
}
