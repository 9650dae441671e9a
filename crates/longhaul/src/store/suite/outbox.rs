//! The outbox: which lines are due when, who gets them, and what becomes of them.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use uuid::Uuid;

use super::bed::{Bed, completed, failed, secs, write};
use crate::outbox::{MAX_ENDPOINTS, Webhook};
use crate::schedule::Schedule;
use crate::store::outbox::{Attempt, Due, Settle, TakeDue, Taken, Then, Which};
use crate::store::{Action, Delivery, DeliveryStatus, Settings, SubmitRefused};
use crate::task::{NewTask, TaskId};

const HELD: Duration = Duration::from_secs(60);

fn ask(max: usize) -> TakeDue {
    TakeDue {
        owner: Uuid::now_v7(),
        lease: HELD,
        max,
        per_lane: max,
        busy: Vec::new(),
        after_lane: String::new(),
        replies: true,
    }
}

async fn take_as(bed: &Bed, ask: &TakeDue) -> Taken {
    bed.store.take_due(ask).await.expect("the store answers")
}

/// Everything that is due, and who has it now.
async fn take(bed: &Bed) -> (Vec<Due>, Uuid) {
    let ask = ask(1_000);
    (take_as(bed, &ask).await.due, ask.owner)
}

/// The only line that is due.
async fn take_one(bed: &Bed) -> (Due, Uuid) {
    let (mut due, owner) = take(bed).await;
    assert_eq!(due.len(), 1, "exactly one line is due: {due:?}");
    (due.remove(0), owner)
}

async fn nothing_due(bed: &Bed) {
    assert!(take(bed).await.0.is_empty());
}

async fn next_due(bed: &Bed) -> Option<i64> {
    bed.store.next_due().await.expect("the store answers")
}

fn settled(due: &Due, owner: Uuid, sent: u64, then: Then) -> Settle {
    let (task, destination) = (due.task, due.destination.clone());
    Settle { task, destination, owner, attempt: None, again: false, sent, attempts: 0, first_at: None, then }
}

fn attempt(due: &Due, seq: u64, status: DeliveryStatus, number: u32) -> Attempt {
    Attempt {
        seq,
        event: "task.completed".into(),
        tenant: due.tenant.clone(),
        webhook: due.webhook.clone(),
        status,
        number,
        http_status: Some(if status == DeliveryStatus::Delivered { 204 } else { 500 }),
        error: (status != DeliveryStatus::Delivered).then(|| "answered 500".to_owned()),
    }
}

async fn settle(bed: &Bed, settle: Settle) -> bool {
    let mut answers = bed.store.settle(&[settle]).await.expect("the store answers");
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}

/// Settles the event `seq` as delivered, and everything up to it.
async fn delivered(bed: &Bed, due: &Due, owner: Uuid, seq: u64) {
    let attempt = Some(attempt(due, seq, DeliveryStatus::Delivered, 1));
    assert!(settle(bed, Settle { attempt, ..settled(due, owner, seq, Then::LetGo) }).await);
}

async fn deliveries(bed: &Bed, task: TaskId) -> Vec<Delivery> {
    bed.store.deliveries("default", task).await.expect("the store answers")
}

/// A task that has ended, of which a webhook is to hear.
async fn ended(bed: &Bed) -> TaskId {
    let lease = bed.running_as(NewTask::new("h", &1).webhook("https://example.com/hook")).await;
    bed.end(&lease, completed()).await;
    lease.task
}

async fn endpoint(bed: &Bed, tenant: &str, name: &str, webhook: Webhook) {
    bed.store.save_endpoint(tenant, name, &webhook).await.expect("the store answers").expect("valid");
}

fn everything(url: &str) -> Webhook {
    Webhook::new(url).event("*")
}

async fn a_task_without_destinations_is_never_due(bed: Bed) {
    let lease = bed.running().await;
    bed.end(&lease, completed()).await;
    assert_eq!(next_due(&bed).await, None);
    nothing_due(&bed).await;
}

async fn a_line_that_wants_ends_is_due_when_its_task_ends(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).webhook("https://example.com/hook")).await;
    bed.commit(write(&lease, 1).step("a")).await.expect("written");
    assert_eq!(next_due(&bed).await, None);
    bed.end_with(&lease, 2, completed()).await;
    assert_eq!(next_due(&bed).await, Some(0));
    let (due, owner) = take_one(&bed).await;
    assert_eq!((due.task, due.destination.as_str(), due.tenant.as_str()), (lease.task, "webhook", "default"));
    let last = bed.task(lease.task).await.last_seq;
    assert_eq!(due.which, Which::After(last - 1), "the end is all there is to look at");
    assert_eq!((due.attempts, due.lane.as_str()), (0, "example.com:443"));
    assert_eq!(due.webhook.url, "https://example.com/hook");
    delivered(&bed, &due, owner, last).await;
    assert_eq!(next_due(&bed).await, None);
}

