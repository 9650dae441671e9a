//! Undo by request: what a task that has ended did is undone by a task of its own.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bed, at_once};
use longhaul::run::Step;
use longhaul::store::Accepted;
use longhaul::{
    AskStatus, Client, Decision, Effect, Error, Filter, NewTask, Risk, Run, State, StepContext, Task, TaskError,
    TaskId, UndoOn, Worker, WorkerHandle,
};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};

on_every_store!(
    a_completed_task_is_undone_by_a_task_of_its_own_last_completed_first,
    what_a_failed_undo_left_is_undone_by_request_and_nothing_else,
    an_undo_that_fails_can_be_asked_for_again_and_undoes_the_rest_under_the_same_keys,
    what_cannot_be_undone_is_refused_with_the_reason,
    two_undos_at_once_make_one,
    an_undo_goes_on_where_a_lost_worker_left_it,
    a_task_that_was_undone_is_neither_resumed_nor_forked_and_neither_is_its_undo,
    a_cancel_can_ask_to_undo,
    a_cancel_that_asks_to_undo_is_refused_after_one_that_did_not,
    a_fork_does_not_go_on_when_what_it_took_over_was_undone,
    an_effect_that_has_no_undo_is_named_when_the_rest_is_undone,
    what_was_asked_has_expired_once_undoing_begins,
    a_fork_takes_over_nothing_that_was_undone_before_the_step_it_is_made_from,
    a_cancel_does_not_stop_an_undo_midway,
    what_a_child_did_is_undone_in_its_place,
    a_child_that_cannot_be_undone_is_told_and_can_be_tried_again,
    a_cancel_with_undo_undoes_what_a_child_did_that_has_ended,
);

/// What is outside: what was done to it, and what cannot be undone at present.
#[derive(Clone, Default)]
struct World {
    lines: Arc<Mutex<Vec<String>>>,
    keys: Arc<Mutex<Vec<String>>>,
    stuck: Arc<Mutex<Vec<&'static str>>>,
    /// The undo of `b` says so and then hangs.
    hangs: Option<Arc<Notify>>,
}

impl World {
    fn write(&self, line: impl Into<String>) {
        self.lines.lock().expect("not poisoned").push(line.into());
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("not poisoned").clone()
    }

    /// The keys of undos that were tried, in order.
    fn keys(&self) -> Vec<String> {
        self.keys.lock().expect("not poisoned").clone()
    }

