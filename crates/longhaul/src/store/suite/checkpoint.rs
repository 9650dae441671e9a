//! Snapshots: kept with their checksum, rotated by count and age, the newest always there.

use super::bed::{Bed, Write, secs, write};
use crate::store::{Checkpoint, Lease, NewCheckpoint, Outcome};
use crate::task::TaskId;

fn snapshot(lease: &Lease, number: u32, max_count: u32, max_age: u64) -> Write {
    let checkpoint = NewCheckpoint {
        version: 3,
        iteration: number,
        data: format!(r#"{{"at":{number}}}"#),
        max_count,
        max_age: secs(max_age),
    };
    write(lease, number).event("progress").with(|commit| commit.checkpoint = Some(checkpoint))
}

async fn kept(bed: &Bed, task: TaskId) -> Vec<Checkpoint> {
    bed.store.checkpoints(task).await.expect("the store answers")
}

fn iterations(checkpoints: &[Checkpoint]) -> Vec<u32> {
    checkpoints.iter().map(|checkpoint| checkpoint.iteration).collect()
}

async fn a_checkpoint_is_kept_as_it_was_with_its_checksum(bed: Bed) {
    let lease = bed.running().await;
    let written = bed.commit(snapshot(&lease, 1, 5, 3_600)).await.expect("written");
    let now = bed.store.clock().now().as_microsecond();
    let checkpoints = kept(&bed, lease.task).await;
    assert_eq!(checkpoints.len(), 1);
    let checkpoint = &checkpoints[0];
    assert_eq!((checkpoint.version, checkpoint.iteration, checkpoint.seq), (3, 1, written.last_seq));
    assert_eq!(checkpoint.data, r#"{"at":1}"#);
    assert_eq!(checkpoint.checksum, crc32fast::hash(checkpoint.data.as_bytes()));
    assert!((now - checkpoint.created_at).abs() < 60_000_000, "by the store's clock");
}

async fn only_so_many_are_kept_and_they_are_given_newest_first(bed: Bed) {
    let lease = bed.running().await;
    for number in 1..=5 {
        bed.commit(snapshot(&lease, number, 3, 3_600)).await.expect("written");
    }
    assert_eq!(iterations(&kept(&bed, lease.task).await), [5, 4, 3]);
    bed.commit(snapshot(&lease, 6, 1, 3_600)).await.expect("written");
    assert_eq!(iterations(&kept(&bed, lease.task).await), [6]);
}

async fn old_ones_go_but_the_newest_always_stays(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(snapshot(&lease, 1, 10, 60)).await.expect("written");
    bed.advance(40);
    bed.commit(snapshot(&lease, 2, 10, 60)).await.expect("written");
    assert_eq!(iterations(&kept(&bed, lease.task).await), [2, 1]);
    bed.advance(40);
    bed.commit(snapshot(&lease, 3, 10, 60)).await.expect("written");
    assert_eq!(iterations(&kept(&bed, lease.task).await), [3, 2]);
    bed.advance(1_000);
    bed.heartbeat(&[&lease]).await;
    bed.sweep().await;
    assert_eq!(kept(&bed, lease.task).await.first().map(|newest| newest.iteration), Some(3));
    bed.commit(snapshot(&lease, 4, 0, 0)).await.expect("written");
    assert_eq!(iterations(&kept(&bed, lease.task).await), [4], "even when nothing is to be kept");
}

async fn rotation_leaves_other_tasks_alone(bed: Bed) {
    let one = bed.running().await;
    let two = bed.running().await;
    bed.commit(snapshot(&one, 1, 1, 60)).await.expect("written");
    bed.advance(100);
    bed.heartbeat(&[&one, &two]).await;
    bed.commit(write(&two, 1).step("a").event("progress")).await.expect("written");
    let answers = bed.commit_all(vec![snapshot(&two, 2, 1, 60), write(&one, 2).step("a")]).await;
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(iterations(&kept(&bed, one.task).await), [1]);
    assert_eq!(iterations(&kept(&bed, two.task).await), [2]);
}

async fn a_repeated_commit_keeps_one_checkpoint(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(snapshot(&lease, 1, 5, 60)).await.expect("written");
    bed.commit(snapshot(&lease, 1, 5, 60)).await.expect("known");
    assert_eq!(kept(&bed, lease.task).await.len(), 1);
}

async fn a_checkpoint_without_an_event_replaces_the_one_at_the_same_place(bed: Bed) {
    let lease = bed.running().await;
    for number in 1..=2 {
        let data =
            NewCheckpoint { version: 1, iteration: number, data: "{}".into(), max_count: 5, max_age: secs(60) };
        bed.commit(write(&lease, number).with(|commit| commit.checkpoint = Some(data))).await.expect("written");
    }
    assert_eq!(kept(&bed, lease.task).await.first().map(|newest| newest.iteration), Some(2));
}

async fn checkpoints_survive_the_run_that_made_them(bed: Bed) {
    let lease = bed.running().await;
    bed.commit(snapshot(&lease, 1, 5, 3_600)).await.expect("written");
    bed.end_with(&lease, 2, Outcome::Released).await;
    let again = bed.claim_one().await;
    assert_eq!(iterations(&kept(&bed, again.task).await), [1]);
}

on_every_store![
    a_checkpoint_is_kept_as_it_was_with_its_checksum,
    only_so_many_are_kept_and_they_are_given_newest_first,
    old_ones_go_but_the_newest_always_stays,
    rotation_leaves_other_tasks_alone,
    a_repeated_commit_keeps_one_checkpoint,
    a_checkpoint_without_an_event_replaces_the_one_at_the_same_place,
    checkpoints_survive_the_run_that_made_them,
];
