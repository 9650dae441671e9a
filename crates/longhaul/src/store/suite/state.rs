//! The task's state: patched by its run and by others, one version after the other.

use super::bed::{Bed, completed, write};
use crate::record::Record;
use crate::state::{AgentState, Fact, StatePatch};
use crate::store::{Action, ControlRefused, Controlled};
use crate::task::{NewTask, TaskId};

fn goal(text: &str) -> StatePatch {
    StatePatch { set_goal: Some(text.into()), ..StatePatch::default() }
}

fn fact(key: &str) -> StatePatch {
    let fact = Fact { key: key.into(), value: key.into(), source: "suite".into() };
    StatePatch { add_facts: vec![fact], ..StatePatch::default() }
}

async fn patch(
    bed: &Bed,
    id: TaskId,
    patch: StatePatch,
    version: Option<u64>,
) -> Result<Controlled, ControlRefused> {
    bed.control(id, Action::Patch { patch, version, under: None }).await
}

async fn read(bed: &Bed, id: TaskId) -> Option<(u64, AgentState)> {
    bed.store.state(id).await.expect("the store answers")
}

async fn a_task_has_no_state_until_it_is_patched(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    assert_eq!(read(&bed, id).await, None);
    let first = patch(&bed, id, goal("one"), None).await.expect("patched");
    assert!(first.changed);
    let (version, state) = read(&bed, id).await.expect("there");
    assert_eq!(version, first.version);
    assert_eq!(state, AgentState { goal: "one".into(), ..AgentState::default() });
    assert_eq!(read(&bed, TaskId::new()).await, None);
}

async fn each_patch_is_a_version_an_event_and_a_record(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let one = patch(&bed, id, goal("one"), None).await.expect("patched").version;
    let two = patch(&bed, id, fact("two"), Some(one)).await.expect("patched").version;
    assert_eq!(two, one + 1);
    assert_eq!(bed.kinds(id).await, ["task.submitted", "state.patched", "state.patched"]);
    let versions: Vec<u64> = bed
        .records(id)
        .await
        .into_iter()
        .filter_map(|record| if let Record::Patched { version, .. } = record { Some(version) } else { None })
        .collect();
    assert_eq!(versions, [one, two]);
    let (_, state) = read(&bed, id).await.expect("there");
    assert_eq!((state.goal.as_str(), state.known_facts.len()), ("one", 1));
}

async fn a_patch_for_an_older_version_is_a_conflict_and_changes_nothing(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let one = patch(&bed, id, goal("one"), None).await.expect("patched").version;
    let two = patch(&bed, id, goal("two"), Some(one)).await.expect("patched").version;
    let before = bed.everything(id).await;
    for version in [one, two + 1, u64::MAX] {
        let refused = patch(&bed, id, goal("three"), Some(version)).await;
        assert_eq!(refused, Err(ControlRefused::VersionConflict { current: two }));
    }
    assert_eq!(bed.everything(id).await, before);
}

async fn of_concurrent_patches_for_one_version_one_wins(bed: Bed) {
    let id = bed.submit(NewTask::new("h", &1)).await;
    let version = patch(&bed, id, goal("start"), None).await.expect("patched").version;
    let other = bed.another_process().await;
    let writers: Vec<_> = (0..8)
        .map(|n| {
            let bed = if n % 2 == 0 { bed.clone() } else { other.clone() };
            tokio::spawn(async move { patch(&bed, id, fact(&format!("f{n}")), Some(version)).await })
        })
        .collect();
    let mut won = 0;
    for writer in writers {
        match writer.await.expect("no panic") {
            Ok(controlled) => {
                assert_eq!(controlled.version, version + 1);
                won += 1;
            }
            Err(refused) => assert_eq!(refused, ControlRefused::VersionConflict { current: version + 1 }),
        }
    }
    assert_eq!(won, 1);
    let (now, state) = read(&bed, id).await.expect("there");
    assert_eq!((now, state.known_facts.len()), (version + 1, 1));
}

