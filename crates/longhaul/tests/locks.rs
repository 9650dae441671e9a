//! Locks: one task at a time, whichever machine it runs on and whatever becomes of it.

mod common;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::{NewTask, Run, State, TaskError, TaskId, Worker, WorkerHandle};

const DAY: Duration = Duration::from_secs(86_400);

/// Starts a worker with a handler named `h` that takes a word.
async fn start<F, Fut, T>(client: &longhaul::Client, handler: F) -> WorkerHandle
where
    F: Fn(Run, String) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<T, TaskError>> + Send + 'static,
    T: serde::Serialize + Send + 'static,
{
    Worker::new(client).retry(at_once(2)).handler("h", handler).start().await.expect("starts")
}

async fn submit(bed: &Bed, word: &str) -> TaskId {
    bed.client.submit(NewTask::new("h", &word)).await.expect("accepted").id
}

/// The token of the first `lock.acquired`, once there is one.
async fn token(bed: &Bed, id: TaskId) -> u64 {
    bed.event(id, "lock.acquired").await.data["token"].as_u64().expect("a number")
}

on_every_store!(
    twenty_tasks_on_two_machines_never_meet,
    those_who_wait_are_served_in_the_order_of_asking,
    a_lock_is_kept_over_suspension_and_a_lost_worker_with_the_same_token,
    completion_failure_and_cancel_pass_the_lock_on,
    a_task_that_undoes_holds_its_lock_until_that_is_done,
    after_max_hold_the_next_one_has_a_larger_token,
    a_task_has_a_lock_again_that_it_holds,
    two_tasks_that_want_each_others_locks_do_not_wait_for_ever,
    who_is_cancelled_in_line_is_passed_over,
    a_bounded_wait_ends_with_an_error_and_another_attempt_may_get_it,
    a_short_wait_for_a_lock_does_not_suspend,
    a_resumed_task_gets_its_locks_anew,
    what_was_done_under_a_lock_is_on_record_before_it_is_given_back,
    a_bad_name_is_an_error,
);

/// Adds to a counter in a way that loses counts when two do it at once.
async fn count_up(counter: &AtomicU32, inside: &AtomicU32) -> Result<(), TaskError> {
    if inside.fetch_add(1, Ordering::SeqCst) != 0 {
        return Err(TaskError::fatal("met", "two tasks have the lock"));
    }
    let before = counter.load(Ordering::SeqCst);
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    counter.store(before + 1, Ordering::SeqCst);
    inside.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

async fn twenty_tasks_on_two_machines_never_meet(bed: Bed) {
    let shared = Arc::new((AtomicU32::new(0), AtomicU32::new(0), Mutex::new(Vec::new())));
    let handler = {
        let shared = Arc::clone(&shared);
        move |run: Run, release: String| {
            let shared = Arc::clone(&shared);
            async move {
                let lock = run.lock("counter").await?;
                run.step("count", || async {
                    let (counter, inside, tokens) = &*shared;
                    tokens.lock().expect("not poisoned").push(lock.token());
                    count_up(counter, inside).await
                })
                .await?;
                // Half of them leave it to their end.
                if release == "release" {
                    assert!(lock.release().await?);
                }
                Ok::<_, TaskError>(())
            }
        }
    };
    let other = bed.another_client_or_same().await;
    let workers = [start(&bed.client, handler.clone()).await, start(&other, handler).await];
    let mut ids = Vec::new();
    for number in 0..20 {
        ids.push(submit(&bed, if number % 2 == 0 { "release" } else { "end" }).await);
    }
    for id in ids {
        let task = bed.ended(id).await;
        assert_eq!(task.state, State::Completed, "{:?}", task.error);
    }
    assert_eq!(shared.0.load(Ordering::SeqCst), 20);
    let tokens = shared.2.lock().expect("not poisoned").clone();
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "tokens grow: {tokens:?}");
    for worker in workers {
        worker.stop().await;
    }
}

