//! Writing what a run has done: under the current fence only, once, and whole.

use std::collections::HashSet;

use serde_json::json;

use super::bed::{Bed, completed, done, failed, raw, retry, secs, suspended, write};
use crate::event::Progress;
use crate::record::Record;
use crate::state::StatePatch;
use crate::store::{Action, CommitRefused, Committed, NewCheckpoint, Outcome};
use crate::task::{NewTask, State};

fn fenced(held: u64) -> Result<Committed, CommitRefused> {
    Err(CommitRefused::Fenced { held })
}

async fn records_and_events_are_in_the_log_with_their_run_and_numbers(bed: Bed) {
    let lease = bed.running().await;
    let one = bed.commit(write(&lease, 1).step("a").event("progress")).await.expect("written");
    let two = bed.commit(write(&lease, 2).step("b")).await.expect("written");
    assert_eq!((one.first_seq, one.last_seq, two.first_seq, two.last_seq), (3, 4, 5, 5));
    let events = bed.events(lease.task).await;
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["task.submitted", "task.started", "step.completed", "progress", "step.completed"]);
    assert!(events[2..].iter().all(|event| event.run == lease.fence));
    assert_eq!(events[2].data, json!({"of": "step.completed"}));
    let steps: Vec<String> = bed
        .records(lease.task)
        .await
        .into_iter()
        .filter_map(|record| if let Record::Done { step, .. } = record { Some(step) } else { None })
        .collect();
    assert_eq!(steps, ["a", "b"]);
}

async fn a_result_is_recorded_byte_for_byte(bed: Bed) {
    let lease = bed.running().await;
    let text = r#"{"b": 1,   "a":1.50, "n":12345678901234567890}"#;
    let finish = Outcome::Completed { result: raw(text) };
    bed.commit(write(&lease, 1).record(done("s", text)).event("step.completed").outcome(finish))
        .await
        .expect("written");
    assert_eq!(bed.task(lease.task).await.result.expect("kept").get(), text);
    let records = bed.records(lease.task).await;
    assert!(matches!(&records[1], Record::Done { result, .. } if result.get() == text));
}

async fn a_commit_under_another_fence_is_refused_and_changes_nothing(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(write(&lease, 1).step("a")).await.expect("written");
    let before = bed.everything(lease.task).await;
    for fence in [0, lease.fence - 1, lease.fence + 1, i64::MAX as u64] {
        let mut ghost = lease.clone();
        ghost.fence = fence;
        let checkpoint =
            NewCheckpoint { version: 1, iteration: 1, data: "{}".into(), max_count: 3, max_age: secs(60) };
        let patch = StatePatch { set_goal: Some("mine".into()), ..StatePatch::default() };
        let all = write(&ghost, 2).step("b").outcome(completed()).with(|commit| {
            commit.patches.push(patch.into());
            commit.checkpoint = Some(checkpoint);
        });
        assert_eq!(bed.commit(all).await, fenced(fence));
        assert_eq!(bed.everything(lease.task).await, before);
    }
}

async fn a_commit_for_a_task_that_is_not_there_is_refused(bed: Bed) {
    let mut lease = bed.running().await;
    lease.task = crate::task::TaskId::new();
    assert_eq!(bed.commit(write(&lease, 1).step("a")).await, fenced(lease.fence));
}

async fn a_lost_lease_writes_nothing_even_when_the_same_worker_has_the_task_again(bed: Bed) {
    let old = bed.running().await;
    bed.lose(&old).await;
    assert_eq!(bed.commit(write(&old, 1).step("a")).await, fenced(old.fence), "already before it runs again");
    let new = bed.claim_one().await;
    assert!(new.fence > old.fence);
    let before = bed.everything(old.task).await;
    assert_eq!(bed.commit(write(&old, 1).step("a")).await, fenced(old.fence));
    assert_eq!(bed.commit(write(&old, 1).outcome(completed()).backward()).await, fenced(old.fence));
    assert_eq!(bed.everything(old.task).await, before);
    bed.commit(write(&new, 1).step("a").outcome(completed())).await.expect("the new one writes");
}

