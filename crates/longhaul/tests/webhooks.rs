//! Webhooks from end to end: tasks on a store, an outbox, and receivers on sockets.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use common::Bed;
use common::receiver::{Hook, Receiver, status, until};
use longhaul::outbox::WebhookSecret;
use longhaul::{
    Client, Delivery, DeliveryStatus, NewTask, Outbox, OutboxHandle, OutboxSettings, Run, TaskError, TaskId,
    Webhook, Worker,
};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

const HOUR: Duration = Duration::from_secs(3_600);

fn here() -> OutboxSettings {
    OutboxSettings { allow_loopback: true, ..OutboxSettings::default() }
}

async fn start(client: &Client, settings: OutboxSettings) -> OutboxHandle {
    Outbox::start(client, settings).await.expect("the outbox starts")
}

/// A task that is over at once, of which `webhook` hears.
async fn ended(client: &Client, webhook: Webhook) -> TaskId {
    client.announce(&["h"]).await.expect("announced");
    let mut task = NewTask::new("h", &1);
    task.webhook = Some(webhook);
    let id = client.submit(task).await.expect("accepted").id;
    client.cancel(id, None).await.expect("cancelled");
    id
}

/// The task's deliveries, oldest first, once they are as `wanted` says.
async fn deliveries(client: &Client, id: TaskId, wanted: impl Fn(&[Delivery]) -> bool) -> Vec<Delivery> {
    until("the deliveries", async || {
        let mut all = client.deliveries(id).await.expect("the task is there");
        all.reverse();
        wanted(&all).then_some(all)
    })
    .await
}

async fn only_delivery(client: &Client, id: TaskId, status: DeliveryStatus) -> Delivery {
    let all = deliveries(client, id, |all| all.len() == 1 && all[0].status == status).await;
    all.into_iter().next().expect("one")
}