async fn every_way_to_end_makes_it_due(bed: Bed) {
    let hooked = || NewTask::new("h", &1).webhook("https://example.com/");
    let queued = bed.submit(hooked()).await;
    bed.cancel(queued).await.expect("cancelled");
    let mut ended = HashSet::from([queued]);
    let lease = bed.running_as(hooked()).await;
    bed.end(&lease, failed()).await;
    ended.insert(lease.task);
    ended.insert(bed.submit(hooked().timeout(secs(10))).await);
    bed.pass(11).await;
    let due: HashSet<TaskId> = take(&bed).await.0.into_iter().map(|due| due.task).collect();
    assert_eq!(due, ended);
}

async fn a_line_that_wants_everything_is_due_from_the_submit_on(bed: Bed) {
    let mut task = NewTask::new("h", &1);
    task.webhook = Some(everything("http://example.com/"));
    let id = bed.submit(task).await;
    let (due, owner) = take_one(&bed).await;
    assert_eq!((due.task, due.which), (id, Which::After(0)));
    nothing_due(&bed).await;
    // Something happens while it is held.
    let lease = bed.claim_one().await;
    delivered(&bed, &due, owner, 1).await;
    let (due, owner) = take_one(&bed).await;
    assert_eq!(due.which, Which::After(1));
    delivered(&bed, &due, owner, 2).await;
    nothing_due(&bed).await;
    bed.commit(write(&lease, 1).event("disk.cleaned")).await.expect("written");
    assert_eq!(take_one(&bed).await.0.which, Which::After(2));
}

async fn the_same_submit_again_adds_no_line(bed: Bed) {
    let task = NewTask::new("h", &1).webhook("http://example.com/").key("k");
    let id = bed.submit(task.clone()).await;
    assert!(!bed.try_submit(&task).await.expect("known").new);
    let again = NewTask::new("h", &1).webhook("http://example.com/").key("k");
    assert_eq!(bed.try_submit(&again).await.expect("known").id, id);
    let other = NewTask::new("h", &1).webhook("http://example.com/other").key("k");
    assert!(matches!(bed.try_submit(&other).await, Err(SubmitRefused::KeyConflict { .. })));
    bed.cancel(id).await.expect("cancelled");
    take_one(&bed).await;
}

async fn what_a_lost_deliverer_had_taken_is_due_again(bed: Bed) {
    ended(&bed).await;
    let (due, lost) = take_one(&bed).await;
    bed.advance(59);
    nothing_due(&bed).await;
    bed.advance(2);
    let other = bed.another_process().await;
    let (again, owner) = take_one(&other).await;
    assert_eq!(again.task, due.task);
    let late = Settle {
        attempt: Some(attempt(&due, 3, DeliveryStatus::Delivered, 1)),
        ..settled(&due, lost, 3, Then::LetGo)
    };
    assert!(!settle(&bed, late).await, "it is no longer theirs");
    assert!(deliveries(&bed, due.task).await.is_empty());
    delivered(&other, &again, owner, 3).await;
}

async fn who_goes_on_keeps_what_it_has(bed: Bed) {
    ended(&bed).await;
    let (due, owner) = take_one(&bed).await;
    bed.advance(50);
    assert!(settle(&bed, settled(&due, owner, 1, Then::GoOn(HELD))).await);
    bed.advance(50);
    nothing_due(&bed).await;
    assert!(settle(&bed, settled(&due, owner, 2, Then::LetGo)).await);
    assert_eq!(take_one(&bed).await.0.which, Which::After(2));
}