async fn an_expired_lease_that_nobody_took_back_still_writes(bed: Bed) {
    let lease = bed.running().await;
    bed.advance(3_600);
    bed.commit(write(&lease, 1).step("a")).await.expect("expiry alone refuses nothing");
    bed.end_with(&lease, 2, completed()).await;
}

async fn a_run_that_ended_writes_nothing_more(bed: Bed) {
    for outcome in [completed(), retry(0), suspended("signal", "go", None), Outcome::Released] {
        let lease = bed.running().await;
        let ended = outcome.state();
        bed.end(&lease, outcome).await;
        let before = bed.everything(lease.task).await;
        assert_eq!(bed.commit(write(&lease, 2).step("late")).await, fenced(lease.fence), "after {ended}");
        let end = write(&lease, 2).outcome(failed()).backward();
        assert_eq!(bed.commit(end).await, fenced(lease.fence), "nor does it end again after {ended}");
        assert_eq!(bed.everything(lease.task).await, before);
        if !ended.is_final() {
            bed.cancel(lease.task).await.expect("out of the way");
        }
    }
}

async fn a_repeated_commit_is_answered_the_same_and_written_once(bed: Bed) {
    let lease = bed.running().await;
    let one = write(&lease, 1).step("a").event("progress").with(|commit| {
        commit.patches.push(StatePatch { set_goal: Some("once".into()), ..StatePatch::default() }.into());
    });
    let first = bed.commit(one.clone()).await.expect("written");
    let before = bed.everything(lease.task).await;
    assert_eq!(bed.commit(one).await, Ok(first));
    assert_eq!(bed.everything(lease.task).await, before);

    let plain = write(&lease, 2).step("b");
    let second = bed.commit(plain.clone()).await.expect("written");
    let before = bed.everything(lease.task).await;
    assert_eq!(bed.commit(plain).await, Ok(second), "also when it is only a step");
    assert_eq!(bed.everything(lease.task).await, before);

    let end = write(&lease, 3).outcome(completed());
    let last = bed.commit(end.clone()).await.expect("written");
    let before = bed.everything(lease.task).await;
    assert_eq!(bed.commit(end).await, Ok(last), "also when it ended the task");
    assert_eq!(bed.everything(lease.task).await, before);
    assert_eq!(bed.queue("default").await.running, 0);
}

async fn a_repeated_commit_is_known_after_a_cancel_and_a_deadline_too(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(60))).await;
    let one = write(&lease, 1).step("a");
    bed.commit(one.clone()).await.expect("written");
    bed.cancel(lease.task).await.expect("asked");
    bed.advance(61);
    bed.commit(one).await.expect("it was accepted before they came");
}

async fn a_repeated_commit_of_a_run_that_is_over_is_refused_once_another_runs(bed: Bed) {
    let old = bed.running().await;
    let end = write(&old, 1).outcome(Outcome::Released);
    bed.commit(end.clone()).await.expect("written");
    let new = bed.claim_one().await;
    assert_eq!(bed.commit(end).await, fenced(old.fence));
    bed.commit(write(&new, 1).step("a")).await.expect("numbers start anew with each lease");
}

async fn after_a_cancel_nothing_forward_is_accepted_and_the_rest_is(bed: Bed) {
    let lease = bed.running().await;
    bed.cancel(lease.task).await.expect("asked");
    let before = bed.everything(lease.task).await;
    assert_eq!(bed.commit(write(&lease, 1).step("a")).await, Err(CommitRefused::Cancelled));
    assert_eq!(bed.commit(write(&lease, 1).outcome(completed())).await, Err(CommitRefused::Cancelled));
    assert_eq!(bed.everything(lease.task).await, before);
    bed.commit(write(&lease, 1).step("under way").backward()).await.expect("the record of an effect under way");
    bed.commit(write(&lease, 2).outcome(super::bed::cancelled()).backward()).await.expect("and the end");
    assert_eq!(bed.state(lease.task).await, State::Cancelled);
}

