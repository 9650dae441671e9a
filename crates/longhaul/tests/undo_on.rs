//! When what a task did is undone: always by default, else only by request.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Bed;
use longhaul::{CheckpointPolicy, Client, Error, NewTask, Run, State, TaskError, UndoOn, Worker, WorkerHandle};
use serde_json::json;
use tokio::sync::Notify;

on_every_store!(
    a_failed_task_that_says_so_is_undone_by_request_only_and_once,
    a_suspended_task_is_cancelled_without_undo_unless_that_is_asked_for,
    a_running_task_is_cancelled_without_undo_unless_that_is_asked_for,
    a_missed_deadline_counts_as_failed,
    a_lost_task_that_was_cancelled_is_not_undone,
    what_lies_before_checkpoints_is_undone_by_request_too,
    a_resumed_task_does_again_what_was_undone_before_a_checkpoint,
    a_resumed_task_that_was_not_undone_keeps_its_checkpoints,
);

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

    async fn make(&self, run: &Run, name: &'static str) -> Result<String, TaskError> {
        let (done, undone) = (self.clone(), self.clone());
        run.step(name, move || {
            done.write(name);
            async move { Ok::<_, TaskError>(name.to_owned()) }
        })
        .undo(move |result: String| {
            let undone = undone.clone();
            async move {
                undone.write(format!("undo {result}"));
                Ok::<_, TaskError>(())
            }
        })
        .await
    }
}

const NEVER: UndoOn = UndoOn { failed: false, cancelled: false };

/// Makes two things, with a checkpoint in between; then waits for a signal that says how to end.
async fn work(run: Run, undo_on: UndoOn, ledger: Ledger, hangs: Option<Arc<Notify>>) -> Result<String, TaskError> {
    run.undo_on(undo_on);
    let policy = CheckpointPolicy::default();
    let made = run.resume::<usize>(1, policy).await?.unwrap_or(0);
    for (number, name) in ["a", "b"].into_iter().enumerate().skip(made) {
        ledger.make(&run, name).await?;
        run.checkpoint(1, 1, &(number + 1), policy).await?;
    }
    if let Some(hangs) = hangs {
        hangs.notify_one();
        std::future::pending::<()>().await;
    }
    let end = run.signal::<String>("end").await?;
    let undone = ledger.lines().iter().any(|line| line.starts_with("undo"));
    match end.as_str() {
        // Once: the signal is given again after a resume.
        "fail" if !undone => Err(TaskError::fatal("told", "it was told to fail")),
        end => Ok(end.to_owned()),
    }
}

async fn start(client: &Client, undo_on: UndoOn, ledger: &Ledger, hangs: Option<&Arc<Notify>>) -> WorkerHandle {
    let (ledger, hangs) = (ledger.clone(), hangs.cloned());
    Worker::new(client)
        .handler("work", move |run: Run, (): ()| work(run, undo_on, ledger.clone(), hangs.clone()))
        .start()
        .await
        .expect("starts")
}

fn refusal(answer: Result<longhaul::store::Accepted, Error>) -> String {
    match answer.expect_err("refused") {
        Error::Control(refused) => refused.to_string(),
        other => panic!("another error: {other}"),
    }
}

async fn a_failed_task_that_says_so_is_undone_by_request_only_and_once(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed.client, NEVER, &ledger, None).await;
    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.signal(id, "end", &"fail").await.expect("sent");
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "told"));
    assert_eq!(ledger.lines(), ["a", "b"]);
    let undo = bed.client.undo(id, None).await.expect("accepted").id;
    let twice = refusal(bed.client.undo(id, None).await);
    assert!(twice.contains(&undo.to_string()), "{twice}");
    let undone = bed.ended(undo).await;
    assert_eq!(undone.result.expect("a result").get(), r#"{"undone":["b","a"]}"#);
    assert!(refusal(bed.client.undo(id, None).await).contains("undone by"));
    assert_eq!(ledger.lines(), ["a", "b", "undo b", "undo a"]);
    worker.stop().await;
}

async fn a_suspended_task_is_cancelled_without_undo_unless_that_is_asked_for(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed.client, NEVER, &ledger, None).await;
    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    let cancelled = bed.client.cancel(id, None).await.expect("cancelled");
    assert_eq!(cancelled.state, State::Cancelled, "at once");
    assert_eq!(ledger.lines(), ["a", "b"]);
    let undo = bed.client.undo(id, None).await.expect("accepted").id;
    assert_eq!(bed.ended(undo).await.state, State::Completed);
    assert_eq!(ledger.lines(), ["a", "b", "undo b", "undo a"]);

    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.cancel_with_undo(id, None).await.expect("cancelled");
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Cancelled);
    assert_eq!(task.error.expect("says why").details["undone"], json!(["b", "a"]));
    assert_eq!(ledger.lines()[4..], ["a", "b", "undo b", "undo a"]);
    assert!(refusal(bed.client.undo(id, None).await).contains("nothing is left to undo"));
    worker.stop().await;
}

