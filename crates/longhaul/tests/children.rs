//! Children: tasks that a task makes, waits for, and takes down with it.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Bed;
use longhaul::{Filter, NewTask, Run, State, Task, TaskError, TaskId, Worker, WorkerHandle};

on_every_store!(
    a_parent_joins_its_children_and_gets_their_results,
    a_childs_failure_is_the_parents_error_with_its_cause,
    a_parent_of_a_thousand_joins_them_all,
    no_more_children_than_allowed_run_at_once,
    cancelling_the_parent_cancels_everything_below_it,
    cancelling_the_parent_of_a_thousand_cancels_them_all,
    a_childs_deadline_is_no_later_than_its_parents,
    a_handler_nobody_has_is_told_at_once,
    a_child_that_lost_its_worker_is_resumed_and_joined,
    a_parent_that_is_run_again_finds_the_children_it_made,
    a_step_that_made_only_some_of_its_children_finds_them_again,
    a_child_belongs_to_its_parents_tenant,
    how_a_resumed_child_ends_replaces_how_it_ended_before,
    a_child_inherits_its_parents_trace_unless_it_has_its_own,
    a_resumed_parent_hears_that_a_child_is_gone,
);

/// A worker with `double` (a child) and `parent` (joins `double` of 0..n, at most `at_once` at a time).
async fn start(bed: &Bed) -> WorkerHandle {
    Worker::new(&bed.client)
        .slots(64)
        .handler("double", |_run: Run, number: u64| async move { Ok::<_, TaskError>(number * 2) })
        .handler(
            "bad",
            |_run: Run, (): ()| async move { Err::<(), _>(TaskError::fatal("broken", "it is broken")) },
        )
        .handler("parent", |run: Run, (count, at_once): (u64, usize)| async move {
            let tasks = (0..count).map(|number| NewTask::new("double", &number)).collect();
            let mut sum = 0;
            for outcome in run.join_all::<u64>(tasks, at_once).await? {
                sum += outcome?;
            }
            Ok::<_, TaskError>(sum)
        })
        .start()
        .await
        .expect("starts")
}

async fn submit(bed: &Bed, task: NewTask) -> TaskId {
    bed.client.submit(task).await.expect("accepted").id
}

async fn children(bed: &Bed, parent: TaskId) -> Vec<Task> {
    let (mut children, mut after) = (Vec::new(), None);
    loop {
        let page = bed.client.list(&Filter { limit: 1_000, after, ..Filter::default() }).await.expect("listed");
        let Some(last) = page.last() else { return children };
        after = Some(last.id);
        children.extend(page.into_iter().filter(|task| task.parent_id == Some(parent)));
    }
}

async fn a_parent_joins_its_children_and_gets_their_results(bed: Bed) {
    let worker = start(&bed).await;
    let id = submit(&bed, NewTask::new("parent", &(3, 10))).await;
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "6"));
    let children = children(&bed, id).await;
    assert_eq!(children.len(), 3);
    assert!(children.iter().all(|child| child.state == State::Completed));
    worker.stop().await;
}

async fn a_childs_failure_is_the_parents_error_with_its_cause(bed: Bed) {
    let worker = start(&bed).await;
    let second = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            let child = run.spawn(NewTask::new("bad", &())).await?;
            run.join::<()>(child).await
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("h", &())).await;
    let error = bed.ended(id).await.error.expect("says why");
    assert_eq!(error.code, "child_failed");
    assert_eq!(error.cause.expect("the child's").code, "broken");
    second.stop().await;
    worker.stop().await;
}

async fn a_parent_of_a_thousand_joins_them_all(bed: Bed) {
    let worker = start(&bed).await;
    let id = submit(&bed, NewTask::new("parent", &(1_000, 1_000))).await;
    let task = bed.ended(id).await;
    assert_eq!(task.result.expect("a result").get(), "999000");
    worker.stop().await;
}

