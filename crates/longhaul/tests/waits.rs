//! Durable waits: for a time, a signal, a person.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::Bed;
use longhaul::{AskStatus, Client, Error, NewTask, Risk, Run, State, TaskError, TaskId, Worker, WorkerHandle};

const DAY: Duration = Duration::from_secs(86_400);

/// Starts a worker with a handler named `h`.
async fn start<F, Fut, T>(bed: &Bed, handler: F) -> WorkerHandle
where
    F: Fn(Run) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<T, TaskError>> + Send + 'static,
    T: serde::Serialize + Send + 'static,
{
    Worker::new(&bed.client).handler("h", move |run: Run, (): ()| handler(run)).start().await.expect("starts")
}

async fn submit(bed: &Bed) -> TaskId {
    bed.client.submit(NewTask::new("h", &())).await.expect("accepted").id
}

fn refusal(answer: Result<longhaul::store::Controlled, Error>) -> String {
    answer.expect_err("refused").to_string()
}

async fn only_ask(client: &Client, id: TaskId) -> longhaul::Ask {
    let mut asks = client.asks(id).await.expect("read");
    assert_eq!(asks.len(), 1);
    asks.remove(0)
}

on_every_store!(
    a_long_sleep_suspends_the_task_and_ends_by_the_stores_clock,
    a_short_wait_does_not_suspend,
    a_signal_wakes_the_task_that_waits_for_it_and_no_other,
    signals_that_come_early_are_kept_in_their_order,
    a_signal_reaches_a_run_that_is_still_in_memory_without_a_suspend,
    a_wait_that_lost_a_select_leaves_its_signal_to_the_next_one,
    a_question_is_put_once_and_its_answer_is_given_to_the_handler,
    a_signal_sent_again_under_its_id_is_given_once,
    an_approval_is_for_these_arguments_once_and_in_time,
    an_approval_that_nobody_was_there_to_use_in_time_is_none,
    an_approval_is_not_used_for_what_a_changed_handler_does_instead,
    what_was_approved_and_done_is_not_asked_for_again_when_the_handler_is_changed,
    what_the_handler_went_on_without_is_no_longer_asked,
    waits_of_one_kind_at_the_same_time_are_told_apart_by_keys,
    a_denial_fails_the_task_and_names_who_and_why,
    an_approval_is_asked_for_again_after_a_resume,
    waits_beside_steps_in_a_join_all_end,
    a_cancel_and_a_deadline_end_a_task_that_waits,
);

async fn a_long_sleep_suspends_the_task_and_ends_by_the_stores_clock(bed: Bed) {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let worker = start(&bed, move |run| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            run.sleep(DAY).await?;
            Ok("woke")
        }
    })
    .await;
    let id = submit(&bed).await;
    let task = bed.reaches(id, State::Waiting).await;
    let waiting = task.waiting_for.expect("says what for");
    assert_eq!(waiting.kind, "timer");
    assert!(waiting.until.is_some());
    bed.client.clock().advance(DAY);
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "\"woke\""));
    assert_eq!(runs.load(Ordering::SeqCst), 2, "run, suspended, run again");
    assert_eq!(task.attempts, 0, "waiting costs no attempt");
    worker.stop().await;
}

async fn a_short_wait_does_not_suspend(bed: Bed) {
    let worker = start(&bed, |run| async move {
        run.sleep(Duration::from_millis(10)).await?;
        Ok(())
    })
    .await;
    let id = submit(&bed).await;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert!(!bed.kinds(id).await.contains(&"task.waiting".to_owned()));
    worker.stop().await;
}

async fn a_signal_wakes_the_task_that_waits_for_it_and_no_other(bed: Bed) {
    let worker = start(&bed, |run| async move { run.signal::<u32>("go").await }).await;
    let (woken, other) = (submit(&bed).await, submit(&bed).await);
    bed.reaches(woken, State::Waiting).await;
    bed.reaches(other, State::Waiting).await;
    bed.client.signal(woken, "go", &7).await.expect("sent");
    assert_eq!(bed.ended(woken).await.result.expect("a result").get(), "7");
    assert_eq!(bed.client.task(other).await.expect("there").state, State::Waiting);
    assert!(refusal(bed.client.signal(woken, "go", &8).await).contains("completed already"));
    worker.stop().await;
}

