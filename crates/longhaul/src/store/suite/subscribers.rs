//! Subscribers: their places, their holders, and what is kept for them.

use std::time::Duration;

use tokio_postgres::NoTls;

use super::bed::{Bed, completed, on_postgres, secs, write};
use crate::state::StatePatch;
use crate::store::feed::{FIRST_SPAN, FeedRow, PAGE_ROWS, Place};
use crate::store::subscribers::{Held, MoveSubscriber, NewSubscriber, Position, Take, TakeSubscriber};
use crate::store::{Action, Settings, SubmitRefused};
use crate::task::{NewTask, TaskId};

const LEASE: Duration = Duration::from_secs(6);

fn new(name: &str, at: Place) -> NewSubscriber {
    NewSubscriber { name: name.into(), tenant: None, at, max_behind: Some(secs(3_600)) }
}

async fn begin(bed: &Bed, name: &str, at: Place) {
    bed.store.begin_subscriber(&new(name, at)).await.expect("the store answers").expect("accepted");
}

async fn begin_now(bed: &Bed, name: &str) {
    let now = bed.store.feed_now().await.expect("the store answers");
    begin(bed, name, now).await;
}

async fn take(bed: &Bed, name: &str) -> Take {
    let ask = TakeSubscriber { name: name.into(), held_by: "host:1".into(), lease: LEASE };
    bed.store.take_subscriber(&ask).await.expect("the store answers")
}

async fn held(bed: &Bed, name: &str) -> Held {
    match take(bed, name).await {
        Take::Taken(held) => held,
        other => panic!("it is not free: {other:?}"),
    }
}

fn step(name: &str, held: &Held, place: Place) -> MoveSubscriber {
    MoveSubscriber {
        name: name.into(),
        fence: held.fence,
        to: Some(Position { place, given: 0 }),
        passed_at: None,
        lease: Some(LEASE),
    }
}

async fn moved(bed: &Bed, step: MoveSubscriber) -> bool {
    bed.store.move_subscriber(&step).await.expect("the store answers")
}