async fn no_more_children_than_allowed_run_at_once(bed: Bed) {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (counted, seen) = (Arc::clone(&running), Arc::clone(&most));
    let worker = Worker::new(&bed.client)
        .slots(16)
        .handler("child", move |_run: Run, (): ()| {
            let (counted, seen) = (Arc::clone(&counted), Arc::clone(&seen));
            async move {
                seen.fetch_max(counted.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                counted.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, TaskError>(())
            }
        })
        .handler("parent", |run: Run, (): ()| async move {
            let tasks = (0..12).map(|_| NewTask::new("child", &())).collect();
            run.join_all::<()>(tasks, 3).await.map(|outcomes| outcomes.len())
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("parent", &())).await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "12");
    assert!(most.load(Ordering::SeqCst) <= 3, "{most:?} ran at once");
    worker.stop().await;
}

async fn cancelling_the_parent_cancels_everything_below_it(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .slots(8)
        .handler("leaf", |run: Run, (): ()| async move { run.signal::<()>("never").await })
        .handler("busy", |_run: Run, (): ()| std::future::pending::<Result<(), TaskError>>())
        .handler("middle", |run: Run, (): ()| async move {
            let children = vec![NewTask::new("leaf", &()), NewTask::new("leaf", &()).priority(1)];
            run.join_all::<()>(children, 10).await.map(drop)
        })
        .handler("top", |run: Run, (): ()| async move {
            let children = vec![NewTask::new("middle", &()), NewTask::new("busy", &())];
            run.join_all::<()>(children, 10).await.map(drop)
        })
        .start()
        .await
        .expect("starts");
    let top = submit(&bed, NewTask::new("top", &())).await;
    bed.waiting_for(top, "child").await;
    let second = children(&bed, top).await;
    let middle = second.iter().find(|task| task.handler == "middle").expect("a child").id;
    bed.waiting_for(middle, "child").await;
    bed.client.acting_as("ann").cancel(top, Some("enough")).await.expect("cancelled");
    assert_eq!(bed.ended(top).await.state, State::Cancelled);
    for task in second.into_iter().chain(children(&bed, middle).await) {
        let ended = bed.ended(task.id).await;
        assert_eq!(ended.state, State::Cancelled, "{}", ended.handler);
        assert!(ended.error.expect("says why").message.contains("ann"));
    }
    worker.stop().await;
}

async fn cancelling_the_parent_of_a_thousand_cancels_them_all(bed: Bed) {
    // Some wait, some run, and some are still in line.
    let worker = Worker::new(&bed.client)
        .slots(64)
        .handler("leaf", |run: Run, number: u64| async move {
            match number % 20 {
                0 => std::future::pending::<Result<(), TaskError>>().await,
                _ => run.signal::<()>("never").await,
            }
        })
        .handler("parent", |run: Run, (): ()| async move {
            let leaves = (0..1_000_u64).map(|number| NewTask::new("leaf", &number)).collect();
            run.join_all::<()>(leaves, 1_000).await.map(drop)
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("parent", &())).await;
    bed.waiting_for(id, "child").await;
    bed.client.cancel(id, Some("enough")).await.expect("cancelled");
    assert_eq!(bed.ended(id).await.state, State::Cancelled);
    let leaves = children(&bed, id).await;
    assert_eq!(leaves.len(), 1_000);
    for leaf in leaves {
        assert_eq!(bed.ended(leaf.id).await.state, State::Cancelled);
    }
    worker.stop().await;
}

async fn a_childs_deadline_is_no_later_than_its_parents(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("leaf", |run: Run, (): ()| async move { run.signal::<()>("never").await })
        .handler("top", |run: Run, (): ()| async move {
            let child = run.spawn(NewTask::new("leaf", &()).timeout(Duration::from_secs(7_200))).await?;
            run.join::<()>(child).await
        })
        .start()
        .await
        .expect("starts");
    let top = submit(&bed, NewTask::new("top", &()).timeout(Duration::from_secs(3_600))).await;
    let parent = bed.waiting_for(top, "child").await;
    let child = children(&bed, top).await.remove(0);
    assert_eq!(child.deadline, parent.deadline);
    bed.client.cancel(top, None).await.expect("cancelled");
    worker.stop().await;
}

async fn a_handler_nobody_has_is_told_at_once(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move { run.spawn(NewTask::new("nobody", &())).await.map(drop) })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("h", &())).await;
    let error = bed.ended(id).await.error.expect("says why");
    let cause = error.cause.expect("the step's");
    assert_eq!(cause.code, "bad_child");
    assert!(cause.message.contains("nobody"), "{}", cause.message);
    let tries = bed.kinds(id).await.iter().filter(|kind| *kind == "step.failed").count();
    assert_eq!(tries, 1, "there is no use in trying again");
    worker.stop().await;
}