async fn signals_that_come_early_are_kept_in_their_order(bed: Bed) {
    bed.client.announce(&["h"]).await.expect("known");
    let id = submit(&bed).await;
    for number in 1..=3 {
        bed.client.signal(id, "go", &number).await.expect("sent");
    }
    let worker = start(&bed, |run| async move {
        let mut all = Vec::new();
        for _ in 0..3 {
            all.push(run.signal::<u32>("go").await?);
        }
        Ok(all)
    })
    .await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "[1,2,3]");
    worker.stop().await;
}

async fn a_signal_reaches_a_run_that_is_still_in_memory_without_a_suspend(bed: Bed) {
    let worker = start(&bed, |run| async move {
        // The step keeps the run from being suspended.
        let busy = run.step("busy", || async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            Ok::<_, TaskError>(())
        });
        tokio::select! {
            signal = run.signal::<u32>("go") => signal,
            _ = busy => Err(TaskError::fatal("too_late", "the signal did not come through")),
        }
    })
    .await;
    let id = submit(&bed).await;
    bed.event(id, "step.started").await;
    bed.client.signal(id, "go", &1).await.expect("sent");
    assert_eq!(bed.ended(id).await.state, State::Completed);
    assert!(!bed.kinds(id).await.contains(&"task.waiting".to_owned()));
    worker.stop().await;
}

async fn a_wait_that_lost_a_select_leaves_its_signal_to_the_next_one(bed: Bed) {
    let worker = start(&bed, |run| async move {
        tokio::select! {
            _ = run.signal::<u32>("go") => return Err(TaskError::fatal("early", "there was no signal yet")),
            slept = run.sleep(DAY) => slept?,
        }
        run.publish("night.over", &()).await?;
        run.signal::<u32>("go").await
    })
    .await;
    let id = submit(&bed).await;
    bed.reaches(id, State::Waiting).await;
    bed.client.clock().advance(DAY);
    bed.event(id, "night.over").await;
    bed.client.signal(id, "go", &5).await.expect("sent");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "5");
    worker.stop().await;
}

async fn a_question_is_put_once_and_its_answer_is_given_to_the_handler(bed: Bed) {
    let worker = start(&bed, |run| async move {
        let (region, nudged) = tokio::join!(run.ask("Which region?"), run.signal::<()>("nudge"));
        nudged?;
        region
    })
    .await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "question").await;
    let first = only_ask(&bed.client, id).await;
    // The task runs again meanwhile, and does not ask again.
    bed.client.signal(id, "nudge", &()).await.expect("sent");
    bed.waiting_for(id, "question").await;
    let ask = only_ask(&bed.client, id).await;
    assert_eq!(ask.id, first.id);
    assert_eq!((ask.text.as_str(), ask.status), ("Which region?", AskStatus::Pending));
    assert_eq!(bed.client.open_asks().await.expect("read").len(), 1);
    let ann = bed.client.acting_as("ann");
    ann.answer(id, Some(&ask.id), "eu").await.expect("taken");
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("a result").get(), "\"eu\"");
    assert!(bed.client.open_asks().await.expect("read").is_empty());
    let twice = refusal(ann.answer(id, Some(&ask.id), "us").await);
    assert!(twice.contains("answered by ann already"), "{twice}");
    worker.stop().await;
}

async fn a_signal_sent_again_under_its_id_is_given_once(bed: Bed) {
    let worker = start(&bed, |run| async move {
        let mut given = Vec::new();
        for _ in 0..3 {
            given.push(run.signal::<u32>("go").await?);
        }
        Ok(given)
    })
    .await;
    let id = submit(&bed).await;
    let (one, two) = (TaskId::new().0, TaskId::new().0);
    // What one says does not make it another one.
    let says_two = format!("\"id\":\"{two}\"");
    assert!(bed.client.signal_once(id, "other", &says_two, TaskId::new().0).await.expect("sent").changed);
    assert!(bed.client.signal_once(id, "go", &1, one).await.expect("sent").changed);
    assert!(!bed.client.signal_once(id, "go", &1, one).await.expect("sent again").changed);
    // In another run, which has the first ones from the log.
    bed.waiting_for(id, "signal").await;
    assert!(!bed.client.signal_once(id, "go", &1, one).await.expect("and again").changed);
    assert!(bed.client.signal_once(id, "go", &2, two).await.expect("another").changed);
    assert!(bed.client.signal(id, "go", &1).await.expect("one of no id").changed);
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "[1,2,1]");
    // It is told once too, and who sends it late learns that it was there.
    assert!(!bed.client.signal_once(id, "go", &1, one).await.expect("it was delivered").changed);
    assert!(bed.client.signal_once(id, "go", &1, TaskId::new().0).await.is_err(), "a new one is too late");
    let mut events = bed.client.events(id, 0).await.expect("readable");
    let mut received = 0;
    while let Some(event) = events.next().await.expect("readable") {
        received += u32::from(event.kind == "signal.received");
    }
    assert_eq!(received, 4);
    worker.stop().await;
}