async fn a_running_task_is_cancelled_without_undo_unless_that_is_asked_for(bed: Bed) {
    for (undo, lines) in [(false, vec!["a", "b"]), (true, vec!["a", "b", "undo b", "undo a"])] {
        let (ledger, hangs) = (Ledger::default(), Arc::new(Notify::new()));
        let worker = start(&bed.client, NEVER, &ledger, Some(&hangs)).await;
        let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
        hangs.notified().await;
        match undo {
            false => bed.client.cancel(id, None).await,
            true => bed.client.cancel_with_undo(id, None).await,
        }
        .expect("cancelled");
        assert_eq!(bed.ended(id).await.state, State::Cancelled);
        assert_eq!(ledger.lines(), lines);
        worker.stop().await;
    }
}

async fn a_missed_deadline_counts_as_failed(bed: Bed) {
    for (undo_on, lines) in [
        (UndoOn { failed: false, cancelled: true }, vec!["a", "b"]),
        (UndoOn { failed: true, cancelled: false }, vec!["a", "b", "undo b", "undo a"]),
    ] {
        let ledger = Ledger::default();
        let worker = start(&bed.client, undo_on, &ledger, None).await;
        let task = NewTask::new("work", &()).timeout(Duration::from_secs(600));
        let id = bed.client.submit(task).await.expect("accepted").id;
        bed.waiting_for(id, "signal").await;
        bed.client.clock().advance(Duration::from_secs(601));
        let task = bed.ended(id).await;
        assert_eq!(task.error.expect("says why").code, "deadline_exceeded");
        assert_eq!(ledger.lines(), lines);
        worker.stop().await;
    }
}

async fn a_lost_task_that_was_cancelled_is_not_undone(bed: Bed) {
    let (ledger, hangs) = (Ledger::default(), Arc::new(Notify::new()));
    let other = bed.another_client_or_same().await;
    let lost = start(&other, NEVER, &ledger, Some(&hangs)).await;
    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    hangs.notified().await;
    lost.abort();
    bed.client.cancel(id, None).await.expect("asked for");
    // Its handler is never polled again: what is recorded of it decides.
    let keeper = Worker::new(&bed.client)
        .handler("other", |_: Run, (): ()| async { Ok::<_, TaskError>(()) })
        .start()
        .await
        .expect("starts");
    bed.client.clock().advance(Duration::from_secs(60));
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    assert_eq!(ledger.lines(), ["a", "b"]);
    keeper.stop().await;
}

async fn what_lies_before_checkpoints_is_undone_by_request_too(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed.client, NEVER, &ledger, None).await;
    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.signal(id, "end", &"well").await.expect("sent");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let undo = bed.client.undo(id, None).await.expect("accepted").id;
    assert_eq!(bed.ended(undo).await.result.expect("a result").get(), r#"{"undone":["b","a"]}"#);
    assert_eq!(ledger.lines(), ["a", "b", "undo b", "undo a"]);
    worker.stop().await;
}

async fn a_resumed_task_does_again_what_was_undone_before_a_checkpoint(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed.client, UndoOn::default(), &ledger, None).await;
    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.signal(id, "end", &"fail").await.expect("sent");
    assert_eq!(bed.ended(id).await.state, State::Failed);
    assert_eq!(ledger.lines(), ["a", "b", "undo b", "undo a"]);
    bed.client.resume(id).await.expect("opened again");
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    assert_eq!(ledger.lines()[4..], ["a", "b"], "no snapshot counts on what is gone");
    worker.stop().await;
}

async fn a_resumed_task_that_was_not_undone_keeps_its_checkpoints(bed: Bed) {
    let ledger = Ledger::default();
    let worker = start(&bed.client, NEVER, &ledger, None).await;
    let id = bed.client.submit(NewTask::new("work", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.cancel(id, None).await.expect("cancelled");
    bed.client.resume(id).await.expect("opened again");
    bed.client.signal(id, "end", &"well").await.expect("sent");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert_eq!(bed.client.checkpoint_list(id).await.expect("there").len(), 2);
    assert_eq!(ledger.lines(), ["a", "b"]);
    worker.stop().await;
}