/// HMAC-SHA256 as RFC 2104 has it, apart from the code under test.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut block = [0_u8; 64];
    block[..key.len()].copy_from_slice(key);
    let inner = Sha256::new().chain_update(block.map(|byte| byte ^ 0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(block.map(|byte| byte ^ 0x5c)).chain_update(inner).finalize().into()
}

fn verify(hook: &Hook, secret: &WebhookSecret) -> bool {
    let key = STANDARD.decode(secret.reveal().strip_prefix("whsec_").expect("the prefix")).expect("base64");
    let start = format!("{}.{}.", hook.header("webhook-id"), hook.header("webhook-timestamp"));
    let expected = format!("v1,{}", STANDARD.encode(hmac(&key, &[start.as_bytes(), &hook.body].concat())));
    hook.header("webhook-signature").split(' ').any(|signature| signature == expected)
}

async fn the_end_of_a_task_is_told_and_signed(bed: Bed) {
    let receiver = Receiver::start().await;
    let hello = async |_run: Run, name: String| Ok::<_, TaskError>(format!("Hello, {name}!"));
    let worker = Worker::new(&bed.client).handler("hello", hello).start().await.expect("starts");
    let outbox = start(&bed.client, here()).await;
    let task = NewTask::new("hello", &"world").webhook(receiver.url());
    let id = bed.client.submit(task).await.expect("accepted").id;
    let hooks = receiver.got(1).await;
    let hook = &hooks[0];
    assert_eq!(hook.request(), "POST /hook HTTP/1.1");
    assert_eq!(hook.header("content-type"), "application/json");
    assert!(hook.header("webhook-id").starts_with("msg_"));
    let now = jiff::Timestamp::now().as_second();
    let signed_at: i64 = hook.header("webhook-timestamp").parse().expect("seconds");
    assert!((now - 120..=now).contains(&signed_at));
    assert!(verify(hook, &bed.client.webhook_secret().await.expect("a secret")));
    assert!(!verify(hook, &WebhookSecret::generate()));
    let task = bed.ended(id).await;
    let event = bed.event(id, "task.completed").await;
    let expected = json!({"type": "task.completed", "timestamp": event.time, "data": task});
    assert_eq!(hook.json(), expected);
    assert_eq!(hook.json()["data"]["result"], "Hello, world!");
    let delivery = only_delivery(&bed.client, id, DeliveryStatus::Delivered).await;
    assert_eq!((delivery.seq, delivery.event.as_str()), (event.seq, "task.completed"));
    assert_eq!((delivery.http_status, delivery.attempts, delivery.url), (Some(204), 1, receiver.url()));
    assert_eq!(hook.header("webhook-id"), format!("msg_{}", delivery.id.simple()));
    assert_eq!(outbox.counts().delivered, 1);
    outbox.stop().await;
    worker.stop().await;
    assert_eq!(bed.client.outbox_stats().await.expect("the store answers").due, 0);
    assert_eq!(receiver.hooks().len(), 1);
}

async fn a_receiver_that_fails_for_a_while_gets_every_event_in_order(bed: Bed) {
    // The second request and the two after it fail, then another one in the middle.
    let receiver = Receiver::answering(|n| match n {
        1..=3 | 6 => status("500 Internal Server Error", ""),
        _ => status("200 OK", ""),
    })
    .await;
    let work = async |run: Run, _input: u32| {
        for step in ["a", "b", "c"] {
            run.step(step, async || Ok::<_, TaskError>(1)).await?;
        }
        Ok::<_, TaskError>(())
    };
    let worker = Worker::new(&bed.client).handler("work", work).start().await.expect("starts");
    let mut task = NewTask::new("work", &1);
    task.webhook = Some(Webhook::new(receiver.url()).event("*"));
    let id = bed.client.submit(task).await.expect("accepted").id;
    bed.ended(id).await;
    worker.stop().await;
    let outbox = start(&bed.client, here()).await;
    let kinds = bed.kinds(id).await;
    let all = kinds.len();
    for failure in 1..=4 {
        // Nothing is under way while something waits for its next try.
        until("a failure", async || {
            let waits = bed.client.deliveries(id).await.expect("the task is there");
            let waits = waits.iter().any(|delivery| delivery.status == DeliveryStatus::Failed);
            (waits && outbox.counts().failed == failure).then_some(())
        })
        .await;
        bed.client.clock().advance(HOUR);
    }
    deliveries(&bed.client, id, |told| {
        told.len() == all && told.iter().all(|delivery| delivery.status == DeliveryStatus::Delivered)
    })
    .await;
    outbox.stop().await;
    let hooks = receiver.hooks();
    assert_eq!(hooks.len(), all + 4, "each once, and four failures");
    let taken: Vec<String> =
        hooks.iter().enumerate().filter(|(n, _)| !matches!(n, 1..=3 | 6)).map(|(_, hook)| hook.kind()).collect();
    assert_eq!(taken, kinds);
    let ids: Vec<&str> = hooks[1..=4].iter().map(|hook| hook.header("webhook-id")).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "a message keeps its id over all tries: {ids:?}");
    assert_eq!(hooks.iter().map(|hook| hook.header("webhook-id")).collect::<BTreeSet<_>>().len(), all);
    let step = hooks.iter().find(|hook| hook.kind() == "step.completed").expect("a step").json();
    assert_eq!((&step["event"]["step"], &step["data"]["id"]), (&json!("a"), &json!(id)));
}

