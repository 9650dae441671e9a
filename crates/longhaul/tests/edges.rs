//! Where waits, undo, children, forks and checkpoints meet.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::run::CheckpointPolicy;
use longhaul::{
    Child, Decision, Effect, Filter, NewTask, RetryPolicy, Risk, Run, State, TaskError, TaskId, Worker,
};
use serde_json::value::to_raw_value;

type Log = Arc<Mutex<Vec<String>>>;
fn put(log: &Log, line: impl Into<String>) {
    log.lock().expect("not poisoned").push(line.into());
}
fn lines(log: &Log) -> Vec<String> {
    log.lock().expect("as planned").clone()
}

/// The only child of a task.
async fn child_of(bed: &Bed, parent: TaskId) -> TaskId {
    let all = bed.client.list(&Filter::default()).await.expect("listed");
    all.iter().find(|task| task.parent_id == Some(parent)).expect("it has one").id
}

on_every_store!(
    a_step_before_a_checkpoint_is_undone,
    what_lies_before_a_checkpoint_is_undone_after_going_on_from_it,
    what_lies_far_before_a_checkpoint_is_undone_after_going_on_from_it,
    a_signal_is_not_given_twice_over_a_checkpoint,
    an_early_signal_survives_a_checkpoint,
    a_panic_in_an_undo_is_a_failed_try,
    a_resumed_parent_hears_of_a_child_that_ended_meanwhile,
    a_resumed_child_is_not_told_as_ended,
    a_child_is_not_deleted_before_its_parent_was_told,
    an_approval_from_before_a_resume_is_refused_afterwards,
    a_fork_runs_again_what_was_undone,
    a_fork_makes_children_of_its_own_when_those_had_not_ended,
    a_step_given_up_by_decision_is_not_asked_about_again_when_undoing,
    a_cancel_between_two_tries_does_not_wait_for_the_grace,
    nothing_forward_is_written_after_a_cancel,
    a_cancel_of_a_task_that_undoes_reaches_its_children,
);