async fn an_approval_is_for_these_arguments_once_and_in_time(bed: Bed) {
    let worker = start(&bed, |run| async move {
        for amount in [10, 20] {
            let approval = run.approve("Pay?", Risk::ExternalAction).arguments(&amount).expires(DAY).await?;
            run.publish("money.paid", &(amount, approval.by)).await?;
        }
        Ok(())
    })
    .await;
    let ann = bed.client.acting_as("ann");
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    let first = only_ask(&bed.client, id).await;
    assert_eq!(first.subject["arguments"], 10);
    let other = refusal(ann.approve(id, Some(&first.id), None, Some("0badc0de")).await);
    assert!(other.contains("asked for something else"), "{other}");
    ann.approve(id, Some(&first.id), Some("fine"), Some(&first.digest)).await.expect("approved");
    let twice = refusal(ann.approve(id, Some(&first.id), None, None).await);
    assert!(twice.contains("already"), "{twice}");

    // The second payment wants an approval of its own; the old message does not serve.
    bed.event(id, "money.paid").await;
    bed.waiting_for(id, "approval").await;
    let replayed = refusal(ann.approve(id, Some(&first.id), None, Some(&first.digest)).await);
    assert!(replayed.contains("approved by ann and used already"), "{replayed}");
    let second = bed.client.asks(id).await.expect("read").pop().expect("the second");
    assert_ne!(second.digest, first.digest);
    bed.client.clock().advance(DAY);
    let late = refusal(ann.approve(id, Some(&second.id), None, None).await);
    assert!(late.contains("expired"), "{late}");
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "approval_expired"));
    let statuses: Vec<_> = bed.client.asks(id).await.expect("read").iter().map(|ask| ask.status).collect();
    assert_eq!(statuses, [AskStatus::Used, AskStatus::Expired]);
    let paid = bed.kinds(id).await.iter().filter(|kind| *kind == "money.paid").count();
    assert_eq!(paid, 1);
    worker.stop().await;
}

/// Pays when it is approved within a day.
async fn pays(run: Run) -> Result<String, TaskError> {
    let approval = run.approve("Pay?", Risk::ExternalAction).expires(DAY).await?;
    run.publish("money.paid", &approval.by).await?;
    Ok(approval.by)
}

async fn an_approval_that_nobody_was_there_to_use_in_time_is_none(bed: Bed) {
    let worker = start(&bed, pays).await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    worker.stop().await;
    bed.client.acting_as("ann").approve(id, None, None, None).await.expect("in time");
    assert_eq!(only_ask(&bed.client, id).await.status, AskStatus::Approved);
    bed.client.clock().advance(DAY);
    let worker = start(&bed, pays).await;
    let task = bed.ended(id).await;
    let error = task.error.expect("says why");
    assert_eq!((task.state, error.code.as_str()), (State::Failed, "approval_expired"));
    assert!(error.message.contains("ann approved it"), "{}", error.message);
    assert_eq!(only_ask(&bed.client, id).await.status, AskStatus::Expired);
    assert!(!bed.kinds(id).await.contains(&"money.paid".to_owned()));
    worker.stop().await;
}

/// Pays this amount in a step, when that is approved; then waits for a signal. `hangs` while it pays.
async fn pays_exactly(run: Run, amount: u32, hangs: bool) -> Result<u32, TaskError> {
    run.approve("Pay?", Risk::ExternalAction).step("pay").arguments(&amount).await?;
    let pay = || async {
        if hangs {
            std::future::pending::<()>().await;
        }
        Ok::<_, TaskError>(amount)
    };
    let paid = run.step("pay", pay).await?;
    run.signal::<()>("end").await?;
    Ok(paid)
}

/// Stops the worker as a crash would, and starts another one.
async fn changed(bed: &Bed, worker: WorkerHandle, amount: u32, hangs: bool) -> WorkerHandle {
    worker.abort();
    bed.client.clock().advance(Duration::from_secs(60));
    start(bed, move |run| pays_exactly(run, amount, hangs)).await
}

