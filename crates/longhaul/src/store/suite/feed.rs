//! The log of all tasks.

use std::collections::BTreeMap;

use tokio_postgres::NoTls;

use super::bed::{Bed, completed, on_postgres, write};
use crate::store::feed::{FIRST_SPAN, FeedRow, PAGE_ROWS, Place};
use crate::task::{NewTask, TaskId};

/// Everything from a place on that may be given now, and where to go on.
async fn read_all(bed: &Bed, from: Place) -> (Vec<FeedRow>, Place) {
    let (mut rows, mut next, mut span) = (Vec::new(), from, FIRST_SPAN);
    loop {
        let page = bed.store.feed(next, span, PAGE_ROWS).await.expect("the store answers");
        assert!(page.next >= next, "it never goes back");
        assert!(page.rows.iter().all(|row| row.place >= next && row.place < page.next));
        (next, span) = (page.next, page.span);
        rows.extend(page.rows);
        if !page.more {
            return (rows, next);
        }
    }
}

/// Reads on until `count` rows with events were given: other tests on the same server can hold the
/// horizon for a moment.
async fn read_until(bed: &Bed, from: Place, count: usize) -> (Vec<FeedRow>, Place) {
    let (mut rows, mut next) = (Vec::new(), from);
    loop {
        let (more, then) = read_all(bed, next).await;
        rows.extend(more.into_iter().filter(|row| row.row.count > 0));
        next = then;
        if rows.len() >= count {
            return (rows, next);
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// The numbers of the first events of rows, by task.
fn by_task(rows: &[FeedRow]) -> BTreeMap<TaskId, Vec<u64>> {
    let mut all: BTreeMap<TaskId, Vec<u64>> = BTreeMap::new();
    for row in rows {
        all.entry(row.task).or_default().push(row.row.seq);
    }
    all
}

async fn log_seqs(bed: &Bed, id: TaskId) -> Vec<u64> {
    bed.log(id).await.iter().map(|row| row.seq).collect()
}

async fn every_row_is_given_once_in_its_order_with_its_tenant(bed: Bed) {
    let mut ids = bed.submit_many(20).await;
    ids.push(bed.submit(NewTask::new("h", &1).tenant("acme")).await);
    let leases = bed.claim(100).await;
    for lease in &leases {
        bed.commit(write(lease, 1).step("a")).await.expect("written");
        bed.end_with(lease, 2, completed()).await;
    }
    let (rows, next) = read_until(&bed, Place::START, 21 * 4).await;
    assert!(rows.is_sorted_by(|one, other| one.place < other.place));
    for (id, seqs) in by_task(&rows) {
        assert_eq!(seqs, log_seqs(&bed, id).await);
        ids.retain(|known| *known != id);
    }
    assert!(ids.is_empty());
    assert_eq!(rows.iter().filter(|row| row.tenant.as_deref() == Some("acme")).count(), 4);
    assert!(rows.iter().all(|row| row.row.records.is_none()), "records are the engine's own");
    let (more, _) = read_all(&bed, next).await;
    assert!(more.is_empty());
    for cut in [0, 1, 7, rows.len() - 1] {
        let (rest, _) = read_until(&bed, rows[cut].place.next(), rows.len() - cut - 1).await;
        let places = |rows: &[FeedRow]| rows.iter().map(|row| row.place).collect::<Vec<_>>();
        assert_eq!(places(&rest), places(&rows[cut + 1..]), "from any place on");
    }
}

async fn what_is_committed_from_now_on_is_after_now(bed: Bed) {
    bed.submit_many(3).await;
    let now = bed.store.feed_now().await.expect("the store answers");
    let id = bed.another_process().await.submit(NewTask::new("h", &1)).await;
    let mut next = now;
    loop {
        let (rows, then) = read_until(&bed, next, 1).await;
        if rows.iter().any(|row| row.task == id) {
            break;
        }
        next = then;
    }
}

async fn a_task_that_is_deleted_takes_no_later_events_with_it(bed: Bed) {
    let kept = bed.submit(NewTask::new("h", &1)).await;
    let mut lease = bed.claim_one().await;
    for _ in 0..3 {
        // Its rows are the newest of all.
        bed.end(&lease, completed()).await;
        let gone = lease.task;
        lease = bed.running().await;
        let (_, next) = read_all(&bed, Place::START).await;
        bed.control(gone, crate::store::Action::Delete).await.expect("deleted");
        bed.end(&lease, completed()).await;
        let (_, before) = read_all(&bed, next).await;
        bed.control(lease.task, crate::store::Action::Delete).await.expect("deleted");
        let (nothing, next) = read_all(&bed, before).await;
        assert!(nothing.iter().all(|row| row.row.count == 0));
        let id = bed.submit(NewTask::new("h", &2)).await;
        let (rows, _) = read_until(&bed, next.min(before), 1).await;
        assert!(rows.iter().any(|row| row.task == id), "a new task is after everything that was read");
        lease = bed.claim_one().await;
    }
    assert!(bed.find(kept).await.is_none());
}

on_every_store![
    every_row_is_given_once_in_its_order_with_its_tenant,
    what_is_committed_from_now_on_is_after_now,
    a_task_that_is_deleted_takes_no_later_events_with_it,
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_commits_late_is_not_missed_on_postgres() {
    on_postgres(|bed| async move {
        let id = bed.submit(NewTask::new("h", &1)).await;
        let (late, connection) = tokio_postgres::connect(&bed.url, NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        let tell = format!(
            "BEGIN; INSERT INTO log (task, seq, count, time, run, events)
             VALUES ('{id}', 2, 1, 0, 0, '[{{\"type\":\"late\"}}]')"
        );
        late.batch_execute(&tell).await.expect("written, not committed");
        let after: Vec<TaskId> = bed.submit_many(5).await;
        let (rows, next) = read_all(&bed, Place::START).await;
        assert!(rows.iter().all(|row| !after.contains(&row.task)), "nothing after it is given yet");
        let page = bed.store.feed(next, FIRST_SPAN, PAGE_ROWS).await.expect("the store answers");
        assert!(page.held, "and the reader is told to look again");
        late.batch_execute("COMMIT").await.expect("committed");
        let (more, _) = read_until(&bed, next, 7 - rows.len()).await;
        let all: Vec<TaskId> = rows.iter().chain(&more).map(|row| row.task).collect();
        assert_eq!(all.iter().filter(|&&task| task == id).count(), 2, "both of its rows");
        assert!(after.iter().all(|task| all.contains(task)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_restored_on_a_younger_server_is_read_from_its_start_on_postgres() {
    on_postgres(|bed| async move {
        let id = bed.submit(NewTask::new("h", &1)).await;
        let (admin, connection) = tokio_postgres::connect(&bed.url, NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        admin.batch_execute("UPDATE log SET xact = xact + 1000000000").await.expect("as if from another server");
        let reopened = bed.another_process().await;
        let later = reopened.submit(NewTask::new("h", &2)).await;
        let (rows, _) = read_until(&reopened, Place::START, 2).await;
        assert_eq!(rows.iter().map(|row| row.task).collect::<Vec<_>>(), [id, later]);
    })
    .await;
}