async fn those_who_wait_are_served_in_the_order_of_asking(bed: Bed) {
    let order = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&order);
    let worker = start(&bed.client, move |run, word| {
        let noted = Arc::clone(&noted);
        async move {
            let lock = run.lock("line").await?;
            noted.lock().expect("not poisoned").push(run.id());
            if word == "first" {
                run.signal::<()>("go").await?;
            }
            lock.release().await
        }
    })
    .await;
    let first = submit(&bed, "first").await;
    bed.waiting_for(first, "signal").await;
    let mut expected = vec![first, first];
    for _ in 0..5 {
        let id = submit(&bed, "next").await;
        let task = bed.waiting_for(id, "lock").await;
        assert_eq!(task.waiting_for.expect("says what for").id, "line");
        expected.push(id);
    }
    bed.client.signal(first, "go", &()).await.expect("sent");
    for id in &expected[1..] {
        assert_eq!(bed.ended(*id).await.state, State::Completed);
    }
    // The first one was replayed once, up to where it waited.
    assert_eq!(*order.lock().expect("not poisoned"), expected);
    worker.stop().await;
}

async fn a_lock_is_kept_over_suspension_and_a_lost_worker_with_the_same_token(bed: Bed) {
    let runs = Arc::new(AtomicU32::new(0));
    let make = || {
        let runs = Arc::clone(&runs);
        move |run: Run, word: String| {
            let runs = Arc::clone(&runs);
            async move {
                let lock = run.lock("db").max_hold(3 * DAY).await?;
                if word == "waiter" {
                    return Ok(lock.token());
                }
                run.sleep(DAY).await?;
                if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                    run.publish("worker.lost", &()).await?;
                    std::future::pending::<()>().await;
                }
                run.signal::<()>("go").await?;
                Ok(lock.token())
            }
        }
    };
    let worker = start(&bed.client, make()).await;
    let holder = submit(&bed, "holder").await;
    bed.waiting_for(holder, "timer").await;
    let held = token(&bed, holder).await;
    let waiter = submit(&bed, "waiter").await;
    bed.waiting_for(waiter, "lock").await;
    bed.client.clock().advance(DAY);
    bed.event(holder, "worker.lost").await;
    worker.abort();
    bed.client.clock().advance(Duration::from_secs(60));
    let worker = start(&bed.client, make()).await;
    bed.waiting_for(holder, "signal").await;
    assert_eq!(bed.client.task(waiter).await.expect("there").state, State::Waiting);
    bed.client.signal(holder, "go", &()).await.expect("sent");
    assert_eq!(bed.ended(holder).await.result.expect("a result").get(), held.to_string());
    let next: u64 = bed.ended(waiter).await.result.expect("a result").get().parse().expect("a number");
    assert!(next > held);
    worker.stop().await;
}

async fn completion_failure_and_cancel_pass_the_lock_on(bed: Bed) {
    let worker = start(&bed.client, |run, word| async move {
        let _lock = run.lock("db").await?;
        if word == "next" {
            return Ok(());
        }
        run.signal::<()>("go").await?;
        if word == "fail" { Err(TaskError::fatal("broken", "it broke")) } else { Ok(()) }
    })
    .await;
    for word in ["complete", "fail", "cancel"] {
        let holder = submit(&bed, word).await;
        bed.waiting_for(holder, "signal").await;
        let next = submit(&bed, "next").await;
        bed.waiting_for(next, "lock").await;
        if word == "cancel" {
            bed.client.cancel(holder, None).await.expect("cancelled");
        } else {
            bed.client.signal(holder, "go", &()).await.expect("sent");
        }
        assert_eq!(bed.ended(next).await.state, State::Completed, "after {word}");
        assert!(bed.ended(holder).await.state.is_final());
    }
    worker.stop().await;
}