async fn what_fails_to_the_end_is_dead_and_can_be_sent_again_and_later_events_go_on(bed: Bed) {
    let works = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let working = Arc::clone(&works);
    let receiver = Receiver::answering(move |_| {
        let works = working.load(std::sync::atomic::Ordering::SeqCst);
        status(if works { "200 OK" } else { "503 Service Unavailable" }, "")
    })
    .await;
    let outbox = start(&bed.client, here()).await;
    let both = Webhook::new(receiver.url()).event("task.submitted").event("task.cancelled");
    let id = ended(&bed.client, both).await;
    deliveries(&bed.client, id, |all| all.len() == 1 && all[0].status == DeliveryStatus::Failed).await;
    bed.client.clock().advance(25 * HOUR);
    // The first is given up; the second has its own time and waits for its next try.
    let all = deliveries(&bed.client, id, |all| all.len() == 2).await;
    assert_eq!((all[0].status, all[0].event.as_str()), (DeliveryStatus::Dead, "task.submitted"));
    assert!(all[0].error.as_deref().is_some_and(|error| error.contains("given up")), "{all:?}");
    assert_eq!(bed.client.dead_deliveries(10).await.expect("the store answers").len(), 1);
    assert_eq!(bed.client.outbox_stats().await.expect("the store answers").dead, 1);
    works.store(true, std::sync::atomic::Ordering::SeqCst);
    bed.client.clock().advance(2 * HOUR);
    let all = deliveries(&bed.client, id, |all| all[1].status == DeliveryStatus::Delivered).await;
    assert_eq!(all[1].event, "task.cancelled");
    let before = receiver.hooks().len();
    bed.client.redeliver(id, all[0].id).await.expect("asked for");
    let all = deliveries(&bed.client, id, |all| all[0].status == DeliveryStatus::Delivered).await;
    assert_eq!(all[0].attempts, 1);
    let hooks = receiver.got(before + 1).await;
    assert_eq!(hooks[before].header("webhook-id"), hooks[0].header("webhook-id"), "the same message");
    assert_eq!(hooks[before].kind(), "task.submitted");
    // Also one that was delivered.
    bed.client.redeliver(id, all[1].id).await.expect("asked for");
    assert_eq!(receiver.got(before + 2).await[before + 1].kind(), "task.cancelled");
    let stranger = bed.client.for_tenant("stranger");
    assert!(matches!(stranger.redeliver(id, all[1].id).await, Err(longhaul::Error::NotFound(_))));
    assert!(matches!(stranger.deliveries(id).await, Err(longhaul::Error::NotFound(_))));
    let nothing = bed.client.redeliver(id, id.0).await;
    assert!(matches!(nothing, Err(longhaul::Error::NoDelivery { .. })), "{nothing:?}");
    let counts = outbox.counts();
    assert_eq!((counts.dead, counts.delivered), (1, 3));
    outbox.stop().await;
}

async fn two_outboxes_deliver_everything_once(bed: Bed) {
    let receiver = Receiver::start().await;
    let other = bed.another_client_or_same().await;
    let outboxes = [start(&bed.client, here()).await, start(&other, here()).await];
    let mut ids = BTreeSet::new();
    for _ in 0..30 {
        ids.insert(ended(&bed.client, Webhook::new(receiver.url())).await.to_string());
    }
    receiver.got(30).await;
    for outbox in outboxes {
        outbox.stop().await;
    }
    let hooks = receiver.hooks();
    assert_eq!(hooks.len(), 30);
    let told: BTreeSet<String> =
        hooks.iter().map(|hook| hook.json()["data"]["id"].as_str().expect("an id").to_owned()).collect();
    assert_eq!(told, ids);
}

async fn what_a_killed_outbox_was_at_is_sent_by_another(bed: Bed) {
    // The first request is never answered.
    let receiver = Receiver::with(|n| match n {
        0 => Box::pin(std::future::pending()),
        _ => Box::pin(async { status("200 OK", "") }),
    })
    .await;
    let killed = start(&bed.client, here()).await;
    let id = ended(&bed.client, Webhook::new(receiver.url())).await;
    receiver.got(1).await;
    drop(killed);
    let other = bed.another_client_or_same().await;
    let behind = bed.client.clock().now().duration_since(other.clock().now());
    other.clock().advance(Duration::try_from(behind).unwrap_or_default() + Duration::from_secs(120));
    let outbox = start(&other, here()).await;
    only_delivery(&other, id, DeliveryStatus::Delivered).await;
    let hooks = receiver.hooks();
    assert_eq!(hooks.len(), 2);
    assert_eq!(hooks[0].header("webhook-id"), hooks[1].header("webhook-id"));
    outbox.stop().await;
}

on_every_store!(
    the_end_of_a_task_is_told_and_signed,
    a_receiver_that_fails_for_a_while_gets_every_event_in_order,
    what_fails_to_the_end_is_dead_and_can_be_sent_again_and_later_events_go_on,
    two_outboxes_deliver_everything_once,
    what_a_killed_outbox_was_at_is_sent_by_another,
);