async fn a_failure_is_tried_again_after_its_pause_with_its_count(bed: Bed) {
    let id = ended(&bed).await;
    let (due, owner) = take_one(&bed).await;
    let failure = attempt(&due, 3, DeliveryStatus::Failed, 1);
    let retry = settled(&due, owner, 2, Then::Retry(secs(100)));
    assert!(settle(&bed, Settle { attempt: Some(failure), attempts: 1, first_at: Some(7), ..retry }).await);
    let [told] = &deliveries(&bed, id).await[..] else { panic!("one delivery") };
    assert_eq!((told.status, told.attempts, told.seq), (DeliveryStatus::Failed, 1, 3));
    assert_eq!((told.http_status, told.error.as_deref()), (Some(500), Some("answered 500")));
    assert_eq!(told.url, "https://example.com/hook");
    assert!(told.next_at.is_some_and(|at| at > bed.store.clock().now()), "{told:?}");
    nothing_due(&bed).await;
    bed.advance(101);
    let (due, owner) = take_one(&bed).await;
    assert_eq!((due.which, due.attempts, due.first_at), (Which::After(2), 1, Some(7)));
    let success = Some(attempt(&due, 3, DeliveryStatus::Delivered, 2));
    assert!(settle(&bed, Settle { attempt: success, ..settled(&due, owner, 3, Then::LetGo) }).await);
    let [told] = &deliveries(&bed, id).await[..] else { panic!("one delivery still") };
    assert_eq!((told.status, told.attempts, told.next_at), (DeliveryStatus::Delivered, 2, None));
    assert_eq!(told.error, None);
    bed.advance(10_000);
    nothing_due(&bed).await;
}

async fn a_destination_that_ended_hears_nothing_more(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).webhook("http://example.com/")).await;
    bed.end(&lease, failed()).await;
    let (due, owner) = take_one(&bed).await;
    assert!(settle(&bed, settled(&due, owner, 3, Then::End)).await);
    bed.control(lease.task, Action::Resume).await.expect("resumed");
    let lease = bed.claim_one().await;
    bed.end(&lease, completed()).await;
    nothing_due(&bed).await;
}

async fn a_resumed_task_is_told_of_again(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).webhook("http://example.com/")).await;
    bed.end(&lease, failed()).await;
    let (due, owner) = take_one(&bed).await;
    delivered(&bed, &due, owner, 3).await;
    bed.control(lease.task, Action::Resume).await.expect("resumed");
    let lease = bed.claim_one().await;
    bed.end(&lease, completed()).await;
    let last = bed.task(lease.task).await.last_seq;
    assert_eq!(take_one(&bed).await.0.which, Which::After(last - 1));
}

async fn an_end_that_was_not_told_yet_is_told_after_a_resume_too(bed: Bed) {
    let lease = bed.running_as(NewTask::new("h", &1).webhook("http://example.com/")).await;
    bed.end(&lease, failed()).await;
    bed.control(lease.task, Action::Resume).await.expect("resumed");
    let lease = bed.claim_one().await;
    bed.end(&lease, completed()).await;
    assert_eq!(take_one(&bed).await.0.which, Which::After(2), "from the first end on");
}