/// Moves a subscriber past everything there is.
async fn pass_all(bed: &Bed, name: &str, held: &Held) {
    let end = loop {
        let now = bed.store.feed_now().await.expect("the store answers");
        let page = bed.store.feed(held.at.place, 1 << 40, 100_000).await.expect("the store answers");
        // Other tests on the same server can hold the horizon for a moment.
        if !page.held && !page.more && page.rows.iter().all(|row| row.place < now) {
            break now;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let passed_at = Some(bed.store.clock().now_micros());
    assert!(moved(bed, MoveSubscriber { passed_at, ..step(name, held, end) }).await);
}

async fn keep_for(bed: &Bed, seconds: u64) {
    bed.configure(Settings { retention: Some(secs(seconds)), ..Settings::default() }).await;
}

async fn a_place_is_kept_under_its_name(bed: Bed) {
    begin(&bed, "mail", Place::of(7)).await;
    let first = held(&bed, "mail").await;
    assert_eq!(first.at, Position { place: Place::of(7), given: 0 });
    let at = Position { place: Place { order: 9, task: TaskId::new().0, seq: 3 }, given: 4 };
    let last = MoveSubscriber { to: Some(at), lease: None, ..step("mail", &first, at.place) };
    assert!(moved(&bed, last).await);
    // Begun again, as at every start of a program, it stays where it is.
    begin(&bed, "mail", Place::START).await;
    let second = held(&bed.another_process().await, "mail").await;
    assert_eq!(second.at, at);
    assert!(second.fence > first.fence);
}

async fn a_subscriber_has_one_holder_until_its_lease_is_over(bed: Bed) {
    begin_now(&bed, "mail").await;
    let first = held(&bed, "mail").await;
    let other = bed.another_process().await;
    let Take::Busy(left) = take(&other, "mail").await else { panic!("it is held") };
    assert!(left > secs(3) && left <= LEASE, "{left:?}");
    bed.advance(4);
    assert!(moved(&bed, step("mail", &first, first.at.place)).await, "which extends it");
    bed.advance(4);
    assert!(matches!(take(&bed, "mail").await, Take::Busy(_)));
    bed.advance(4);
    assert!(held(&bed, "mail").await.fence > first.fence);
    assert_eq!(take(&bed, "nobody").await, Take::Gone);
}

async fn a_holder_that_was_replaced_moves_nothing(bed: Bed) {
    begin_now(&bed, "mail").await;
    let paused = held(&bed, "mail").await;
    bed.advance(7);
    let next = held(&bed, "mail").await;
    let ahead = Place::of(paused.at.place.order + 100);
    assert!(!moved(&bed, step("mail", &paused, ahead)).await);
    let let_go = MoveSubscriber { lease: None, ..step("mail", &paused, ahead) };
    assert!(!moved(&bed, let_go).await, "and ends no other's lease");
    assert!(matches!(take(&bed, "mail").await, Take::Busy(_)));
    bed.advance(7);
    assert_eq!(held(&bed, "mail").await.at, next.at);
}

async fn one_that_lets_go_is_free_at_once(bed: Bed) {
    begin_now(&bed, "mail").await;
    let first = held(&bed, "mail").await;
    let let_go = MoveSubscriber { lease: None, ..step("mail", &first, first.at.place) };
    assert!(moved(&bed, let_go.clone()).await);
    assert!(!moved(&bed, let_go).await, "once");
    held(&bed, "mail").await;
}

async fn a_removed_subscriber_is_gone(bed: Bed) {
    begin_now(&bed, "mail").await;
    let first = held(&bed, "mail").await;
    assert!(bed.store.remove_subscriber("mail").await.expect("the store answers"));
    assert!(!bed.store.remove_subscriber("mail").await.expect("the store answers"));
    assert!(!moved(&bed, step("mail", &first, first.at.place)).await);
    assert_eq!(take(&bed, "mail").await, Take::Gone);
    assert!(bed.store.subscribers().await.expect("the store answers").is_empty());
}

async fn a_name_belongs_to_one_tenant(bed: Bed) {
    begin_now(&bed, "mail").await;
    let theirs = NewSubscriber { tenant: Some("acme".into()), ..new("mail", Place::START) };
    let refused = bed.store.begin_subscriber(&theirs).await.expect("the store answers");
    assert_eq!(refused.expect_err("the name is taken").field, "name");
}

async fn what_a_subscriber_has_not_passed_is_counted(bed: Bed) {
    begin_now(&bed, "mail").await;
    let first = held(&bed, "mail").await;
    let list = async || bed.store.subscribers().await.expect("the store answers").remove(0);
    assert_eq!((list().await.rows_behind, list().await.oldest), (0, None));
    bed.submit_many(5).await;
    let info = list().await;
    assert_eq!((info.rows_behind, info.held_by.as_deref()), (5, Some("host:1")));
    assert!(info.oldest.is_some());
    assert_eq!((info.tenant, info.max_behind_seconds), (None, Some(3_600)));
    pass_all(&bed, "mail", &first).await;
    assert_eq!(list().await.rows_behind, 0);
    bed.advance(7);
    assert_eq!(list().await.held_by, None);
}

async fn a_task_that_a_subscriber_has_not_passed_is_not_removed(bed: Bed) {
    keep_for(&bed, 60).await;
    begin_now(&bed, "mail").await;
    let lease = bed.running().await;
    bed.end(&lease, completed()).await;
    assert_eq!(bed.pass(3_000).await.removed, 0, "its events are still to be given");
    let mail = held(&bed, "mail").await;
    pass_all(&bed, "mail", &mail).await;
    // Time alone says nothing: this one ended before, and has an event that comes after the place.
    let resumed = bed.running().await;
    bed.end(&resumed, completed()).await;
    assert_eq!(bed.pass(61).await.removed, 1);
    assert!(bed.find(lease.task).await.is_none() && bed.find(resumed.task).await.is_some());
    let passed_at = Some(bed.store.clock().now_micros());
    let note = MoveSubscriber { to: None, passed_at, ..step("mail", &mail, mail.at.place) };
    assert!(moved(&bed, note).await);
    assert_eq!(bed.sweep().await.removed, 0, "whatever was noted of the time");
    assert!(bed.store.remove_subscriber("mail").await.expect("the store answers"));
    assert_eq!(bed.sweep().await.removed, 1, "nothing is kept for one that is gone");
}

async fn submits_are_refused_while_a_subscriber_is_too_far_behind(bed: Bed) {
    begin_now(&bed, "mail").await;
    // Not while there is nothing to pass, however long nobody runs it.
    bed.advance(10_000);
    let keyed = NewTask::new("h", &1).key("once");
    let first = bed.submit(keyed.clone()).await;
    bed.advance(3_500);
    bed.submit(NewTask::new("h", &2)).await;
    let lease = bed.claim(1).await.remove(0);
    bed.advance(200);
    // Begun anew, so that nothing is known of it from before.
    begin(&bed, "mail", Place::START).await;
    let refused = bed.try_submit(&NewTask::new("h", &3)).await.expect_err("too far behind");
    let text = refused.to_string();
    let SubmitRefused::SubscriberBehind { subscriber, behind, .. } = refused else { panic!("{refused:?}") };
    assert_eq!(subscriber, "mail");
    assert!(behind > secs(3_600) && behind < secs(4_000), "{behind:?}");
    assert!(text.contains("'mail' is 61 min behind"), "{text}");
    // What was accepted before is given, and tasks go on.
    let mut again = keyed;
    again.id = TaskId::new();
    assert_eq!(bed.try_submit(&again).await.expect("known").id, first);
    let mut child = NewTask::new("h", &4);
    child.parent = Some(lease.task);
    bed.submit(child).await;
    bed.commit(write(&lease, 1).step("a")).await.expect("written");
    bed.end_with(&lease, 2, completed()).await;
    // Behind for as long as it likes.
    let patient = NewSubscriber { max_behind: None, ..new("mail", Place::START) };
    bed.store.begin_subscriber(&patient).await.expect("the store answers").expect("accepted");
    bed.submit(NewTask::new("h", &5)).await;
    begin(&bed, "mail", Place::START).await;
    bed.try_submit(&NewTask::new("h", &6)).await.expect_err("too far behind again");
    assert!(bed.store.remove_subscriber("mail").await.expect("the store answers"));
    bed.submit(NewTask::new("h", &7)).await;
}

async fn a_subscriber_from_the_start_has_time_to_catch_up(bed: Bed) {
    bed.submit(NewTask::new("h", &1)).await;
    bed.advance(10_000);
    begin(&bed, "mail", Place::START).await;
    bed.submit(NewTask::new("h", &2)).await;
    bed.advance(3_700);
    begin(&bed, "mail", Place::START).await;
    bed.try_submit(&NewTask::new("h", &3)).await.expect_err("too far behind by now");
}

on_every_store![
    a_place_is_kept_under_its_name,
    a_subscriber_has_one_holder_until_its_lease_is_over,
    a_holder_that_was_replaced_moves_nothing,
    one_that_lets_go_is_free_at_once,
    a_removed_subscriber_is_gone,
    a_name_belongs_to_one_tenant,
    what_a_subscriber_has_not_passed_is_counted,
    a_task_that_a_subscriber_has_not_passed_is_not_removed,
    submits_are_refused_while_a_subscriber_is_too_far_behind,
    a_subscriber_from_the_start_has_time_to_catch_up,
];

/// Reads from a place on until `count` rows were given.
async fn read(bed: &Bed, from: Place, count: usize) -> Vec<FeedRow> {
    let (mut rows, mut next) = (Vec::new(), from);
    while rows.len() < count {
        let page = bed.store.feed(next, FIRST_SPAN, PAGE_ROWS).await.expect("the store answers");
        next = page.next;
        rows.extend(page.rows);
        if !page.more {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    rows
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rows_of_a_task_are_in_their_order_when_an_older_transaction_wrote_the_later_one_on_postgres() {
    on_postgres(|bed| async move {
        bed.submit_many(2).await;
        let mut leases = bed.claim(2).await;
        leases.sort_by_key(|lease| lease.task);
        let (first, second) = (leases[0].clone(), leases[1].clone());
        let (holder, connection) =
            tokio_postgres::connect(&bed.url, NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        let hold = format!("BEGIN; SELECT FROM tasks WHERE id = '{}' FOR UPDATE", first.task);
        holder.batch_execute(&hold).await.expect("held");
        // It has its number, and waits for the first task.
        let waiting = tokio::spawn({
            let (bed, writes) = (bed.clone(), vec![write(&first, 1).step("a"), write(&second, 1).step("a")]);
            async move { bed.commit_all(writes).await }
        });
        let (watcher, connection) =
            tokio_postgres::connect(&bed.url, NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        let blocked = format!(
            "SELECT FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND wait_event_type = 'Lock'
             AND backend_xid IS NOT NULL AND query LIKE '%UPDATE tasks t%' AND {} = ANY (pg_blocking_pids(pid))",
            holder.query_one("SELECT pg_backend_pid()", &[]).await.expect("a number").get::<_, i32>(0)
        );
        while watcher.query(&blocked, &[]).await.expect("the server answers").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Younger, and first to write to the second task.
        let patch = StatePatch { set_goal: Some("soon".into()), ..StatePatch::default() };
        bed.control(second.task, Action::Patch { patch, version: None, under: None }).await.expect("patched");
        holder.batch_execute("ROLLBACK").await.expect("let go");
        for answer in waiting.await.expect("it ends") {
            answer.expect("written");
        }
        let rows = read(&bed, Place::START, 2 + 2 + 1 + 2).await;
        let seqs: Vec<u64> = rows.iter().filter(|row| row.task == second.task).map(|row| row.row.seq).collect();
        assert_eq!(seqs, [1, 2, 3, 4]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_of_a_backup_restored_on_a_younger_server_misses_nothing_on_postgres() {
    on_postgres(|bed| async move {
        let passed = bed.submit(NewTask::new("h", &1)).await;
        let first = read(&bed, Place::START, 1).await.remove(0);
        begin(&bed, "mail", Place::of(first.place.order + 1)).await;
        let lease = bed.claim_one().await;
        let (admin, connection) = tokio_postgres::connect(&bed.url, NoTls).await.expect("the test server answers");
        tokio::spawn(connection);
        let elsewhere = "UPDATE log SET xact = xact + 1000000000; UPDATE tasks SET xact = xact + 1000000000;
                         UPDATE subscribers SET at_order = at_order + 1000000000";
        admin.batch_execute(elsewhere).await.expect("as if from another server");
        let reopened = bed.another_process().await;
        reopened.end(&lease, completed()).await;
        let mail = held(&reopened, "mail").await;
        let rows = read(&reopened, mail.at.place, 2).await;
        let seqs: Vec<_> = rows.iter().map(|row| (row.task, row.row.seq)).collect();
        assert_eq!(seqs, [(passed, 2), (passed, 3)], "what it had not passed, and what is new");
    })
    .await;
}