#[tokio::test]
async fn a_slow_receiver_keeps_nobody_else_waiting() {
    let bed = Bed::memory().await;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let slow = Receiver::with(move |_| {
        let gate = Arc::clone(&held);
        Box::pin(async move {
            let _ = gate.acquire().await.map(tokio::sync::SemaphorePermit::forget);
            status("200 OK", "")
        })
    })
    .await;
    let quick = Receiver::start().await;
    let settings = OutboxSettings { in_flight: 4, per_receiver: 2, timeout: 10 * HOUR, ..here() };
    let outbox = start(&bed.client, settings).await;
    for _ in 0..6 {
        ended(&bed.client, Webhook::new(slow.url())).await;
    }
    slow.got(2).await;
    for _ in 0..3 {
        let id = ended(&bed.client, Webhook::new(quick.url())).await;
        only_delivery(&bed.client, id, DeliveryStatus::Delivered).await;
    }
    assert_eq!(slow.hooks().len(), 2, "no more than its share is under way");
    assert_eq!(bed.client.outbox_stats().await.expect("the store answers").due, 6);
    gate.add_permits(100);
    slow.got(6).await;
    outbox.stop().await;
    assert_eq!(bed.client.outbox_stats().await.expect("the store answers").due, 0);
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let bed = Bed::memory().await;
    let inner = Receiver::start().await;
    let to = format!("location: {}\r\n", inner.url());
    for code in ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let to = to.clone();
        let outer = Receiver::answering(move |_| status(code, &to)).await;
        let outbox = start(&bed.client, here()).await;
        let id = ended(&bed.client, Webhook::new(outer.url())).await;
        let delivery = only_delivery(&bed.client, id, DeliveryStatus::Failed).await;
        assert!(delivery.error.as_deref().is_some_and(|error| error.contains("not followed")), "{delivery:?}");
        assert_eq!(delivery.http_status.map(|status| status / 100), Some(3));
        outbox.stop().await;
    }
    assert!(inner.hooks().is_empty());
}

#[tokio::test]
async fn inner_addresses_are_not_called_however_they_are_written() {
    let bed = Bed::memory().await;
    let receiver = Receiver::start().await;
    let outbox = start(&bed.client, OutboxSettings::default()).await;
    // The last one has to be resolved.
    for host in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "0.0.0.0",
        "localhost",
    ] {
        let id = ended(&bed.client, Webhook::new(format!("http://{host}:{}/", receiver.port))).await;
        let delivery = only_delivery(&bed.client, id, DeliveryStatus::Failed).await;
        let error = delivery.error.unwrap_or_default();
        assert!(error.contains("not allowed"), "{host}: {error}");
    }
    outbox.stop().await;
    assert!(receiver.hooks().is_empty());
    let allow = vec!["127.0.0.0/8".parse().expect("a range")];
    let outbox = start(&bed.client, OutboxSettings { allow, ..OutboxSettings::default() }).await;
    for host in ["127.0.0.1", "localhost"] {
        let id = ended(&bed.client, Webhook::new(format!("http://{host}:{}/", receiver.port))).await;
        only_delivery(&bed.client, id, DeliveryStatus::Delivered).await;
    }
    outbox.stop().await;
}

#[tokio::test]
async fn while_secrets_change_each_of_them_signs() {
    let bed = Bed::memory().await;
    let receiver = Receiver::start().await;
    let [new, old] = [WebhookSecret::generate(), WebhookSecret::generate()];
    let outbox = start(&bed.client, OutboxSettings { secrets: vec![new.clone(), old.clone()], ..here() }).await;
    ended(&bed.client, Webhook::new(receiver.url())).await;
    let hook = receiver.got(1).await.remove(0);
    assert_eq!(hook.header("webhook-signature").split(' ').count(), 2);
    assert!(verify(&hook, &new) && verify(&hook, &old));
    assert!(!verify(&hook, &bed.client.webhook_secret().await.expect("a secret")));
    outbox.stop().await;
}

#[tokio::test]
async fn a_receiver_that_is_gone_is_not_asked_again() {
    let bed = Bed::memory().await;
    let receiver = Receiver::answering(|_| status("410 Gone", "")).await;
    let outbox = start(&bed.client, here()).await;
    let id = ended(&bed.client, Webhook::new(receiver.url()).event("*")).await;
    let delivery = only_delivery(&bed.client, id, DeliveryStatus::Dead).await;
    assert_eq!((delivery.http_status, delivery.attempts), (Some(410), 1));
    assert_eq!(bed.client.outbox_stats().await.expect("the store answers").due, 0);
    outbox.stop().await;
    assert_eq!(receiver.hooks().len(), 1, "of two events");
}