async fn a_task_that_undoes_holds_its_lock_until_that_is_done(bed: Bed) {
    let (undoing, go) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (begun, may) = (Arc::clone(&undoing), Arc::clone(&go));
    let undone_at = Arc::new(AtomicU64::new(0));
    let undone = Arc::clone(&undone_at);
    let worker = start(&bed.client, move |run, word| {
        let (begun, may, undone) = (Arc::clone(&begun), Arc::clone(&may), Arc::clone(&undone));
        async move {
            let lock = run.lock("db").await?;
            if word == "next" {
                return Ok(undone.load(Ordering::SeqCst));
            }
            let token = lock.token();
            run.saga()
                .step("write", || async { Ok::<_, TaskError>(()) })
                .undo(move |()| {
                    let (begun, may, undone) = (Arc::clone(&begun), Arc::clone(&may), Arc::clone(&undone));
                    async move {
                        begun.notify_one();
                        may.notified().await;
                        undone.store(token, Ordering::SeqCst);
                        Ok::<_, TaskError>(())
                    }
                })
                .await?;
            Err(TaskError::fatal("broken", "it broke"))
        }
    })
    .await;
    let holder = submit(&bed, "undo").await;
    undoing.notified().await;
    let next = submit(&bed, "next").await;
    bed.waiting_for(next, "lock").await;
    go.notify_one();
    assert_eq!(bed.ended(holder).await.state, State::Failed);
    let seen = bed.ended(next).await.result.expect("a result");
    assert_eq!(seen.get(), token(&bed, holder).await.to_string(), "it was undone before");
    worker.stop().await;
}

async fn after_max_hold_the_next_one_has_a_larger_token(bed: Bed) {
    let worker = start(&bed.client, |run, word| async move {
        let lock = run.lock("db").max_hold(Duration::from_secs(60)).await?;
        if word == "slow" {
            run.signal::<()>("go").await?;
        }
        let token = lock.token();
        Ok((token, lock.release().await?))
    })
    .await;
    let slow = submit(&bed, "slow").await;
    bed.waiting_for(slow, "signal").await;
    let next = submit(&bed, "next").await;
    bed.waiting_for(next, "lock").await;
    bed.client.clock().advance(Duration::from_secs(61));
    let result = |task: longhaul::Task| -> (u64, bool) {
        serde_json::from_str(task.result.expect("a result").get()).expect("a token and a word")
    };
    let (larger, held) = result(bed.ended(next).await);
    assert!(held);
    bed.event(slow, "lock.expired").await;
    bed.client.signal(slow, "go", &()).await.expect("sent");
    let (smaller, held) = result(bed.ended(slow).await);
    assert!(!held, "it is told that it had lost the lock");
    assert!(smaller < larger);
    worker.stop().await;
}

async fn a_task_has_a_lock_again_that_it_holds(bed: Bed) {
    let worker = start(&bed.client, |run, _| async move {
        let first = run.lock("db").await?;
        let second = run.lock("db").await?;
        assert!(second.until() >= first.until());
        let tokens = (first.token(), second.token());
        let released = (first.release().await?, second.release().await?);
        let third = run.lock("db").await?;
        Ok((tokens.0 == tokens.1, released, third.token() > tokens.1))
    })
    .await;
    let id = submit(&bed, "again").await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "[true,[true,false],true]");
    worker.stop().await;
}

async fn two_tasks_that_want_each_others_locks_do_not_wait_for_ever(bed: Bed) {
    let worker = start(&bed.client, |run, word| async move {
        let (first, second) = if word == "a" { ("x", "y") } else { ("y", "x") };
        let _one = run.lock(first).await?;
        run.signal::<()>("go").await?;
        let _two = run.lock(second).await?;
        Ok(())
    })
    .await;
    let (a, b) = (submit(&bed, "a").await, submit(&bed, "b").await);
    for id in [a, b] {
        bed.waiting_for(id, "signal").await;
    }
    bed.client.signal(a, "go", &()).await.expect("sent");
    bed.waiting_for(a, "lock").await;
    bed.client.signal(b, "go", &()).await.expect("sent");
    let error = bed.ended(b).await.error.expect("says why");
    assert_eq!(error.code, "deadlock");
    assert!(error.message.contains(&a.to_string()) && error.message.contains("'x'"), "{}", error.message);
    assert_eq!(error.details["cycle"][0]["lock"], "x");
    assert_eq!(error.details["cycle"][1]["task"], a.to_string());
    assert_eq!(bed.ended(a).await.state, State::Completed, "the other one goes on");
    worker.stop().await;
}