async fn lanes_take_turns(bed: Bed) {
    for n in 0..10 {
        let host = if n < 8 { "slow" } else { "quick" };
        let id = bed.submit(NewTask::new("h", &n).webhook(format!("http://{host}.example.com/"))).await;
        bed.cancel(id).await.expect("cancelled");
    }
    let lanes = |taken: &Taken| {
        let mut lanes = BTreeMap::<String, usize>::new();
        for due in &taken.due {
            *lanes.entry(due.lane.split('.').next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        lanes
    };
    let few = TakeDue { per_lane: 1, ..ask(100) };
    let taken = take_as(&bed, &few).await;
    assert_eq!(lanes(&taken), BTreeMap::from([("quick".into(), 1), ("slow".into(), 1)]));
    assert_eq!(taken.next_lane, "");
    let full = TakeDue { busy: vec![("slow.example.com:80".into(), 0)], ..ask(100) };
    assert_eq!(lanes(&take_as(&bed, &full).await), BTreeMap::from([("quick".into(), 1)]));
    // With room for two only, the next taking goes on behind the lane where this one stopped.
    let id = bed.submit(NewTask::new("h", &1).webhook("http://quick.example.com/")).await;
    bed.cancel(id).await.expect("cancelled");
    let first = take_as(&bed, &TakeDue { per_lane: 1, ..ask(1) }).await;
    assert_eq!(lanes(&first), BTreeMap::from([("quick".into(), 1)]));
    let second = take_as(&bed, &TakeDue { after_lane: first.next_lane, ..ask(3) }).await;
    assert_eq!(lanes(&second), BTreeMap::from([("slow".into(), 3)]));
}

async fn many_lanes_are_walked_in_pieces(bed: Bed) {
    let hooked = |n: u32| NewTask::new("h", &n).webhook(format!("http://r{n:03}.example.com/"));
    let batch: Vec<NewTask> = (0..300).map(hooked).collect();
    let answers = bed.store.submit(&batch).await.expect("the store answers");
    for answer in answers {
        bed.cancel(answer.expect("accepted").id).await.expect("cancelled");
    }
    let first = take_as(&bed, &ask(1_000)).await;
    assert_eq!(first.due.len(), 256);
    assert!(!first.next_lane.is_empty());
    let rest = take_as(&bed, &TakeDue { after_lane: first.next_lane, ..ask(1_000) }).await;
    assert_eq!((rest.due.len(), rest.next_lane.as_str()), (44, ""));
}

async fn two_deliverers_never_get_the_same_line(bed: Bed) {
    for n in 0..40 {
        let id = bed.submit(NewTask::new("h", &n).webhook("http://example.com/")).await;
        bed.cancel(id).await.expect("cancelled");
    }
    let other = bed.another_process().await;
    let mut seen = HashSet::new();
    loop {
        let (mine, theirs) = (ask(3), ask(3));
        let (mine, theirs) = tokio::join!(bed.store.take_due(&mine), other.store.take_due(&theirs));
        let taken: Vec<Due> = [mine, theirs].into_iter().flat_map(|taken| taken.expect("answers").due).collect();
        if taken.is_empty() {
            break;
        }
        for due in taken {
            assert!(seen.insert(due.task), "{} was given twice", due.task);
        }
    }
    assert_eq!(seen.len(), 40);
}

async fn an_endpoint_hears_of_tasks_submitted_while_it_is_there(bed: Bed) {
    let before = bed.submit(NewTask::new("h", &0)).await;
    endpoint(&bed, "default", "chat", Webhook::new("http://chat.example.com/")).await;
    endpoint(&bed, "other", "chat", Webhook::new("http://other.example.com/")).await;
    let after = bed.submit(NewTask::new("h", &1)).await;
    for id in [before, after] {
        bed.cancel(id).await.expect("cancelled");
    }
    // What is changed before it is sent counts.
    endpoint(&bed, "default", "chat", Webhook::new("http://chat.example.com/new")).await;
    let (due, owner) = take_one(&bed).await;
    assert_eq!((due.task, due.destination.as_str()), (after, "endpoint:chat"));
    assert_eq!(due.webhook.url, "http://chat.example.com/new");
    assert!(settle(&bed, settled(&due, owner, 0, Then::Retry(secs(1)))).await);
    assert!(bed.store.remove_endpoint("default", "chat").await.expect("the store answers"));
    assert!(!bed.store.remove_endpoint("default", "chat").await.expect("the store answers"));
    bed.advance(2);
    endpoint(&bed, "default", "chat", Webhook::new("http://chat.example.com/third")).await;
    nothing_due(&bed).await;
    assert_eq!(next_due(&bed).await, None, "its line is gone");
}

async fn endpoints_are_listed_by_name_and_bounded(bed: Bed) {
    for n in (0..MAX_ENDPOINTS).rev() {
        endpoint(&bed, "default", &format!("e{n:02}"), everything("http://example.com/")).await;
    }
    let listed = bed.store.endpoints("default").await.expect("the store answers");
    let names: Vec<String> = listed.iter().map(|endpoint| endpoint.name.clone()).collect();
    assert_eq!(names, (0..MAX_ENDPOINTS).map(|n| format!("e{n:02}")).collect::<Vec<_>>());
    assert_eq!(listed[0].webhook, everything("http://example.com/"));
    let save = |name: &'static str, webhook| {
        let store = bed.store.clone();
        async move { store.save_endpoint("default", name, &webhook).await.expect("the store answers") }
    };
    assert_eq!(save("more", everything("http://example.com/")).await.expect_err("too many").field, "endpoints");
    let changed = save("e03", Webhook::new("http://example.com/3")).await.expect("changed");
    assert_eq!(changed.created_at, listed[3].created_at);
    assert_eq!(save("e03", Webhook::new("nowhere")).await.expect_err("no URL").field, "webhook");
    assert_eq!(save("a b", Webhook::new("http://example.com/")).await.expect_err("no name").field, "endpoint");
    let id = bed.submit(NewTask::new("h", &1).webhook("http://example.com/own")).await;
    let (due, _) = take(&bed).await;
    assert_eq!(due.len(), MAX_ENDPOINTS - 1, "all but the one that wants only ends");
    bed.cancel(id).await.expect("cancelled");
    let (due, _) = take(&bed).await;
    assert_eq!(due.len(), 2, "that one, and the task's own");
    assert!(bed.store.endpoints("nobody\0").await.expect("the store answers").is_empty());
}

async fn tasks_of_schedules_have_lines_too(bed: Bed) {
    endpoint(&bed, "default", "chat", Webhook::new("http://chat.example.com/")).await;
    let task = NewTask::new("h", &1).webhook("http://example.com/");
    let schedule = Schedule::every("often", secs(60), task);
    bed.store.save_schedule(&schedule).await.expect("the store answers").expect("valid");
    bed.pass(61).await;
    let lease = bed.claim_one().await;
    bed.end(&lease, completed()).await;
    let destinations: HashSet<String> = take(&bed).await.0.into_iter().map(|due| due.destination).collect();
    assert_eq!(destinations, HashSet::from(["webhook".into(), "endpoint:chat".into()]));
}

async fn a_task_is_kept_until_all_was_told(bed: Bed) {
    bed.configure(Settings { retention: Some(secs(60)), ..Settings::default() }).await;
    let id = ended(&bed).await;
    assert_eq!(bed.pass(100).await.removed, 0, "nobody heard of it");
    let (due, owner) = take_one(&bed).await;
    delivered(&bed, &due, owner, 3).await;
    let delivery = deliveries(&bed, id).await[0].id;
    assert!(bed.store.redeliver("default", id, delivery).await.expect("the store answers"));
    assert_eq!(bed.sweep().await.removed, 0, "it is to be sent again");
    let (due, owner) = take_one(&bed).await;
    let again = Some(attempt(&due, 3, DeliveryStatus::Delivered, 1));
    assert!(settle(&bed, Settle { attempt: again, again: true, ..settled(&due, owner, 3, Then::LetGo) }).await);
    assert_eq!(bed.sweep().await.removed, 1);
    assert!(deliveries(&bed, id).await.is_empty());
}

async fn a_deleted_task_takes_its_lines_along(bed: Bed) {
    let id = ended(&bed).await;
    let (due, owner) = take_one(&bed).await;
    let failure = Some(attempt(&due, 3, DeliveryStatus::Failed, 1));
    assert!(settle(&bed, Settle { attempt: failure, ..settled(&due, owner, 2, Then::Retry(secs(5))) }).await);
    bed.control(id, Action::Delete).await.expect("deleted");
    bed.advance(10);
    nothing_due(&bed).await;
    assert_eq!(next_due(&bed).await, None);
    assert!(deliveries(&bed, id).await.is_empty());
}

async fn a_delivery_can_be_made_again(bed: Bed) {
    let id = ended(&bed).await;
    let (due, owner) = take_one(&bed).await;
    delivered(&bed, &due, owner, 3).await;
    let delivery = deliveries(&bed, id).await[0].id;
    let redeliver = |tenant: &'static str, task, delivery| {
        let store = bed.store.clone();
        async move { store.redeliver(tenant, task, delivery).await.expect("the store answers") }
    };
    assert!(!redeliver("other", id, delivery).await);
    assert!(!redeliver("default", TaskId::new(), delivery).await);
    assert!(!redeliver("default", id, Uuid::now_v7()).await);
    nothing_due(&bed).await;
    assert!(redeliver("default", id, delivery).await);
    assert_eq!(deliveries(&bed, id).await[0].status, DeliveryStatus::Pending);
    assert_eq!(next_due(&bed).await, Some(0));
    let (due, owner) = take_one(&bed).await;
    assert_eq!((due.which, due.attempts, due.destination.as_str()), (Which::Again(3), 0, "webhook"));
    assert!(redeliver("default", id, delivery).await);
    nothing_due(&bed).await;
    let failure = Some(attempt(&due, 3, DeliveryStatus::Failed, 1));
    let retry = Settle { attempt: failure, again: true, ..settled(&due, owner, 3, Then::Retry(secs(5))) };
    assert!(settle(&bed, Settle { attempts: 1, first_at: Some(9), ..retry }).await);
    nothing_due(&bed).await;
    bed.advance(6);
    let (due, owner) = take_one(&bed).await;
    assert_eq!((due.which, due.attempts, due.first_at), (Which::Again(3), 1, Some(9)));
    let dead = Some(attempt(&due, 3, DeliveryStatus::Dead, 2));
    assert!(settle(&bed, Settle { attempt: dead, again: true, ..settled(&due, owner, 3, Then::LetGo) }).await);
    bed.advance(10_000);
    nothing_due(&bed).await;
    let dead = bed.store.dead_deliveries("default", 10).await.expect("the store answers");
    assert_eq!(dead.iter().map(|delivery| (delivery.id, delivery.attempts)).collect::<Vec<_>>(), [(delivery, 2)]);
    assert!(bed.store.dead_deliveries("other", 10).await.expect("the store answers").is_empty());
    assert!(bed.store.deliveries("other", id).await.expect("the store answers").is_empty());
    assert_eq!(bed.store.outbox_stats().await.expect("the store answers").dead, 1);
}