async fn a_child_that_lost_its_worker_is_resumed_and_joined(bed: Bed) {
    let other = bed.another_client_or_same().await;
    let (begun, mut begins) = tokio::sync::mpsc::channel(8);
    let lost = Worker::new(&other)
        .handler("child", move |_run: Run, (): ()| {
            let begun = begun.clone();
            async move {
                begun.send(()).await?;
                std::future::pending::<Result<u32, TaskError>>().await
            }
        })
        .start()
        .await
        .expect("starts");
    let worker = Worker::new(&bed.client)
        .handler("parent", |run: Run, (): ()| async move {
            let child = run.spawn(NewTask::new("child", &())).await?;
            run.join::<u32>(child).await
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("parent", &())).await;
    begins.recv().await.expect("the child runs");
    drop(lost);
    let second = Worker::new(&bed.client)
        .handler("child", |_run: Run, (): ()| async move { Ok::<_, TaskError>(7) })
        .start()
        .await
        .expect("starts");
    bed.client.clock().advance(Duration::from_secs(60));
    let task = bed.ended(id).await;
    assert_eq!((task.state, task.result.expect("a result").get()), (State::Completed, "7"));
    let child = children(&bed, id).await.remove(0);
    assert_eq!(child.crashes, 1);
    second.stop().await;
    worker.stop().await;
}

async fn a_parent_that_is_run_again_finds_the_children_it_made(bed: Bed) {
    let worker = start(&bed).await;
    let second = Worker::new(&bed.client)
        .retry(common::at_once(5))
        .handler("h", |run: Run, (): ()| async move {
            let child = run.spawn(NewTask::new("double", &21)).await?;
            let result = run.join::<u64>(child).await?;
            if run.attempts() < 2 {
                return Err(TaskError::retryable("again", "once more"));
            }
            Ok(result)
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("h", &())).await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "42");
    assert_eq!(children(&bed, id).await.len(), 1);
    second.stop().await;
    worker.stop().await;
}

async fn a_step_that_made_only_some_of_its_children_finds_them_again(bed: Bed) {
    let worker = start(&bed).await;
    let second = Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            let tasks = vec![NewTask::new("double", &1), NewTask::new("late", &())];
            run.spawn_all(tasks).await.map(|children| children.len())
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("h", &())).await;
    assert_eq!(bed.ended(id).await.state, State::Failed, "nobody has the second handler yet");
    let made = children(&bed, id).await;
    assert_eq!(made.len(), 1);
    bed.client.announce(&["late"]).await.expect("known");
    bed.client.resume(id).await.expect("opened again");
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "2");
    let all = children(&bed, id).await;
    assert_eq!(all.len(), 2, "the first one was not made twice");
    assert!(all.iter().any(|child| child.id == made[0].id));
    second.stop().await;
    worker.stop().await;
}

async fn a_child_belongs_to_its_parents_tenant(bed: Bed) {
    let worker = start(&bed).await;
    let acme = bed.client.for_tenant("acme");
    let id = acme.submit(NewTask::new("parent", &(1, 1))).await.expect("accepted").id;
    acme.wait(id, common::PATIENCE).await.expect("it ends");
    let theirs = acme.list(&Filter::default()).await.expect("listed");
    assert_eq!(theirs.iter().filter(|task| task.parent_id == Some(id)).count(), 1);
    assert!(bed.client.list(&Filter::default()).await.expect("listed").is_empty());
    worker.stop().await;
}