async fn who_is_cancelled_in_line_is_passed_over(bed: Bed) {
    let worker = start(&bed.client, |run, word| async move {
        let _lock = run.lock("db").await?;
        if word == "holder" {
            run.signal::<()>("go").await?;
        }
        Ok(())
    })
    .await;
    let holder = submit(&bed, "holder").await;
    bed.waiting_for(holder, "signal").await;
    let mut line = Vec::new();
    for _ in 0..3 {
        let id = submit(&bed, "next").await;
        bed.waiting_for(id, "lock").await;
        line.push(id);
    }
    for id in &line[..2] {
        bed.client.cancel(*id, None).await.expect("cancelled");
    }
    bed.client.delete(line[1]).await.expect("deleted");
    bed.client.signal(holder, "go", &()).await.expect("sent");
    assert_eq!(bed.ended(line[2]).await.state, State::Completed);
    assert!(!bed.kinds(line[0]).await.contains(&"lock.acquired".to_owned()));
    worker.stop().await;
}

async fn a_bounded_wait_ends_with_an_error_and_another_attempt_may_get_it(bed: Bed) {
    let worker = start(&bed.client, |run, word| async move {
        if word == "holder" {
            let lock = run.lock("db").max_hold(9 * DAY).await?;
            run.signal::<()>("go").await?;
            return lock.release().await;
        }
        run.lock("db").within(DAY).await?.release().await
    })
    .await;
    let holder = submit(&bed, "holder").await;
    bed.waiting_for(holder, "signal").await;
    let hasty = submit(&bed, "hasty").await;
    bed.waiting_for(hasty, "lock").await;
    bed.client.clock().advance(DAY);
    bed.event(hasty, "lock.timed_out").await;
    let retried = bed.event(hasty, "progress").await;
    assert_eq!(retried.data["error"]["code"], "lock_timeout");
    bed.waiting_for(hasty, "lock").await;
    bed.client.signal(holder, "go", &()).await.expect("sent");
    let task = bed.ended(hasty).await;
    assert_eq!((task.state, task.attempts), (State::Completed, 1), "{:?}", task.error);
    worker.stop().await;
}

async fn a_short_wait_for_a_lock_does_not_suspend(bed: Bed) {
    let worker = start(&bed.client, |run, _| async move { run.lock("db").await?.release().await }).await;
    let id = submit(&bed, "quick").await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "true");
    let kinds = bed.kinds(id).await;
    assert_eq!(kinds, ["task.submitted", "task.started", "lock.acquired", "lock.released", "task.completed"]);
    worker.stop().await;
}

async fn what_was_done_under_a_lock_is_on_record_before_it_is_given_back(bed: Bed) {
    let worker = start(&bed.client, |run, _| async move {
        let lock = run.lock("db").await?;
        run.step("look", async || Ok::<_, TaskError>(1)).effect(longhaul::Effect::Read).deferred(true).await?;
        lock.release().await
    })
    .await;
    let id = submit(&bed, "once").await;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let kinds = bed.kinds(id).await;
    let place = |kind: &str| kinds.iter().position(|told| told == kind).expect("it is told");
    assert!(place("step.completed") < place("lock.released"), "a crash in between would do it again: {kinds:?}");
    worker.stop().await;
}

async fn a_resumed_task_gets_its_locks_anew(bed: Bed) {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let worker = start(&bed.client, move |run, _| {
        let counted = Arc::clone(&counted);
        async move {
            let lock = run.lock("db").await?;
            let token = lock.token();
            lock.release().await?;
            let kept = run.lock("disk").await?;
            if counted.fetch_add(1, Ordering::SeqCst) == 0 {
                return Err(TaskError::fatal("broken", "it broke"));
            }
            Ok((token, kept.token()))
        }
    })
    .await;
    let id = submit(&bed, "once").await;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    let first = token(&bed, id).await;
    bed.client.resume(id).await.expect("resumed");
    let task = bed.ended(id).await;
    let (db, disk): (u64, u64) = serde_json::from_str(task.result.expect("a result").get()).expect("two tokens");
    assert!(db > first && disk > db, "{first} {db} {disk}");
    worker.stop().await;
}

async fn a_bad_name_is_an_error(bed: Bed) {
    let worker = start(&bed.client, |run, _| async move { run.lock("a/b").await.map(drop) }).await;
    let id = submit(&bed, "bad").await;
    assert_eq!(bed.ended(id).await.error.expect("says why").code, "bad_lock");
    worker.stop().await;
}