async fn a_failed_delivery_made_again_goes_at_once_and_keeps_its_place(bed: Bed) {
    let id = ended(&bed).await;
    let (due, owner) = take_one(&bed).await;
    let failure = Some(attempt(&due, 3, DeliveryStatus::Failed, 1));
    let retry = Settle { attempt: failure, ..settled(&due, owner, 2, Then::Retry(secs(1_000))) };
    assert!(settle(&bed, retry).await);
    nothing_due(&bed).await;
    let delivery = deliveries(&bed, id).await[0].id;
    assert!(bed.store.redeliver("default", id, delivery).await.expect("the store answers"));
    assert_eq!(take_one(&bed).await.0.which, Which::After(2));
}

async fn a_full_outbox_refuses_what_would_add_to_it(bed: Bed) {
    let hooked = |n: u32| NewTask::new("h", &n).webhook("http://example.com/");
    bed.store.bound_outbox(2).await.expect("the store answers");
    let first = hooked(0).key("first");
    bed.submit(first.clone()).await;
    bed.submit(hooked(1)).await;
    for id in bed.list(Default::default()).await {
        bed.cancel(id).await.expect("cancelled");
    }
    // What was counted before counts for a moment.
    bed.store.bound_outbox(2).await.expect("the store answers");
    let refused = bed.try_submit(&hooked(2)).await;
    assert!(matches!(refused, Err(SubmitRefused::OutboxFull { max: 2, .. })), "{refused:?}");
    assert!(!bed.try_submit(&first).await.expect("what is known is given").new);
    let parent = bed.running().await;
    let mut child = hooked(3);
    child.parent = Some(parent.task);
    assert!(bed.try_submit(&child).await.expect("a child is part of what was accepted").new);
    let stats = bed.store.outbox_stats().await.expect("the store answers");
    assert_eq!((stats.due, stats.dead), (2, 0));
    assert!(stats.oldest_due.is_some_and(|at| at <= bed.store.clock().now()));
    let (due, owner) = take(&bed).await;
    delivered(&bed, &due[0], owner, 2).await;
    bed.store.bound_outbox(2).await.expect("the store answers");
    bed.submit(hooked(4)).await;
}