async fn after_the_deadline_nothing_forward_is_accepted_and_the_rest_is(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).timeout(secs(10))).await;
    bed.commit(write(&lease, 1).step("a")).await.expect("in time");
    bed.advance(11);
    let before = bed.everything(lease.task).await;
    assert_eq!(bed.commit(write(&lease, 2).step("b")).await, Err(CommitRefused::DeadlineExceeded));
    assert_eq!(bed.commit(write(&lease, 2).outcome(completed())).await, Err(CommitRefused::DeadlineExceeded));
    assert_eq!(bed.everything(lease.task).await, before);
    bed.commit(write(&lease, 2).step("under way").backward()).await.expect("the record of an effect under way");
}

async fn a_suspend_that_does_not_know_the_newest_event_is_stale(bed: Bed) {
    let lease = bed.running().await;
    let goal = StatePatch { set_goal: Some("other".into()), ..StatePatch::default() };
    bed.control(lease.task, Action::Patch { patch: goal, version: None, under: None }).await.expect("patched");
    let newest = bed.task(lease.task).await.last_seq;
    assert!(newest > lease.last_seq);
    let suspend = |known| {
        write(&lease, 1).outcome(suspended("signal", "go", None)).with(|commit| commit.known_seq = Some(known))
    };
    assert_eq!(bed.commit(suspend(lease.last_seq)).await, Err(CommitRefused::Stale { last_seq: newest }));
    let step = write(&lease, 1).step("a").with(|commit| commit.known_seq = Some(lease.last_seq));
    assert_eq!(
        bed.commit(step).await,
        Err(CommitRefused::Stale { last_seq: newest }),
        "nor is a step that says so"
    );
    assert_eq!(bed.state(lease.task).await, State::Running);
    bed.commit(suspend(newest)).await.expect("now it knows");
    assert_eq!(bed.state(lease.task).await, State::Waiting);
}

async fn one_refused_entry_of_a_batch_hurts_only_itself(bed: Bed) {
    bed.submit_many(5).await;
    let mut leases = bed.claim(5).await;
    leases[1].fence += 7;
    bed.cancel(leases[3].task).await.expect("asked");
    let writes = leases.iter().map(|lease| write(lease, 1).step("a").outcome(completed())).collect();
    let answers = bed.commit_all(writes).await;
    assert_eq!(answers[1], fenced(leases[1].fence));
    assert_eq!(answers[3], Err(CommitRefused::Cancelled));
    for n in [0, 2, 4] {
        assert_eq!(answers[n], Ok(Committed { first_seq: 3, last_seq: 4 }), "in the order of the batch");
        assert_eq!(bed.state(leases[n].task).await, State::Completed);
    }
    for n in [1, 3] {
        assert_eq!(bed.state(leases[n].task).await, State::Running);
    }
}

async fn a_batch_of_very_different_commits_is_written_whole(bed: Bed) {
    bed.submit_many(200).await;
    let leases = bed.claim(200).await;
    let writes = leases.iter().enumerate().map(|(n, lease)| match n % 5 {
        0 => write(lease, 1).step("a"),
        1 => write(lease, 1).step("a").outcome(completed()),
        2 => write(lease, 1).outcome(retry(60)),
        3 => write(lease, 1).event("progress").event("progress"),
        _ => write(lease, 1).outcome(suspended("signal", "go", Some(60))),
    });
    assert!(bed.commit_all(writes.collect()).await.iter().all(Result::is_ok));
    let states = [State::Running, State::Completed, State::Pending, State::Running, State::Waiting];
    let lengths = [3, 4, 3, 4, 3];
    for (n, lease) in leases.iter().enumerate() {
        assert_eq!(bed.state(lease.task).await, states[n % 5]);
        assert_eq!(bed.events(lease.task).await.len(), lengths[n % 5]);
    }
    let queue = bed.queue("default").await;
    assert_eq!((queue.pending, queue.running), (40, 80));
}