    fn stick(&self, names: &[&'static str]) {
        *self.stuck.lock().expect("not poisoned") = names.to_vec();
    }

    fn step<'a>(&self, run: &'a Run, name: &'static str) -> Step<'a, String> {
        let (done, world) = (self.clone(), self.clone());
        let step = run.step(name, move || {
            done.write(name);
            async move { Ok::<_, TaskError>(name.to_owned()) }
        });
        let undo = move |context: StepContext, result: String| {
            let world = world.clone();
            async move {
                world.keys.lock().expect("not poisoned").push(context.idempotency_key);
                if world.stuck.lock().expect("not poisoned").contains(&name) {
                    return Err(TaskError::retryable("stuck", "cannot be removed"));
                }
                if name == "b"
                    && let Some(hangs) = &world.hangs
                {
                    hangs.notify_one();
                    std::future::pending::<()>().await;
                }
                world.write(format!("undo {result}"));
                Ok(())
            }
        };
        step.undo_with(undo).undo_retry(at_once(2))
    }
}

/// Three steps with undos and one without; the one after them fails when told to, and that error is
/// the task's.
async fn deploy(run: Run, fails: bool, world: World) -> Result<u32, TaskError> {
    // An error that was caught belongs to what is replayed.
    let _ = run.step("probe", || async { Err::<(), _>(TaskError::fatal("no_probe", "there is none")) }).await;
    for name in ["a", "b", "c"] {
        world.step(&run, name).await?;
    }
    run.step("look", || async { Ok::<_, TaskError>(()) }).await?;
    if fails {
        return Err(TaskError::fatal("told", "it was told to fail"));
    }
    Ok(3)
}

async fn start(client: &Client, world: &World) -> WorkerHandle {
    let world = world.clone();
    Worker::new(client)
        .queues(["q"])
        .handler("deploy", move |run: Run, fails: bool| deploy(run, fails, world.clone()))
        .start()
        .await
        .expect("starts")
}

async fn ended(bed: &Bed, fails: bool) -> Task {
    let task = NewTask::new("deploy", &fails).queue("q").priority(7).tag("app", "shop");
    let id = bed.client.submit(task).await.expect("accepted").id;
    bed.ended(id).await
}

async fn undo(bed: &Bed, id: TaskId) -> Task {
    let undo = bed.client.acting_as("ann").undo(id, Some("not wanted")).await.expect("accepted");
    assert!(undo.new);
    bed.ended(undo.id).await
}

fn refusal(answer: Result<Accepted, Error>) -> String {
    match answer.expect_err("refused") {
        Error::Control(refused) => refused.to_string(),
        other => panic!("another error: {other}"),
    }
}

async fn undos_of(bed: &Bed, id: TaskId) -> Vec<Task> {
    let all = bed.client.list(&Filter::default()).await.expect("listed");
    all.into_iter().filter(|task| task.undo_of == Some(id)).collect()
}

async fn a_completed_task_is_undone_by_a_task_of_its_own_last_completed_first(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    let done = ended(&bed, false).await;
    assert_eq!(done.state, State::Completed);
    let undo = undo(&bed, done.id).await;
    assert_eq!(undo.state, State::Completed, "{:?}", undo.error);
    assert_eq!(undo.result.expect("a result").get(), r#"{"undone":["c","b","a"]}"#);
    assert_eq!(world.lines(), ["a", "b", "c", "undo c", "undo b", "undo a"]);
    assert_eq!((undo.undo_of, undo.error.is_none()), (Some(done.id), true));
    assert_eq!((undo.handler, undo.queue, undo.priority), (done.handler, done.queue, done.priority));
    assert_eq!((undo.tags, undo.input.get()), (done.tags, "false"));
    let kinds = bed.kinds(undo.id).await;
    assert!(kinds.contains(&"saga.compensated".to_owned()), "{kinds:?}");
    assert_eq!(bed.client.task(done.id).await.expect("there").state, State::Completed, "and stays so");
    let again = refusal(bed.client.undo(done.id, None).await);
    assert!(again.contains(&format!("undone by task {}", undo.id)), "{again}");
    worker.stop().await;
}

async fn what_a_failed_undo_left_is_undone_by_request_and_nothing_else(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    world.stick(&["b"]);
    let failed = ended(&bed, true).await;
    assert_eq!(failed.error.expect("says why").code, "compensation_failed");
    assert_eq!(world.lines(), ["a", "b", "c", "undo c", "undo a"]);
    world.stick(&[]);
    let undo = undo(&bed, failed.id).await;
    assert_eq!(undo.result.expect("a result").get(), r#"{"undone":["b"]}"#);
    assert_eq!(world.lines()[5..], ["undo b"]);
    worker.stop().await;
}

async fn an_undo_that_fails_can_be_asked_for_again_and_undoes_the_rest_under_the_same_keys(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    let done = ended(&bed, false).await;
    world.stick(&["b"]);
    let first = undo(&bed, done.id).await;
    let error = first.error.expect("says why");
    assert_eq!((first.state, error.code.as_str()), (State::Failed, "compensation_failed"));
    assert_eq!(error.details["undone"], json!(["c", "a"]));
    assert_eq!(error.details["not_undone"][0]["step"], "b");
    let cause = error.cause.expect("why it was undone at all");
    assert!(cause.message.contains("ann") && cause.message.contains("not wanted"), "{}", cause.message);
    assert!(bed.kinds(first.id).await.contains(&"saga.compensation_failed".to_owned()));
    world.stick(&[]);
    let second = undo(&bed, done.id).await;
    assert_eq!(second.result.expect("a result").get(), r#"{"undone":["b"]}"#);
    assert_eq!(world.lines(), ["a", "b", "c", "undo c", "undo a", "undo b"]);
    let key = |name: &str| format!("{}/undo {name}", done.id);
    assert_eq!(world.keys(), [key("c"), key("b"), key("b"), key("a"), key("b")], "b was tried twice at first");
    assert_eq!(undos_of(&bed, done.id).await.len(), 2);
    worker.stop().await;
}

async fn what_cannot_be_undone_is_refused_with_the_reason(bed: Bed) {
    let world = World::default();
    bed.client.announce(&["deploy"]).await.expect("known");
    let early = bed.client.submit(NewTask::new("deploy", &false).queue("q")).await.expect("accepted").id;
    let pending = refusal(bed.client.undo(early, None).await);
    assert!(pending.contains("is pending"), "{pending}");
    let worker = start(&bed.client, &world).await;
    bed.ended(early).await;
    let failed = ended(&bed, true).await;
    let nothing = refusal(bed.client.undo(failed.id, None).await);
    assert!(nothing.contains("nothing is left to undo"), "{nothing}");
    let undone = undo(&bed, early).await;
    let itself = refusal(bed.client.undo(undone.id, None).await);
    assert!(itself.contains(&format!("the undo of task {early}")), "{itself}");
    bed.client.delete(undone.id).await.expect("deleted");
    let gone = refusal(bed.client.undo(early, None).await);
    assert!(gone.contains("is gone"), "{gone}");
    let theirs = bed.client.for_tenant("acme").undo(early, None).await;
    assert!(matches!(theirs, Err(Error::NotFound(_))), "{theirs:?}");
    worker.stop().await;
}

async fn two_undos_at_once_make_one(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    let done = ended(&bed, false).await;
    let other = bed.another_client_or_same().await;
    let asked: Vec<_> = (0..8)
        .map(|n| {
            let client = if n % 2 == 0 { bed.client.clone() } else { other.clone() };
            tokio::spawn(async move { client.undo(done.id, None).await })
        })
        .collect();
    let mut accepted = Vec::new();
    for asked in asked {
        match asked.await.expect("no panic") {
            Ok(undo) => accepted.push(undo.id),
            Err(error) => {
                let why = refusal(Err(error));
                assert!(why.contains("is undoing it") || why.contains("was undone by"), "{why}");
            }
        }
    }
    assert_eq!(accepted.len(), 1);
    bed.ended(accepted[0]).await;
    assert_eq!(undos_of(&bed, done.id).await.len(), 1);
    assert_eq!(world.lines()[3..], ["undo c", "undo b", "undo a"]);
    worker.stop().await;
}

async fn an_undo_goes_on_where_a_lost_worker_left_it(bed: Bed) {
    let hangs = Arc::new(Notify::new());
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    let done = ended(&bed, false).await;
    worker.stop().await;
    let other = bed.another_client_or_same().await;
    let lost = start(&other, &World { hangs: Some(Arc::clone(&hangs)), ..world.clone() }).await;
    let undo = bed.client.undo(done.id, None).await.expect("accepted").id;
    hangs.notified().await;
    lost.abort();
    let worker = start(&bed.client, &world).await;
    bed.client.clock().advance(Duration::from_secs(60));
    let undo = bed.ended(undo).await;
    assert_eq!(undo.result.expect("a result").get(), r#"{"undone":["c","b","a"]}"#);
    assert_eq!(world.lines()[3..], ["undo c", "undo b", "undo a"], "what was undone is not undone again");
    let key = |name: &str| format!("{}/undo {name}", done.id);
    assert_eq!(world.keys(), [key("c"), key("b"), key("b"), key("a")]);
    worker.stop().await;
}

async fn a_task_that_was_undone_is_neither_resumed_nor_forked_and_neither_is_its_undo(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    world.stick(&["b"]);
    let failed = ended(&bed, true).await;
    let first = undo(&bed, failed.id).await;
    assert_eq!(first.state, State::Failed);
    let undone = bed.client.resume(failed.id).await.expect_err("refused").to_string();
    assert!(undone.contains(&format!("task {} undoes what it did", first.id)), "{undone}");
    let itself = bed.client.resume(first.id).await.expect_err("refused").to_string();
    assert!(itself.contains(&format!("it undoes task {}", failed.id)), "{itself}");
    let fork = refusal(bed.client.fork(failed.id, "b", None).await);
    assert!(fork.contains(&format!("task {} undoes what it did", first.id)), "{fork}");
    let of_undo = refusal(bed.client.fork(first.id, "b", None).await);
    assert!(of_undo.contains(&format!("undoes what task {} did", failed.id)), "{of_undo}");
    worker.stop().await;
}

async fn a_fork_does_not_go_on_when_what_it_took_over_was_undone(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    let done = ended(&bed, false).await;
    let fails = serde_json::value::to_raw_value(&true).expect("JSON");
    let fork = bed.client.fork(done.id, "c", Some(fails)).await.expect("accepted").id;
    assert_eq!(bed.ended(fork).await.state, State::Failed);
    let again = bed.client.fork(fork, "look", None).await.expect("accepted").id;
    assert_eq!(bed.ended(again).await.state, State::Failed);
    let undo = undo(&bed, done.id).await.id;
    let before = world.lines();
    let told = format!("task {undo} undoes what it took over as a fork");
    for fork in [fork, again] {
        let resumed = bed.client.resume(fork).await.expect_err("refused").to_string();
        assert!(resumed.contains(&told), "{resumed}");
        assert!(refusal(bed.client.fork(fork, "look", None).await).contains(&told));
        let why = bed.client.why(fork).await.expect("explained").sentence;
        assert!(why.contains("undoes what it took over as a fork, so no resume"), "{why}");
    }
    assert_eq!(world.lines(), before, "nothing went on");
    worker.stop().await;
}

async fn an_effect_that_has_no_undo_is_named_when_the_rest_is_undone(bed: Bed) {
    let world = World::default();
    let pays = move |run: Run, fails: bool| {
        let world = world.clone();
        async move {
            world.step(&run, "a").await?;
            run.step("pay", || async { Ok::<_, TaskError>(()) }).effect(Effect::Irreversible).await?;
            run.step("charge", || async { Err::<(), _>(TaskError::in_doubt("cut", "no answer")) })
                .effect(Effect::Irreversible)
                .await?;
            run.step("look", || async { Ok::<_, TaskError>(()) }).await?;
            if fails { Err(TaskError::fatal("told", "it was told to fail")) } else { Ok(()) }
        }
    };
    let worker = Worker::new(&bed.client).queues(["q"]).handler("pays", pays).start().await.expect("starts");
    let ended = async |fails: bool| {
        let id = bed.client.submit(NewTask::new("pays", &fails).queue("q")).await.expect("accepted").id;
        bed.waiting_for(id, "in_doubt").await;
        let happened = Decision::Done(RawValue::NULL.to_owned());
        bed.client.decide(id, "charge", happened, None).await.expect("decided");
        bed.ended(id).await
    };
    let undo = undo(&bed, ended(false).await.id).await;
    let result: Value = serde_json::from_str(undo.result.expect("a result").get()).expect("JSON");
    assert_eq!(result, json!({"undone": ["a"], "not_undoable": ["pay", "charge"]}));
    let error = ended(true).await.error.expect("says why");
    assert_eq!((error.code.as_ref(), &error.details["undone"]), ("told", &json!(["a"])));
    assert_eq!(error.details["not_undoable"], json!(["pay", "charge"]));
    worker.stop().await;
}

async fn what_was_asked_has_expired_once_undoing_begins(bed: Bed) {
    let hangs = Arc::new(Notify::new());
    let world = World { hangs: Some(Arc::clone(&hangs)), ..World::default() };
    let asks = move |run: Run, (): ()| {
        let world = world.clone();
        async move {
            world.step(&run, "b").await?;
            run.approve("Go on?", Risk::ExternalAction).await.map(drop)
        }
    };
    let worker = Worker::new(&bed.client).queues(["q"]).handler("asks", asks).start().await.expect("starts");
    let id = bed.client.submit(NewTask::new("asks", &()).queue("q")).await.expect("accepted").id;
    bed.waiting_for(id, "approval").await;
    let status = async || bed.client.asks(id).await.expect("read")[0].status;
    assert_eq!(status().await, AskStatus::Pending);
    bed.client.cancel(id, None).await.expect("cancelled");
    hangs.notified().await;
    assert_eq!(status().await, AskStatus::Expired);
    let late = bed.client.approve(id, None, None, None).await.expect_err("refused").to_string();
    assert!(late.contains("is being undone"), "{late}");
    let resumed = bed.client.resume(id).await.expect_err("refused").to_string();
    assert!(resumed.contains("is being undone; resume it when that has ended"), "{resumed}");
    worker.abort();
}

async fn a_fork_takes_over_nothing_that_was_undone_before_the_step_it_is_made_from(bed: Bed) {
    let world = World::default();
    let worker = start(&bed.client, &world).await;
    world.stick(&["b"]);
    let failed = ended(&bed, true).await;
    assert_eq!(world.lines(), ["a", "b", "c", "undo c", "undo a"]);
    let undo = refusal(bed.client.fork(failed.id, "undo c", None).await);
    assert!(undo.contains("no step 'undo c'"), "{undo}");
    // That of b failed, so it is still done. What came before is not, nor what was undone afterwards.
    let input = RawValue::from_string("false".to_owned()).expect("JSON");
    let fork = bed.client.fork(failed.id, "undo b", Some(input)).await.expect("accepted").id;
    assert_eq!(bed.ended(fork).await.state, State::Completed);
    assert_eq!(world.lines()[5..], ["a", "c"]);
    worker.stop().await;
}

async fn a_cancel_does_not_stop_an_undo_midway(bed: Bed) {
    let (world, begun, go) = (World::default(), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (done, tells, waits) = (world.clone(), Arc::clone(&begun), Arc::clone(&go));
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let (world, tells, waits) = (done.clone(), Arc::clone(&tells), Arc::clone(&waits));
            async move {
                world.step(&run, "a").await?;
                run.step("slow", || async { Ok::<_, TaskError>(()) })
                    .undo(move |()| {
                        let (world, tells, waits) = (world.clone(), Arc::clone(&tells), Arc::clone(&waits));
                        async move {
                            tells.notify_one();
                            waits.notified().await;
                            world.write("undo slow");
                            Ok::<_, TaskError>(())
                        }
                    })
                    .await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let undo = bed.client.undo(id, None).await.expect("asked for").id;
    begun.notified().await;
    bed.client.cancel(undo, Some("never mind")).await.expect("noted");
    go.notify_one();
    assert_eq!(bed.ended(undo).await.state, State::Completed);
    assert_eq!(world.lines(), ["a", "undo slow", "undo a"], "what was begun is not left half done");
    worker.stop().await;
}

async fn a_cancel_can_ask_to_undo(bed: Bed) {
    let world = World::default();
    let waits = world.clone();
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, (): ()| {
            let world = waits.clone();
            async move {
                world.step(&run, "a").await?;
                run.signal::<()>("go").await
            }
        })
        .start()
        .await
        .expect("starts");
    let id = bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.cancel_with_undo(id, Some("enough")).await.expect("cancelled");
    let task = bed.ended(id).await;
    assert_eq!(
        (task.state, task.error.expect("says why").details["undone"].clone()),
        (State::Cancelled, json!(["a"]))
    );
    assert_eq!(world.lines(), ["a", "undo a"]);
    worker.stop().await;
}

async fn a_cancel_that_asks_to_undo_is_refused_after_one_that_did_not(bed: Bed) {
    let world = World::default();
    let (told, mut heard) = mpsc::unbounded_channel();
    let go_on = Arc::new(Notify::new());
    let (waits, gate) = (world.clone(), Arc::clone(&go_on));
    let worker = Worker::new(&bed.client)
        .handler("h", move |run: Run, pays: bool| {
            let (world, told, gate) = (waits.clone(), told.clone(), Arc::clone(&gate));
            async move {
                run.undo_on(UndoOn { failed: false, cancelled: false });
                world.step(&run, "a").await?;
                if pays {
                    // Has a moment to be recorded after a cancel, for as long as it takes here.
                    let pay = || async {
                        let _ = told.send(());
                        gate.notified().await;
                        Ok::<_, TaskError>(())
                    };
                    run.step("pay", pay).effect(Effect::Irreversible).await?;
                }
                run.signal::<()>("go").await
            }
        })
        .start()
        .await
        .expect("starts");
    let refused = async |id| {
        let refused = bed.client.cancel_with_undo(id, None).await.expect_err("refused").to_string();
        assert!(refused.contains("without undo") && refused.contains("ask for its undo"), "{refused}");
    };
    let waits = bed.client.submit(NewTask::new("h", &false)).await.expect("accepted").id;
    bed.waiting_for(waits, "signal").await;
    bed.client.cancel(waits, None).await.expect("cancelled");
    refused(waits).await;
    let runs = bed.client.submit(NewTask::new("h", &true)).await.expect("accepted").id;
    heard.recv().await.expect("it pays");
    bed.client.cancel(runs, None).await.expect("told to stop");
    refused(runs).await;
    bed.client.cancel(runs, None).await.expect("the same once more is no trouble");
    go_on.notify_one();
    assert_eq!(bed.ended(runs).await.state, State::Cancelled);
    refused(runs).await;
    assert_eq!(world.lines(), ["a", "a"]);
    let undo = undo(&bed, waits).await;
    assert_eq!((undo.state, world.lines().len()), (State::Completed, 3));
    bed.client.cancel_with_undo(waits, None).await.expect("there is nothing left to refuse");
    worker.stop().await;
}

/// Does something, has a child do something, and something else. `waits`: then it waits to be cancelled.
async fn parent(run: Run, waits: bool, world: World) -> Result<(), TaskError> {
    world.step(&run, "before").await?;
    let child = run.spawn_with_undo(NewTask::new("deploy", &false).queue("q")).await?;
    run.join::<u32>(child).await?;
    world.step(&run, "after").await?;
    if waits {
        run.signal::<()>("never").await?;
    }
    Ok(())
}

/// A worker that runs one task at a time: who waits for another must not be in its way.
async fn start_family(client: &Client, world: &World) -> WorkerHandle {
    let (child, above) = (world.clone(), world.clone());
    Worker::new(client)
        .queues(["q"])
        .slots(1)
        .handler("deploy", move |run: Run, fails: bool| deploy(run, fails, child.clone()))
        .handler("parent", move |run: Run, waits: bool| parent(run, waits, above.clone()))
        .start()
        .await
        .expect("starts")
}

const FAMILY_DONE: [&str; 5] = ["before", "a", "b", "c", "after"];
const FAMILY_UNDONE: [&str; 5] = ["undo after", "undo c", "undo b", "undo a", "undo before"];

async fn what_a_child_did_is_undone_in_its_place(bed: Bed) {
    let world = World::default();
    let worker = start_family(&bed.client, &world).await;
    let id = bed.client.submit(NewTask::new("parent", &false).queue("q")).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let undone = undo(&bed, id).await;
    assert_eq!(undone.state, State::Completed, "{:?}", undone.error);
    let result: serde_json::Value = serde_json::from_str(undone.result.expect("a result").get()).expect("JSON");
    assert_eq!(result, json!({"undone": ["after", "spawn deploy", "before"]}));
    assert_eq!(world.lines(), [FAMILY_DONE, FAMILY_UNDONE].concat());
    worker.stop().await;
}

async fn a_child_that_cannot_be_undone_is_told_and_can_be_tried_again(bed: Bed) {
    let world = World::default();
    world.stick(&["b"]);
    let worker = start_family(&bed.client, &world).await;
    let id = bed.client.submit(NewTask::new("parent", &false).queue("q")).await.expect("accepted").id;
    bed.ended(id).await;
    let failed = undo(&bed, id).await;
    let error = failed.error.expect("says why");
    assert_eq!((failed.state, error.code.as_str()), (State::Failed, "compensation_failed"));
    let not_undone = &error.details["not_undone"][0];
    assert_eq!(not_undone["step"], "spawn deploy");
    assert_eq!(not_undone["error"]["code"], "child_not_undone");
    assert_eq!(world.lines()[5..], ["undo after", "undo c", "undo a", "undo before"]);
    world.stick(&[]);
    let again = undo(&bed, id).await;
    assert_eq!(again.state, State::Completed, "{:?}", again.error);
    assert_eq!(world.lines()[9..], ["undo b"], "what is undone is not undone again");
    worker.stop().await;
}

async fn a_cancel_with_undo_undoes_what_a_child_did_that_has_ended(bed: Bed) {
    let world = World::default();
    let worker = start_family(&bed.client, &world).await;
    let id = bed.client.submit(NewTask::new("parent", &true).queue("q")).await.expect("accepted").id;
    bed.waiting_for(id, "signal").await;
    bed.client.cancel_with_undo(id, None).await.expect("cancelled");
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    assert_eq!(world.lines(), [FAMILY_DONE, FAMILY_UNDONE].concat());
    worker.stop().await;
}