async fn a_step_before_a_checkpoint_is_undone(bed: Bed) {
    let log = Log::default();
    let l = log.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let l = l.clone();
            async move {
                run.saga()
                    .step("a", || async { Ok::<_, TaskError>(()) })
                    .undo(move |()| {
                        put(&l, "undo a");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await?;
                run.checkpoint(1, 1, &1, CheckpointPolicy::default()).await?;
                Err::<(), _>(TaskError::fatal("no", "no"))
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("as planned").code.as_str()), (State::Failed, "no"));
    assert_eq!(lines(&log), ["undo a"]);
    worker.stop().await;
}

async fn undo_after_checkpoint(bed: Bed, steps: u32) {
    let log = Log::default();
    let l = log.clone();
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("h", move |run: Run, (): ()| {
            let l = l.clone();
            async move {
                let policy = CheckpointPolicy::default();
                if run.resume::<u32>(1, policy).await?.is_none() {
                    run.saga()
                        .step("a", || async { Ok::<_, TaskError>(()) })
                        .undo(move |()| {
                            put(&l, "undo a");
                            async { Ok::<_, TaskError>(()) }
                        })
                        .await?;
                    for _ in 0..steps {
                        run.step("x", || async { Ok::<_, TaskError>(()) }).await?;
                    }
                    run.checkpoint(1, 1, &1u32, policy).await?;
                    return Err(TaskError::retryable("once", "once"));
                }
                run.step("y", || async { Err::<(), _>(TaskError::fatal("no", "no")) }).attempts(1).await
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    let task = bed.ended(id).await;
    assert_eq!(lines(&log), ["undo a"], "{:?}", task.error);
    worker.stop().await;
}
async fn what_lies_before_a_checkpoint_is_undone_after_going_on_from_it(bed: Bed) {
    undo_after_checkpoint(bed, 1).await
}
async fn what_lies_far_before_a_checkpoint_is_undone_after_going_on_from_it(bed: Bed) {
    undo_after_checkpoint(bed, 80).await
}

async fn a_signal_is_not_given_twice_over_a_checkpoint(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .retry(at_once(3))
        .handler("h", move |run: Run, (): ()| async move {
            let policy = CheckpointPolicy::default();
            if run.resume::<u32>(1, policy).await?.is_none() {
                let first: u32 = run.signal("go").await?;
                assert_eq!(first, 1);
                run.checkpoint(1, 1, &1u32, policy).await?;
                return Err(TaskError::retryable("once", "once"));
            }
            run.signal::<u32>("go").await
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.client.signal(id, "go", &1).await.expect("as planned");
    bed.event(id, "checkpoint.saved").await;
    bed.client.signal(id, "go", &2).await.expect("as planned");
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("as planned").get(), "2", "the first one was given already");
    worker.stop().await;
}

async fn an_early_signal_survives_a_checkpoint(bed: Bed) {
    let worker = Worker::new(&bed.client).retry(at_once(3)).handler("h", move |run: Run, (): ()| async move {
        let policy = CheckpointPolicy::default();
        if run.resume::<u32>(1, policy).await?.is_none() {
            for _ in 0..80 {
                run.step("x", || async { Ok::<_, TaskError>(()) }).await?;
            }
            run.checkpoint(1, 1, &1u32, policy).await?;
            return Err(TaskError::retryable("once", "once"));
        }
        run.signal::<u32>("go").await
    });
    bed.client.announce(&["h"]).await.expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.client.signal(id, "go", &1).await.expect("as planned");
    let worker = worker.start().await.expect("as planned");
    assert_eq!(bed.ended(id).await.result.expect("as planned").get(), "1");
    worker.stop().await;
}

async fn a_panic_in_an_undo_is_a_failed_try(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| async move {
            run.saga()
                .step("a", || async { Ok::<_, TaskError>(true) })
                .undo(move |bad: bool| {
                    assert!(!bad, "cannot undo that");
                    async { Ok::<_, TaskError>(()) }
                })
                .undo_retry(at_once(2))
                .await?;
            Err::<(), _>(TaskError::fatal("no", "no"))
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    let task = bed.ended(id).await;
    assert_eq!(task.error.expect("as planned").code, "compensation_failed");
    worker.stop().await;
}

async fn a_resumed_parent_hears_of_a_child_that_ended_meanwhile(bed: Bed) {
    let failed = Arc::new(AtomicBool::new(false));
    let f = failed.clone();
    let worker = Worker::new(&bed.client)
        .handler("child", |run: Run, (): ()| async move { run.signal::<u32>("go").await })
        .handler("h", move |run: Run, (): ()| {
            let f = f.clone();
            async move {
                let child = run.spawn(NewTask::new("child", &())).await?;
                if !f.swap(true, Ordering::SeqCst) {
                    return Err(TaskError::fatal("once", "once"));
                }
                run.join::<u32>(child).await
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    assert_eq!(bed.ended(id).await.state, State::Failed);
    let child = child_of(&bed, id).await;
    bed.client.signal(child, "go", &7).await.expect("as planned");
    assert_eq!(bed.ended(child).await.state, State::Completed);
    // The sweep has told nobody, because the parent had ended.
    bed.client.resume(id).await.expect("as planned");
    assert_eq!(bed.ended(id).await.result.expect("as planned").get(), "7");
    worker.stop().await;
}

/// A parent that joins a child, which waits for a signal.
fn parent_and_child(bed: &Bed) -> Worker {
    Worker::new(&bed.client)
        .handler("child", |run: Run, (): ()| async move { run.signal::<u32>("go").await })
        .handler("h", move |run: Run, (): ()| async move {
            let child = run.spawn(NewTask::new("child", &())).await?;
            run.join::<u32>(child).await
        })
}

async fn a_resumed_child_is_not_told_as_ended(bed: Bed) {
    let worker = parent_and_child(&bed).start().await.expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.waiting_for(id, "child").await;
    let child = child_of(&bed, id).await;
    bed.waiting_for(child, "signal").await;
    worker.stop().await;
    bed.client.cancel(child, None).await.expect("as planned");
    bed.client.resume(child).await.expect("as planned");
    let worker = parent_and_child(&bed).start().await.expect("as planned");
    bed.waiting_for(child, "signal").await;
    bed.client.signal(child, "go", &7).await.expect("as planned");
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    worker.stop().await;
}

async fn a_child_is_not_deleted_before_its_parent_was_told(bed: Bed) {
    let worker = parent_and_child(&bed).start().await.expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.waiting_for(id, "child").await;
    let child = child_of(&bed, id).await;
    bed.waiting_for(child, "signal").await;
    worker.stop().await;
    bed.client.cancel(child, None).await.expect("as planned");
    let early = bed.client.delete(child).await.expect_err("refused").to_string();
    assert!(early.contains("parent has not been told"), "{early}");
    let worker = parent_and_child(&bed).start().await.expect("as planned");
    let task = bed.ended(id).await;
    assert_eq!(task.error.expect("says why").code, "child_cancelled");
    assert!(bed.client.delete(child).await.expect("as planned").changed);
    worker.stop().await;
}

async fn an_approval_from_before_a_resume_is_refused_afterwards(bed: Bed) {
    let runs = Arc::new(AtomicUsize::new(0));
    let r = runs.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let r = r.clone();
            async move {
                let target: String = run
                    .saga()
                    .step("plan", move || {
                        let n = r.fetch_add(1, Ordering::SeqCst);
                        async move { Ok::<_, TaskError>(format!("machine-{n}")) }
                    })
                    .undo(|_: String| async { Ok::<_, TaskError>(()) })
                    .await?;
                run.approve("Delete it?", Risk::ExternalAction).arguments(&target).await?;
                Ok::<_, TaskError>(target)
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.waiting_for(id, "approval").await;
    let old = bed.client.asks(id).await.expect("as planned")[0].clone();
    bed.client.cancel(id, None).await.expect("as planned");
    bed.ended(id).await;
    bed.client.resume(id).await.expect("as planned");
    bed.waiting_for(id, "approval").await;
    // A person answers the old message: id and digest of machine-0.
    let late = bed.client.approve(id, Some(&old.id), None, Some(&old.digest)).await.expect_err("refused");
    assert!(late.to_string().contains("expired"), "{late}");
    bed.client.approve(id, None, None, None).await.expect("only one is open");
    worker.stop().await;
}

async fn a_fork_runs_again_what_was_undone(bed: Bed) {
    let log = Log::default();
    let l = log.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, fails: bool| {
            let l = l.clone();
            async move {
                let (d, u) = (l.clone(), l.clone());
                run.saga()
                    .step("a", move || {
                        put(&d, "a");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .undo(move |()| {
                        put(&u, "undo a");
                        async { Ok::<_, TaskError>(()) }
                    })
                    .await?;
                run.step("b", || async move { if fails { Err(TaskError::fatal("no", "no")) } else { Ok(()) } })
                    .attempts(1)
                    .await
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &true)).await.expect("as planned").id;
    bed.ended(id).await;
    let fork =
        bed.client.fork(id, "b", Some(to_raw_value(&false).expect("as planned"))).await.expect("as planned").id;
    bed.ended(fork).await;
    assert_eq!(lines(&log), ["a", "undo a", "a"], "what was undone is not there any more");
    worker.stop().await;
}

async fn a_fork_makes_children_of_its_own_when_those_had_not_ended(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("child", |run: Run, (): ()| async move {
            run.sleep(Duration::from_millis(300)).await?;
            Ok::<_, TaskError>(7u32)
        })
        .handler("h", move |run: Run, (): ()| async move {
            let child: Child = run.spawn(NewTask::new("child", &())).await?;
            run.step("x", || async { Ok::<_, TaskError>(()) }).await?;
            run.join::<u32>(child).await
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    assert_eq!(bed.ended(id).await.result.expect("as planned").get(), "7");
    let fork = bed.client.fork(id, "x", None).await.expect("as planned").id;
    assert_eq!(bed.ended(fork).await.result.expect("as planned").get(), "7");
    worker.stop().await;
}

async fn a_step_given_up_by_decision_is_not_asked_about_again_when_undoing(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| async move {
            run.saga()
                .step("pay", || async { Err::<(), _>(TaskError::in_doubt("cut", "cut")) })
                .effect(Effect::Compensable)
                .undo(|()| async { Ok::<_, TaskError>(()) })
                .await
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.waiting_for(id, "in_doubt").await;
    bed.client.decide(id, "pay", Decision::Fail, None).await.expect("as planned");
    assert_eq!(bed.ended(id).await.state, State::Failed);
    worker.stop().await;
}

async fn a_cancel_between_two_tries_does_not_wait_for_the_grace(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| async move {
            run.saga()
                .step("a", || async { Err::<(), _>(TaskError::retryable("busy", "busy")) })
                .retry(RetryPolicy {
                    attempts: 3,
                    first: Duration::from_secs(60),
                    cap: Duration::from_secs(60),
                    jitter: false,
                })
                .undo(|()| async { Ok::<_, TaskError>(()) })
                .await
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    bed.event(id, "step.failed").await;
    bed.client.cancel(id, None).await.expect("as planned");
    let ended = bed.client.wait(id, Duration::from_secs(8)).await.expect("before the grace of 10 s is over");
    assert_eq!(ended.state, State::Cancelled);
    worker.stop().await;
}

async fn nothing_forward_is_written_after_a_cancel(bed: Bed) {
    let gate = Arc::new(tokio::sync::Notify::new());
    let at = Arc::new(tokio::sync::Notify::new());
    let (g, a) = (gate.clone(), at.clone());
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (g, a) = (g.clone(), a.clone());
            async move {
                run.saga()
                    .step("a", || async { Ok::<_, TaskError>(()) })
                    .undo(|()| async { Ok::<_, TaskError>(()) })
                    .await?;
                a.notify_one();
                g.notified().await;
                run.publish("mail.sent", &1).await?;
                Ok::<_, TaskError>(())
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    at.notified().await;
    // The run gathers its event after the cancel is on disk and before it is told of it.
    let (c, _) = tokio::join!(bed.client.cancel(id, None), async { gate.notify_one() });
    if let Err(late) = c {
        // The task was quicker: then there was no cancel.
        assert!(late.to_string().contains("completed already"), "{late}");
    }
    bed.ended(id).await;
    let kinds = bed.kinds(id).await;
    let cancel = kinds.iter().position(|k| k == "task.cancel_requested");
    let sent = kinds.iter().position(|k| k == "mail.sent");
    if let (Some(c), Some(s)) = (cancel, sent) {
        assert!(s < c, "forward after the cancel: {kinds:?}");
    }
    worker.stop().await;
}

async fn a_cancel_of_a_task_that_undoes_reaches_its_children(bed: Bed) {
    let (hang, undoing) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (h, u) = (hang.clone(), undoing.clone());
    let worker = Worker::new(&bed.client)
        .handler("child", |run: Run, (): ()| async move { run.signal::<u32>("go").await })
        .handler("h", move |run: Run, (): ()| {
            let (h, u) = (h.clone(), u.clone());
            async move {
                run.saga()
                    .step("a", || async { Ok::<_, TaskError>(()) })
                    .undo(move |()| {
                        let (h, u) = (h.clone(), u.clone());
                        async move {
                            u.notify_one();
                            h.notified().await;
                            Ok::<_, TaskError>(())
                        }
                    })
                    .await?;
                run.spawn(NewTask::new("child", &())).await?;
                Err::<(), _>(TaskError::fatal("no", "no"))
            }
        })
        .start()
        .await
        .expect("as planned");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("as planned").id;
    undoing.notified().await;
    bed.client.cancel(id, None).await.expect("as planned");
    hang.notify_one();
    bed.ended(id).await;
    let child = child_of(&bed, id).await;
    let child = bed.ended(child).await;
    assert_eq!(child.state, State::Cancelled);
    worker.stop().await;
}

/// What must be undone cannot be read any more: that is how the task ends, not a run again and again.
#[tokio::test]
async fn a_task_whose_damaged_log_hides_what_to_undo_ends_and_says_so() {
    ends_undoing_nothing("UPDATE log SET records = '[{\"done\":' WHERE seq > 1 AND records IS NOT NULL").await;
    ends_undoing_nothing("UPDATE log SET count = 'x' WHERE seq > 1").await;
    ends_undoing_nothing("UPDATE log SET run = -1").await;
}

async fn ends_undoing_nothing(damage: &str) {
    let bed = Bed::sqlite().await;
    let worker = || {
        Worker::new(&bed.client).handler("h", |run: Run, (): ()| async move {
            let made = run.saga().step("a", || async { Ok::<_, TaskError>(()) });
            made.undo(|()| async { Ok::<_, TaskError>(()) }).await?;
            run.signal::<()>("never").await
        })
    };
    let first = worker().start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    first.stop().await;
    let file = rusqlite::Connection::open(bed.url.trim_start_matches("sqlite:")).expect("opens");
    assert!(file.execute(damage, ()).expect("written") > 0);
    bed.client.cancel(id, None).await.expect("cancelled");
    let second = worker().start().await.expect("starts");
    let task = bed.ended(id).await;
    let error = task.error.expect("says why");
    assert_eq!((task.state, error.code.as_str()), (State::Failed, "compensation_failed"));
    assert_eq!(error.cause.expect("the damage").code, "journal_damaged");
    second.stop().await;
}

/// A row that the store itself cannot read ends its task; those behind it in the queue are not kept waiting.
#[tokio::test]
async fn a_task_whose_log_cannot_be_read_ends_and_holds_up_no_other() {
    let bed = Bed::sqlite().await;
    bed.client.announce(&["h"]).await.expect("announced");
    let submit = async || bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    let mut damaged = Vec::new();
    let file = rusqlite::Connection::open(bed.url.trim_start_matches("sqlite:")).expect("opens");
    for damage in ["run = -1", "count = -1", "run = 'x'", "count = 9999999999", "events = x'ff'"] {
        let id = submit().await;
        let rows = file.execute(&format!("UPDATE log SET {damage} WHERE task = ?"), [id.0.as_bytes()]);
        assert_eq!(rows.expect("written"), 1);
        damaged.push((damage, id));
    }
    let whole = submit().await;
    let worker = Worker::new(&bed.client)
        .handler("h", |_: Run, (): ()| async { Ok::<_, TaskError>(()) })
        .start()
        .await
        .expect("starts");
    assert_eq!(bed.ended(whole).await.state, State::Completed);
    for (damage, id) in damaged {
        let task = bed.ended(id).await;
        let error = task.error.expect("says why");
        assert_eq!((task.state, error.code.as_str()), (State::Failed, "journal_damaged"), "{damage}");
    }
    worker.stop().await;
}
