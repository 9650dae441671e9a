//! The worker: one task at one place, cancels, deadlines, lost leases, draining, suspects.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Bed, PATIENCE, at_once};
use longhaul::{Effect, NewTask, QueueSettings, Run, Settings, State, TaskError, Worker};
use serde_json::value::RawValue;
use tokio::sync::{Notify, mpsc};

async fn forever(_run: Run, (): ()) -> Result<(), TaskError> {
    std::future::pending().await
}

async fn nothing(_run: Run, (): ()) -> Result<(), TaskError> {
    Ok(())
}

/// A worker whose handler `hang` says when it runs and when it is dropped, and never ends.
fn hanging(bed: &Bed) -> (Worker, mpsc::UnboundedReceiver<&'static str>) {
    struct Dropped(mpsc::UnboundedSender<&'static str>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.send("dropped");
        }
    }
    let (told, heard) = mpsc::unbounded_channel();
    let worker = Worker::new(&bed.client).handler("hang", move |_run: Run, (): ()| {
        let told = told.clone();
        async move {
            let _ = told.send("running");
            let _dropped = Dropped(told);
            std::future::pending::<Result<(), TaskError>>().await
        }
    });
    (worker, heard)
}

#[tokio::test]
async fn a_cancelled_task_is_dropped_at_once_and_ends_as_cancelled() {
    let bed = Bed::memory().await;
    let (worker, mut heard) = hanging(&bed);
    let worker = worker.start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("hang", &())).await.expect("accepted").id;
    assert_eq!(heard.recv().await, Some("running"));
    bed.client.acting_as("ann").cancel(id, Some("wrong button")).await.expect("taken");
    assert_eq!(heard.recv().await, Some("dropped"));
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Cancelled);
    assert_eq!(task.error.expect("says why").message, "cancelled by ann: wrong button");
    worker.stop().await;
}

#[tokio::test]
async fn an_effect_under_way_is_recorded_after_a_cancel_and_nothing_new_starts() {
    let bed = Bed::memory().await;
    let (begun, mut heard) = mpsc::unbounded_channel();
    let go_on = Arc::new(Notify::new());
    let gate = Arc::clone(&go_on);
    let worker = Worker::new(&bed.client)
        .handler("pay", move |run: Run, (): ()| {
            let (begun, gate) = (begun.clone(), Arc::clone(&gate));
            async move {
                run.step("pay", || async {
                    let _ = begun.send("paying");
                    gate.notified().await;
                    Ok::<_, TaskError>(())
                })
                .effect(Effect::Irreversible)
                .await?;
                run.step("more", || async {
                    let _ = begun.send("more");
                    Ok::<_, TaskError>(())
                })
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("pay", &())).await.expect("accepted").id;
    assert_eq!(heard.recv().await, Some("paying"));
    bed.client.cancel(id, None).await.expect("taken");
    go_on.notify_one();
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    worker.stop().await;
    let kinds = bed.kinds(id).await;
    assert!(kinds.contains(&"step.completed".to_owned()), "the payment is on record: {kinds:?}");
    assert_eq!(heard.recv().await, None, "nothing new was started");
}

#[tokio::test]
async fn a_deadline_ends_a_running_task() {
    let bed = Bed::memory().await;
    let (worker, mut heard) = hanging(&bed);
    let worker = worker.start().await.expect("starts");
    let task = NewTask::new("hang", &()).timeout(Duration::from_millis(50));
    let id = bed.client.submit(task).await.expect("accepted").id;
    assert_eq!(heard.recv().await, Some("running"));
    assert_eq!(heard.recv().await, Some("dropped"));
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "deadline_exceeded"));
    worker.stop().await;
}

#[tokio::test]
async fn a_deadline_ends_a_task_in_the_queue() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client).handler("other", nothing).start().await.expect("starts");
    bed.client.announce(&["nobody_has_it"]).await.expect("announced");
    let task = NewTask::new("nobody_has_it", &()).timeout(Duration::from_secs(60));
    let id = bed.client.submit(task).await.expect("accepted").id;
    bed.client.clock().advance(Duration::from_secs(61));
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "deadline_exceeded"));
    worker.stop().await;
}