async fn everyone_gets_the_same_secret(bed: Bed) {
    let other = bed.another_process().await;
    let (one, another) = tokio::join!(bed.store.kept_secret("s", "a"), other.store.kept_secret("s", "b"));
    let (one, another) = (one.expect("the store answers"), another.expect("the store answers"));
    assert_eq!(one, another);
    assert!(one == "a" || one == "b");
    assert_eq!(bed.store.kept_secret("s", "c").await.expect("the store answers"), one);
}

on_every_store!(
    a_task_without_destinations_is_never_due,
    a_line_that_wants_ends_is_due_when_its_task_ends,
    every_way_to_end_makes_it_due,
    a_line_that_wants_everything_is_due_from_the_submit_on,
    the_same_submit_again_adds_no_line,
    what_a_lost_deliverer_had_taken_is_due_again,
    who_goes_on_keeps_what_it_has,
    a_failure_is_tried_again_after_its_pause_with_its_count,
    a_destination_that_ended_hears_nothing_more,
    a_resumed_task_is_told_of_again,
    an_end_that_was_not_told_yet_is_told_after_a_resume_too,
    lanes_take_turns,
    many_lanes_are_walked_in_pieces,
    two_deliverers_never_get_the_same_line,
    an_endpoint_hears_of_tasks_submitted_while_it_is_there,
    endpoints_are_listed_by_name_and_bounded,
    tasks_of_schedules_have_lines_too,
    a_task_is_kept_until_all_was_told,
    a_deleted_task_takes_its_lines_along,
    a_delivery_can_be_made_again,
    a_failed_delivery_made_again_goes_at_once_and_keeps_its_place,
    a_full_outbox_refuses_what_would_add_to_it,
    everyone_gets_the_same_secret,
);