#[tokio::test]
async fn a_receiver_that_asks_for_time_gets_it() {
    let bed = Bed::memory().await;
    let receiver = Receiver::answering(|_| status("429 Too Many Requests", "retry-after: 1000\r\n")).await;
    let outbox = start(&bed.client, here()).await;
    let id = ended(&bed.client, Webhook::new(receiver.url())).await;
    let delivery = only_delivery(&bed.client, id, DeliveryStatus::Failed).await;
    let pause = delivery.next_at.expect("tried again").duration_since(delivery.updated_at);
    assert_eq!(pause.as_secs(), 1_000);
    outbox.stop().await;
}

#[tokio::test]
async fn of_a_long_refusal_only_the_beginning_is_kept() {
    let bed = Bed::memory().await;
    let receiver = Receiver::answering(|_| {
        let body = "no\u{1b}[31m ".repeat(200_000);
        format!("HTTP/1.1 500 Oops\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    })
    .await;
    let outbox = start(&bed.client, here()).await;
    let id = ended(&bed.client, Webhook::new(receiver.url())).await;
    let delivery = only_delivery(&bed.client, id, DeliveryStatus::Failed).await;
    let error = delivery.error.expect("why");
    assert!(error.contains("500") && error.contains("no"), "{error}");
    assert!(error.len() < 500 && !error.contains('\u{1b}'), "{error}");
    outbox.stop().await;
}

#[tokio::test]
async fn endpoints_of_a_tenant_hear_of_its_tasks_and_of_no_others() {
    let bed = Bed::memory().await;
    let (chat, audit) = (Receiver::start().await, Receiver::start().await);
    let outbox = start(&bed.client, here()).await;
    let (one, other) = (bed.client.for_tenant("one"), bed.client.for_tenant("other"));
    one.save_endpoint("chat", Webhook::new(chat.url())).await.expect("saved");
    one.save_endpoint("audit", Webhook::new(audit.url()).event("task.*")).await.expect("saved");
    assert_eq!(one.endpoints().await.expect("the store answers").len(), 2);
    assert!(other.endpoints().await.expect("the store answers").is_empty());
    assert!(matches!(other.remove_endpoint("chat").await, Err(longhaul::Error::NoEndpoint(_))));
    one.announce(&["h"]).await.expect("announced");
    for client in [&other, &one] {
        let id = client.submit(NewTask::new("h", &1)).await.expect("accepted").id;
        client.cancel(id, None).await.expect("cancelled");
    }
    let kinds = |hooks: Vec<Hook>| hooks.iter().map(Hook::kind).collect::<Vec<_>>();
    assert_eq!(kinds(chat.got(1).await), ["task.cancelled"]);
    assert_eq!(kinds(audit.got(2).await), ["task.submitted", "task.cancelled"]);
    until("nothing is left", async || {
        (bed.client.outbox_stats().await.expect("the store answers").due == 0).then_some(())
    })
    .await;
    outbox.stop().await;
    assert_eq!((chat.hooks().len(), audit.hooks().len()), (1, 2));
}

#[tokio::test]
async fn an_outbox_that_stops_ends_what_it_has_begun() {
    let bed = Bed::memory().await;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let receiver = Receiver::with(move |_| {
        let gate = Arc::clone(&held);
        Box::pin(async move {
            let _ = gate.acquire().await.map(tokio::sync::SemaphorePermit::forget);
            status("200 OK", "")
        })
    })
    .await;
    let outbox = start(&bed.client, OutboxSettings { timeout: 10 * HOUR, ..here() }).await;
    let id = ended(&bed.client, Webhook::new(receiver.url()).event("*")).await;
    receiver.got(1).await;
    let stopping = tokio::spawn(outbox.stop());
    gate.add_permits(100);
    stopping.await.expect("it stops");
    let told = bed.client.deliveries(id).await.expect("the task is there");
    assert!(!told.is_empty() && told.iter().all(|delivery| delivery.status == DeliveryStatus::Delivered));
    // What it had not begun is due at once for the next.
    let outbox = start(&bed.client, here()).await;
    deliveries(&bed.client, id, |all| all.len() == 2).await;
    outbox.stop().await;
    assert_eq!(receiver.hooks().len(), 2);
}