async fn concurrent_patches_without_a_version_are_all_applied(bed: Bed) {
    let lease = bed.running().await;
    let id = lease.task;
    let mut writers: Vec<_> = (0..10)
        .map(|n| {
            let bed = bed.clone();
            tokio::spawn(async move {
                patch(&bed, id, fact(&format!("f{n}")), None).await.expect("patched");
            })
        })
        .collect();
    let run = bed.clone();
    writers.push(tokio::spawn(async move {
        for number in 1..=10 {
            let own = fact(&format!("own{number}"));
            run.commit(
                write(&lease, number).event("state.patched").with(|commit| commit.patches.push(own.into())),
            )
            .await
            .expect("written");
        }
    }));
    for writer in writers {
        writer.await.expect("no panic");
    }
    let (_, state) = read(&bed, id).await.expect("there");
    assert_eq!(state.known_facts.len(), 20, "none overwrote another");
    assert_eq!(bed.events(id).await.len(), 2 + 20);
}

async fn the_patches_of_a_commit_are_applied_in_order(bed: Bed) {
    let lease = bed.running().await;
    let before = patch(&bed, lease.task, fact("outside"), None).await.expect("patched").version;
    let both = write(&lease, 1).event("state.patched").event("state.patched").with(|commit| {
        commit.patches = vec![goal("one").into(), goal("two").into()];
    });
    bed.commit(both).await.expect("written");
    let (version, state) = read(&bed, lease.task).await.expect("there");
    assert_eq!((state.goal.as_str(), state.known_facts.len()), ("two", 1));
    assert!(version > before);
    let stale = patch(&bed, lease.task, goal("three"), Some(before)).await;
    assert_eq!(stale, Err(ControlRefused::VersionConflict { current: version }));
}

async fn the_state_stays_readable_after_the_end(bed: Bed) {
    let lease = bed.running().await;
    patch(&bed, lease.task, goal("kept"), None).await.expect("patched");
    bed.end(&lease, completed()).await;
    assert_eq!(read(&bed, lease.task).await.expect("there").1.goal, "kept");
}

async fn the_state_of_a_task_that_has_ended_is_not_patched_and_its_last_event_stays_the_last(bed: Bed) {
    let lease = bed.running().await;
    let version = patch(&bed, lease.task, goal("one"), None).await.expect("patched").version;
    bed.end(&lease, completed()).await;
    for expected in [None, Some(version)] {
        let refused = patch(&bed, lease.task, goal("two"), expected).await.expect_err("it has ended");
        assert!(
            matches!(&refused, ControlRefused::WrongState(why) if why.contains("completed already")),
            "{refused}"
        );
    }
    assert_eq!(read(&bed, lease.task).await.expect("there").1.goal, "one");
    assert_eq!(bed.kinds(lease.task).await.last().map(String::as_str), Some("task.completed"));
}

async fn a_fork_that_was_accepted_before_keeps_the_state_it_has_come_to(bed: Bed) {
    let mut fork = NewTask::new("h", &1);
    let prefix = vec![Record::Patched { patch: goal("taken over"), version: 1 }];
    fork.fork = Some((TaskId::new(), prefix));
    let lease = bed.running_as(fork.clone()).await;
    let patched = write(&lease, 1).event("state.patched").with(|commit| commit.patches = vec![goal("own").into()]);
    bed.commit(patched).await.expect("written");
    let again = bed.try_submit(&fork).await.expect("known");
    assert_eq!((again.id, again.new), (lease.task, false));
    let (version, state) = read(&bed, lease.task).await.expect("there");
    assert_eq!((version, state.goal.as_str()), (2, "own"));
}

on_every_store![
    a_task_has_no_state_until_it_is_patched,
    each_patch_is_a_version_an_event_and_a_record,
    a_patch_for_an_older_version_is_a_conflict_and_changes_nothing,
    of_concurrent_patches_for_one_version_one_wins,
    concurrent_patches_without_a_version_are_all_applied,
    the_patches_of_a_commit_are_applied_in_order,
    the_state_stays_readable_after_the_end,
    the_state_of_a_task_that_has_ended_is_not_patched_and_its_last_event_stays_the_last,
    a_fork_that_was_accepted_before_keeps_the_state_it_has_come_to,
];