async fn an_approval_is_not_used_for_what_a_changed_handler_does_instead(bed: Bed) {
    let ann = bed.client.acting_as("ann");
    let worker = start(&bed, |run| pays_exactly(run, 10, false)).await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    worker.stop().await;
    ann.approve(id, None, None, None).await.expect("10 may be paid");

    // Approved, and not used yet.
    let worker = start(&bed, |run| pays_exactly(run, 20, true)).await;
    bed.after(id, 2, |event| event.kind == "approval.requested").await;
    bed.waiting_for(id, "approval").await;
    let asks = bed.client.asks(id).await.expect("read");
    assert_eq!(asks[1].subject["arguments"], 20);
    ann.approve(id, Some(&asks[1].id), None, None).await.expect("20 may be paid");

    // Used, and what it was for was begun and is not on record.
    bed.event(id, "step.started").await;
    let worker = changed(&bed, worker, 30, false).await;
    bed.after(id, 3, |event| event.kind == "approval.requested").await;
    bed.waiting_for(id, "approval").await;
    let asks = bed.client.asks(id).await.expect("read");
    assert_eq!(asks[2].subject["arguments"], 30);
    ann.approve(id, None, None, None).await.expect("30 may be paid; nothing else is asked for");
    bed.client.signal(id, "end", &()).await.expect("sent");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "30");
    worker.stop().await;
}

async fn what_was_approved_and_done_is_not_asked_for_again_when_the_handler_is_changed(bed: Bed) {
    let worker = start(&bed, |run| pays_exactly(run, 10, false)).await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    bed.client.approve(id, None, None, None).await.expect("10 may be paid");
    bed.waiting_for(id, "signal").await;
    let worker = changed(&bed, worker, 20, false).await;
    bed.client.signal(id, "end", &()).await.expect("sent");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "10");
    assert_eq!(only_ask(&bed.client, id).await.status, AskStatus::Used);
    worker.stop().await;
}

async fn what_the_handler_went_on_without_is_no_longer_asked(bed: Bed) {
    let worker = start(&bed, |run| async move {
        tokio::select! {
            asked = run.ask("Which one?") => return asked,
            skipped = run.signal::<()>("skip") => skipped?,
        }
        let approved = run.approve("The first?", Risk::WriteLocal).key("first").into_future();
        tokio::select! {
            approved = approved => drop(approved?),
            skipped = run.signal::<()>("skip") => skipped?,
        }
        Ok(run.approve("The second?", Risk::WriteLocal).await?.by)
    })
    .await;
    let id = submit(&bed).await;
    for (kind, told) in [("question", "question.withdrawn"), ("approval", "approval.withdrawn")] {
        bed.waiting_for(id, kind).await;
        let open = bed.client.open_asks().await.expect("read");
        assert_eq!(open.len(), 1, "{open:?}");
        bed.client.signal(id, "skip", &()).await.expect("sent");
        let withdrawn = bed.event(id, told).await;
        assert_eq!(withdrawn.data["id"], open[0].id.as_str());
        let late = match kind {
            "question" => refusal(bed.client.answer(id, Some(&open[0].id), "this").await),
            _ => refusal(bed.client.approve(id, Some(&open[0].id), None, None).await),
        };
        assert!(late.contains("expired already"), "{late}");
    }
    bed.waiting_for(id, "approval").await;
    bed.client.acting_as("ann").approve(id, None, None, None).await.expect("only one is open");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "\"ann\"");
    let statuses: Vec<_> = bed.client.asks(id).await.expect("read").iter().map(|ask| ask.status).collect();
    assert_eq!(statuses, [AskStatus::Expired, AskStatus::Expired, AskStatus::Used]);
    worker.stop().await;
}