/// A worker whose `child` fails unless its task was resumed.
async fn fails_once(bed: &Bed) -> WorkerHandle {
    let runs = Arc::new(AtomicUsize::new(0));
    Worker::new(&bed.client)
        .handler("child", move |_run: Run, (): ()| {
            let run = runs.fetch_add(1, Ordering::SeqCst);
            async move { if run == 0 { Err(TaskError::fatal("first", "not the first time")) } else { Ok(7) } }
        })
        .start()
        .await
        .expect("starts")
}

async fn joins_one(bed: &Bed) -> WorkerHandle {
    Worker::new(&bed.client)
        .handler("h", |run: Run, (): ()| async move {
            let child = run.spawn(NewTask::new("child", &())).await?;
            run.join::<u32>(child).await
        })
        .start()
        .await
        .expect("starts")
}

async fn how_a_resumed_child_ends_replaces_how_it_ended_before(bed: Bed) {
    let worker = fails_once(&bed).await;
    let parents = joins_one(&bed).await;
    let id = submit(&bed, NewTask::new("h", &())).await;
    assert_eq!(bed.ended(id).await.error.expect("says why").code, "child_failed");
    parents.stop().await;
    // First the child, then its parent, which had ended when the child did.
    let child = children(&bed, id).await.remove(0).id;
    bed.client.resume(child).await.expect("opened again");
    assert_eq!(bed.ended(child).await.state, State::Completed);
    bed.client.resume(id).await.expect("opened again");
    let parents = joins_one(&bed).await;
    assert_eq!(bed.ended(id).await.result.expect("a result").get(), "7");
    parents.stop().await;
    worker.stop().await;
}

async fn a_child_inherits_its_parents_trace_unless_it_has_its_own(bed: Bed) {
    const TRACE: &str = "00-aaaa-bbbb-01";
    const OWN: &str = "00-cccc-dddd-01";
    let worker = Worker::new(&bed.client)
        .handler(
            "leaf",
            |run: Run, (): ()| async move { Ok::<_, TaskError>(run.traceparent().map(str::to_owned)) },
        )
        .handler("root", |run: Run, (): ()| async move {
            let tasks = vec![NewTask::new("leaf", &()), NewTask::new("leaf", &()).traceparent(OWN)];
            let mut traces = Vec::new();
            for trace in run.join_all::<Option<String>>(tasks, 2).await? {
                traces.push(trace?);
            }
            Ok::<_, TaskError>(traces)
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("root", &()).traceparent(TRACE)).await;
    let traces = bed.ended(id).await.result.expect("a result");
    assert_eq!(traces.get(), format!(r#"["{TRACE}","{OWN}"]"#));
    worker.stop().await;
}

async fn a_resumed_parent_hears_that_a_child_is_gone(bed: Bed) {
    let worker = Worker::new(&bed.client)
        .handler("double", |_run: Run, number: u64| async move { Ok::<_, TaskError>(number * 2) })
        .handler(
            "bad",
            |_run: Run, (): ()| async move { Err::<(), _>(TaskError::fatal("broken", "it is broken")) },
        )
        .handler("parent", |run: Run, (): ()| async move {
            let good = run.spawn(NewTask::new("double", &4)).await?;
            let bad = run.spawn(NewTask::new("bad", &())).await?;
            let good: u64 = run.join(good).await?;
            run.publish("good.joined", &good).await?;
            run.join::<()>(bad).await
        })
        .start()
        .await
        .expect("starts");
    let id = submit(&bed, NewTask::new("parent", &())).await;
    assert_eq!(bed.ended(id).await.error.expect("says why").code, "child_failed");
    for child in children(&bed, id).await {
        bed.client.delete(child.id).await.expect("deleted");
    }
    bed.client.resume(id).await.expect("opened again");
    let error = bed.ended(id).await.error.expect("says why");
    assert_eq!(error.code, "child_gone", "{error}");
    assert_eq!(bed.kinds(id).await.iter().filter(|kind| *kind == "good.joined").count(), 1);
    worker.stop().await;
}