#[tokio::test]
async fn a_worker_that_lost_its_lease_gives_the_task_up() {
    let bed = Bed::memory().await;
    let (worker, mut heard) = hanging(&bed);
    let worker = worker.drain(Duration::ZERO).start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("hang", &())).await.expect("accepted").id;
    assert_eq!(heard.recv().await, Some("running"));
    // Time passes for the store and not for the worker: the lease runs out, is taken back, and
    // the same worker gets the task anew, under a new fence, before it has noticed.
    bed.client.clock().advance(Duration::from_secs(60));
    let mut told = [heard.recv().await, heard.recv().await];
    told.sort();
    assert_eq!(told, [Some("dropped"), Some("running")]);
    let task = bed.client.task(id).await.expect("there");
    assert_eq!(task.crashes, 1);
    assert!(task.fence > 1);
    worker.stop().await;
}

#[tokio::test]
async fn a_step_that_can_be_run_again_is_handed_back_at_once_also_when_it_can_be_undone() {
    let bed = Bed::memory().await;
    let (told, mut heard) = mpsc::unbounded_channel();
    let worker = Worker::new(&bed.client)
        .drain(Duration::ZERO)
        .cancel_grace(PATIENCE * 10)
        .handler("h", move |run: Run, (): ()| {
            let told = told.clone();
            async move {
                let hangs = || async {
                    let _ = told.send(());
                    std::future::pending::<Result<(), TaskError>>().await
                };
                run.step("hangs", hangs).undo(|()| async { Ok::<_, TaskError>(()) }).await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    heard.recv().await.expect("it runs");
    tokio::time::timeout(PATIENCE, worker.stop()).await.expect("nothing is waited for");
    let task = bed.client.task(id).await.expect("there");
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 0));
}

#[tokio::test]
async fn a_worker_told_to_stop_finishes_what_it_can_and_hands_back_the_rest() {
    let bed = Bed::memory().await;
    let (begun, mut heard) = mpsc::unbounded_channel();
    let go_on = Arc::new(Notify::new());
    let gate = Arc::clone(&go_on);
    let told = begun.clone();
    let worker = Worker::new(&bed.client)
        .drain(Duration::from_millis(200))
        .handler("ends", move |_run: Run, (): ()| {
            let (told, gate) = (told.clone(), Arc::clone(&gate));
            async move {
                let _ = told.send("ends");
                gate.notified().await;
                Ok::<_, TaskError>(())
            }
        })
        .handler("never", move |_run: Run, (): ()| {
            let begun = begun.clone();
            async move {
                let _ = begun.send("never");
                std::future::pending::<Result<(), TaskError>>().await
            }
        })
        .start()
        .await
        .expect("starts");
    let ends = bed.client.submit(NewTask::new("ends", &())).await.expect("accepted").id;
    let never = bed.client.submit(NewTask::new("never", &())).await.expect("accepted").id;
    heard.recv().await.expect("one runs");
    heard.recv().await.expect("the other too");
    let stopping = tokio::spawn(worker.stop());
    go_on.notify_one();
    tokio::time::timeout(PATIENCE, stopping).await.expect("it stops").expect("no panic");
    assert_eq!(bed.client.task(ends).await.expect("there").state, State::Completed);
    let task = bed.client.task(never).await.expect("there");
    assert_eq!((task.state, task.attempts, task.crashes), (State::Pending, 0, 0), "handed back, at no cost");
    assert!(bed.client.workers().await.expect("listed").is_empty());
}

#[tokio::test]
async fn two_workers_never_run_one_task_and_each_task_is_run() {
    let bed = Bed::sqlite().await;
    let other = bed.another_client().await;
    let runs = Arc::new(AtomicU32::new(0));
    let make = |client: &longhaul::Client| {
        let runs = Arc::clone(&runs);
        Worker::new(client).slots(7).handler("count", move |_run: Run, (): ()| {
            let runs = Arc::clone(&runs);
            async move {
                runs.fetch_add(1, Ordering::SeqCst);
                Ok::<_, TaskError>(())
            }
        })
    };
    let one = make(&bed.client).start().await.expect("starts");
    let two = make(&other).start().await.expect("starts");
    let tasks = (0..300).map(|_| NewTask::new("count", &())).collect();
    let accepted = bed.client.submit_many(tasks).await.expect("the store answers");
    for task in accepted {
        assert_eq!(bed.ended(task.expect("accepted").id).await.state, State::Completed);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 300);
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn tasks_of_a_limited_queue_run_one_after_the_other() {
    let bed = Bed::memory().await;
    let queue = QueueSettings { max_running: Some(2), ..QueueSettings::default() };
    let queues = BTreeMap::from([("default".to_owned(), queue)]);
    bed.client.configure(&Settings { queues, ..Settings::default() }).await.expect("set");
    let (now, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (counted, seen) = (Arc::clone(&now), Arc::clone(&most));
    // Goes on only when two run at once.
    let pair = Arc::new(tokio::sync::Barrier::new(2));
    let worker = Worker::new(&bed.client)
        .handler("work", move |run: Run, (): ()| {
            let (counted, seen, pair) = (Arc::clone(&counted), Arc::clone(&seen), Arc::clone(&pair));
            async move {
                let running = counted.fetch_add(1, Ordering::SeqCst) + 1;
                seen.fetch_max(running, Ordering::SeqCst);
                run.step("a", || async { Ok::<_, TaskError>(()) }).await?;
                pair.wait().await;
                counted.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, TaskError>(())
            }
        })
        .start()
        .await
        .expect("starts");
    let tasks = (0..50).map(|_| NewTask::new("work", &())).collect();
    for task in bed.client.submit_many(tasks).await.expect("the store answers") {
        assert_eq!(bed.ended(task.expect("accepted").id).await.state, State::Completed);
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
    worker.stop().await;
}

#[tokio::test]
async fn a_handlers_error_is_tried_again_up_to_the_tasks_own_number() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .retry(at_once(1))
        .handler("fails", |_run: Run, (): ()| async { Err::<(), _>(std::io::Error::other("down")) })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("fails", &()).max_attempts(2)).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.attempts), (State::Failed, 2));
    let starts = bed.kinds(id).await.into_iter().filter(|kind| kind == "task.started").count();
    assert_eq!(starts, 2);
    worker.stop().await;
}