async fn waits_of_one_kind_at_the_same_time_are_told_apart_by_keys(bed: Bed) {
    let worker = start(&bed, |run| async move {
        let ask = |what: &'static str| run.approve(format!("{what}?"), Risk::WriteLocal).key(what);
        let (one, two, slept, again) =
            tokio::join!(ask("one"), ask("two"), run.sleep(DAY).key("a"), run.sleep(DAY * 2).key("b"));
        slept?;
        again?;
        let same = tokio::join!(run.sleep(DAY), run.sleep(DAY));
        let ambiguous = same.1.expect_err("two of one name");
        Ok((one?.by, two?.by, ambiguous.code))
    })
    .await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    for ask in bed.client.asks(id).await.expect("read") {
        let by = if ask.text == "one?" { "ann" } else { "bob" };
        bed.client.acting_as(by).approve(id, Some(&ask.id), None, None).await.expect("approved");
    }
    bed.waiting_for(id, "timer").await;
    bed.client.clock().advance(DAY * 2);
    // The sleep that has the name to itself goes on.
    bed.event(id, "step.started").await;
    while !bed.client.task(id).await.expect("there").state.is_final() {
        bed.client.clock().advance(DAY);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let result = bed.ended(id).await.result.expect("a result");
    assert_eq!(result.get(), r#"["ann","bob","ambiguous_step"]"#);
    worker.stop().await;
}

async fn a_denial_fails_the_task_and_names_who_and_why(bed: Bed) {
    let worker =
        start(&bed, |run| async move { run.approve("Delete all?", Risk::WriteLocal).await.map(drop) }).await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    bed.client.acting_as("bob").deny(id, None, Some("no backup")).await.expect("denied");
    let error = bed.ended(id).await.error.expect("says why");
    assert_eq!(error.code, "denied");
    assert!(error.message.contains("bob") && error.message.contains("no backup"), "{}", error.message);
    worker.stop().await;
}

async fn an_approval_is_asked_for_again_after_a_resume(bed: Bed) {
    let worker = start(&bed, |run| async move {
        let approval = run.approve("Pay?", Risk::ExternalAction).await?;
        run.step("pay", || async { Err::<(), _>(TaskError::fatal("broke", "no money")) }).await?;
        Ok(approval.by)
    })
    .await;
    let id = submit(&bed).await;
    bed.waiting_for(id, "approval").await;
    bed.client.approve(id, None, None, None).await.expect("approved");
    assert_eq!(bed.ended(id).await.state, State::Failed);
    bed.client.resume(id).await.expect("opened again");
    bed.waiting_for(id, "approval").await;
    let statuses: Vec<_> = bed.client.asks(id).await.expect("read").iter().map(|ask| ask.status).collect();
    assert_eq!(statuses, [AskStatus::Used, AskStatus::Pending]);
    bed.client.deny(id, None, None).await.expect("denied");
    assert_eq!(bed.ended(id).await.error.expect("says why").code, "denied");
    worker.stop().await;
}

async fn waits_beside_steps_in_a_join_all_end(bed: Bed) {
    let begun = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&begun);
    let worker = start(&bed, move |run| {
        let counted = Arc::clone(&counted);
        async move {
            let step = |name: &'static str, takes: u64| {
                let counted = Arc::clone(&counted);
                run.step(name, move || {
                    counted.fetch_add(1, Ordering::SeqCst);
                    async move {
                        tokio::time::sleep(Duration::from_millis(takes)).await;
                        Ok::<_, TaskError>(name.len())
                    }
                })
            };
            // The last step takes longer than a run that only waits stays in memory.
            let (a, b, c, go) =
                tokio::join!(step("a", 0), step("bb", 0), step("ccc", 400), run.signal::<usize>("go"));
            Ok(a? + b? + c? + go?)
        }
    })
    .await;
    let id = submit(&bed).await;
    bed.reaches(id, State::Waiting).await;
    bed.client.signal(id, "go", &100).await.expect("sent");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "106");
    assert_eq!(begun.load(Ordering::SeqCst), 3, "a run with a step under way is not suspended");
    worker.stop().await;
}

async fn a_cancel_and_a_deadline_end_a_task_that_waits(bed: Bed) {
    let worker = start(&bed, |run| async move { run.signal::<()>("never").await }).await;
    let cancelled = submit(&bed).await;
    bed.reaches(cancelled, State::Waiting).await;
    bed.client.cancel(cancelled, None).await.expect("cancelled");
    assert_eq!(bed.ended(cancelled).await.state, State::Cancelled);

    let late = NewTask::new("h", &()).timeout(DAY);
    let late = bed.client.submit(late).await.expect("accepted").id;
    bed.reaches(late, State::Waiting).await;
    bed.client.clock().advance(DAY);
    let task = bed.ended(late).await;
    assert_eq!((task.state, task.error.expect("says why").code.as_str()), (State::Failed, "deadline_exceeded"));
    worker.stop().await;
}