async fn the_newest_progress_is_kept(bed: Bed) {
    let lease = bed.running().await;
    let progress = |step: u32| Progress {
        task_id: lease.task,
        step,
        total_step: 3,
        status: "thinking".into(),
        tool: None,
        message: format!("step {step}"),
        time: bed.store.clock().now(),
    };
    for number in 1..=2 {
        let text = serde_json::to_string(&progress(number)).expect("it serialises");
        bed.commit(write(&lease, number).event("progress").with(|commit| commit.progress = Some(text)))
            .await
            .expect("written");
    }
    bed.commit(write(&lease, 3).step("silent")).await.expect("written");
    assert_eq!(bed.task(lease.task).await.progress.expect("kept").step, 2);
}

async fn the_newest_usage_is_kept(bed: Bed) {
    let lease = bed.running().await;
    let used = |tokens: u32| Some(format!(r#"{{"tokens":{tokens}}}"#));
    bed.commit(write(&lease, 1).step("a").with(|commit| commit.usage = used(1))).await.expect("written");
    bed.commit(write(&lease, 2).step("silent")).await.expect("written");
    assert_eq!(bed.task(lease.task).await.usage, Some(json!({"tokens": 1})));
    bed.commit(write(&lease, 3).outcome(completed()).with(|commit| commit.usage = used(2)))
        .await
        .expect("written");
    assert_eq!(bed.task(lease.task).await.usage, Some(json!({"tokens": 2})));
}

async fn a_commit_with_nothing_to_tell_changes_no_number(bed: Bed) {
    let lease = bed.running().await;
    let patch = StatePatch { set_goal: Some("quiet".into()), ..StatePatch::default() };
    bed.commit(write(&lease, 1).with(|commit| commit.patches.push(patch.into()))).await.expect("written");
    bed.commit(write(&lease, 2)).await.expect("written");
    assert_eq!(bed.events(lease.task).await.len(), 2);
    let next = bed.commit(write(&lease, 3).step("a")).await.expect("written");
    assert_eq!(next, Committed { first_seq: 3, last_seq: 3 });
}

async fn runs_that_write_at_once_do_not_disturb_each_other(bed: Bed) {
    bed.submit_many(12).await;
    let leases = bed.claim(12).await;
    let runs: Vec<_> = leases
        .iter()
        .map(|lease| {
            let (bed, lease) = (bed.clone(), lease.clone());
            tokio::spawn(async move {
                for number in 1..=10 {
                    bed.commit(write(&lease, number).step(&format!("s{number}"))).await.expect("written");
                }
                bed.commit(write(&lease, 11).outcome(completed())).await.expect("written");
            })
        })
        .collect();
    for run in runs {
        run.await.expect("no panic");
    }
    let lengths: HashSet<usize> = {
        let mut lengths = HashSet::new();
        for lease in &leases {
            lengths.insert(bed.events(lease.task).await.len());
        }
        lengths
    };
    assert_eq!(lengths, [2 + 10 + 1].into());
}

on_every_store![
    records_and_events_are_in_the_log_with_their_run_and_numbers,
    a_result_is_recorded_byte_for_byte,
    a_commit_under_another_fence_is_refused_and_changes_nothing,
    a_commit_for_a_task_that_is_not_there_is_refused,
    a_lost_lease_writes_nothing_even_when_the_same_worker_has_the_task_again,
    an_expired_lease_that_nobody_took_back_still_writes,
    a_run_that_ended_writes_nothing_more,
    a_repeated_commit_is_answered_the_same_and_written_once,
    a_repeated_commit_is_known_after_a_cancel_and_a_deadline_too,
    a_repeated_commit_of_a_run_that_is_over_is_refused_once_another_runs,
    after_a_cancel_nothing_forward_is_accepted_and_the_rest_is,
    after_the_deadline_nothing_forward_is_accepted_and_the_rest_is,
    a_suspend_that_does_not_know_the_newest_event_is_stale,
    one_refused_entry_of_a_batch_hurts_only_itself,
    a_batch_of_very_different_commits_is_written_whole,
    the_newest_progress_is_kept,
    the_newest_usage_is_kept,
    a_commit_with_nothing_to_tell_changes_no_number,
    runs_that_write_at_once_do_not_disturb_each_other,
];