#[tokio::test]
async fn a_resumed_task_tries_again_what_failed_and_keeps_what_was_done() {
    let bed = Bed::memory().await;
    let (done, healed) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (counted, mended) = (Arc::clone(&done), Arc::clone(&healed));
    let worker = Worker::new(&bed.client)
        .handler("deploy", move |run: Run, (): ()| {
            let (counted, mended) = (Arc::clone(&counted), Arc::clone(&mended));
            async move {
                run.step("dns", || async { Ok::<_, TaskError>(counted.fetch_add(1, Ordering::SeqCst)) }).await?;
                run.step("cert", || async {
                    match mended.load(Ordering::SeqCst) {
                        0 => Err(TaskError::fatal("quota", "no more certificates today")),
                        _ => Ok(()),
                    }
                })
                .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("deploy", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    healed.store(1, Ordering::SeqCst);
    assert!(bed.client.resume(id).await.expect("taken").changed);
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(done.load(Ordering::SeqCst), 1, "the first step was not run again");
    assert!(!bed.client.resume(id).await.expect("taken").changed, "a completed task stays as it is");
    worker.stop().await;
}

#[tokio::test]
async fn input_that_is_not_what_the_handler_takes_fails_without_a_retry() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client).handler("wait", forever).start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("wait", &"text")).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!((task.attempts, task.error.expect("says why").code.as_str()), (1, "bad_input"));
    worker.stop().await;
}

#[tokio::test]
async fn a_result_with_a_number_that_is_too_large_for_most_is_an_error_of_the_handler() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .handler("large", |run: Run, (): ()| async move {
            let large = RawValue::from_string("[1e400]".to_owned()).expect("it is JSON");
            let step = run.step("large", async || Ok::<_, TaskError>(large.clone()));
            step.undo(async |_: Box<RawValue>| Ok::<_, TaskError>(())).await
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("large", &())).await.expect("accepted").id;
    let error = bed.ended(id).await.error.expect("says why");
    assert_eq!((error.code.as_str(), &error.details["undone"]), ("bad_result", &serde_json::json!(["large"])));
    worker.stop().await;
}

#[tokio::test]
async fn a_task_suspected_of_killing_its_worker_runs_alone() {
    let bed = Bed::memory().await;
    let neighbours = Arc::new(AtomicU32::new(0));
    let (begun, mut heard) = mpsc::unbounded_channel();
    let make = || {
        let (begun, client, counted) = (begun.clone(), bed.client.clone(), Arc::clone(&neighbours));
        Worker::new(&bed.client)
            .handler("suspect", move |run: Run, (): ()| {
                let (begun, client, counted) = (begun.clone(), client.clone(), Arc::clone(&counted));
                async move {
                    let _ = begun.send(run.id());
                    if run.fence() < 5 {
                        std::future::pending::<()>().await;
                    }
                    // Two workers were lost with it: now nothing may start beside it, although
                    // there is room and the worker is told of more than one new task.
                    let before = counted.load(Ordering::SeqCst);
                    for _ in 0..3 {
                        client.submit(NewTask::new("neighbour", &())).await.expect("accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    Ok::<_, TaskError>(counted.load(Ordering::SeqCst) - before)
                }
            })
            .handler("neighbour", {
                let counted = Arc::clone(&neighbours);
                move |_run: Run, (): ()| {
                    counted.fetch_add(1, Ordering::SeqCst);
                    async { Ok::<_, TaskError>(()) }
                }
            })
    };
    let mut worker = make().start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("suspect", &())).await.expect("accepted").id;
    for _ in 0..2 {
        heard.recv().await.expect("it runs");
        worker.abort();
        bed.client.clock().advance(Duration::from_secs(16));
        worker = make().start().await.expect("starts");
    }
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "0", "nothing ran beside it");
    for task in bed.client.list(&longhaul::Filter::default()).await.expect("listed") {
        assert_eq!(bed.ended(task.id).await.state, State::Completed, "and the others afterwards");
    }
    worker.stop().await;
}

#[tokio::test]
async fn a_panic_before_the_handler_is_async_is_the_tasks_error_too() {
    let bed = Bed::memory().await;
    let worker = Worker::new(&bed.client)
        .retry(at_once(2))
        .handler("panics", |_run: Run, number: u32| {
            assert!(number > 1, "too small");
            async { Ok::<_, TaskError>(()) }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("panics", &1)).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.error.expect("an error").code, "panic");
    tokio::time::timeout(PATIENCE, worker.stop()).await.expect("nothing is left behind");
}

#[tokio::test]
async fn tasks_fetched_ahead_go_back_when_the_slots_are_taken_for_long() {
    let bed = Bed::memory().await;
    let (begun, mut heard) = mpsc::unbounded_channel();
    let make = |slots: usize| {
        let begun = begun.clone();
        Worker::new(&bed.client).slots(slots).drain(Duration::ZERO).handler(
            "task",
            move |_run: Run, long: bool| {
                let begun = begun.clone();
                async move {
                    if long {
                        let _ = begun.send(());
                        std::future::pending::<()>().await;
                    }
                    Ok::<_, TaskError>(())
                }
            },
        )
    };
    let first = make(1).start().await.expect("starts");
    // Many short ones, so that it fetches ahead; then a long one in front of more short ones.
    let tasks = (0..2_000).map(|number| NewTask::new("task", &(number == 1_000))).collect();
    let ids: Vec<_> = bed.client.submit_many(tasks).await.expect("the store answers");
    heard.recv().await.expect("the long one runs");
    let second = make(4).start().await.expect("starts");
    for (number, id) in ids.into_iter().enumerate() {
        if number != 1_000 {
            assert_eq!(bed.ended(id.expect("accepted").id).await.state, State::Completed);
        }
    }
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_reader_with_a_number_that_was_never_given_gets_what_is_new() {
    let bed = Bed::memory().await;
    bed.client.announce(&["later"]).await.expect("announced");
    let id = bed.client.submit(NewTask::new("later", &())).await.expect("accepted").id;
    let mut events = bed.client.events(id, 1_000).await.expect("the task is there");
    let worker = Worker::new(&bed.client).handler("later", nothing).start().await.expect("starts");
    let next = tokio::time::timeout(PATIENCE, events.next()).await.expect("in time").expect("the store answers");
    assert_eq!(next.expect("not over").kind, "task.started");
    bed.ended(id).await;
    let mut past = bed.client.events(id, 1_000).await.expect("the task is there");
    assert!(past.next().await.expect("the store answers").is_none(), "over");
    worker.stop().await;
}
