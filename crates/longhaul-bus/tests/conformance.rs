//! What every bus must do, said once and run on each of them: the one within the process, NATS, Redis, RabbitMQ and
//! (with the feature `kafka`) Kafka. What happens when a broker is killed is in `restarts.rs`.

mod common;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use common::{
    ACK_WAIT, Bed, PATIENCE, assert_in_order, next, nothing, number, numbered, publish, subscription, take,
};
use longhaul_bus::{BusError, Message, Outgoing, Subscription, To};

on_every_bus! {
    a_message_arrives_as_it_was_sent,
    messages_of_one_key_keep_their_order,
    what_was_acknowledged_is_not_given_again,
    what_a_consumer_that_ended_had_taken_is_given_to_others,
    what_was_rejected_is_a_dead_letter_with_its_reason,
    what_was_put_off_comes_again_and_holds_up_nothing,
    what_nobody_settled_comes_again,
    consumers_of_one_group_share_the_work,
    every_group_of_a_log_sees_everything,
    no_more_is_taken_than_may_be_unsettled,
    waiting_can_be_broken_off_without_a_loss,
    broadcasts_reach_everyone_who_listens,
    a_large_message_arrives,
}

async fn a_message_arrives_as_it_was_sent(bed: Bed) {
    let sent = Message {
        id: Some("id 1".to_owned()),
        key: Some("key".to_owned()),
        content_type: Some("application/json".to_owned()),
        reply_to: Some("answers.here".to_owned()),
        correlation_id: Some("c-1".to_owned()),
        headers: vec![("ce-type".to_owned(), "a.b".to_owned()), ("x-umlaut".to_owned(), "äöü".to_owned())],
        body: vec![0, 159, 146, 150, 10, 13].into(),
    };
    let topic = bed.queue();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    let to = To::Topic { topic, subject: "tenant.task.completed".to_owned() };
    publish(&*bed.bus, &[Outgoing { to, message: sent.clone() }]).await;
    let delivery = next(&mut *consumer).await;
    let mut came = delivery.message.clone();
    came.headers.sort();
    assert_eq!(came, sent);
    if bed.name != "RABBITMQ" {
        assert!(delivery.position.is_some(), "{} knows where it keeps a message", bed.name);
    }
    delivery.ack().await.expect("an acknowledgement");
}

async fn messages_of_one_key_keep_their_order(bed: Bed) {
    const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];
    const EACH: usize = 40;
    let topic = bed.log();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    for turn in 0..EACH {
        let wave: Vec<Outgoing> = KEYS.iter().map(|key| numbered(&topic, key, turn)).collect();
        publish(&*bed.bus, &wave).await;
    }
    let taken = take(&mut *consumer, KEYS.len() * EACH).await;
    assert_in_order(&taken, EACH);
}

async fn what_was_acknowledged_is_not_given_again(bed: Bed) {
    let topic = bed.queue();
    let what = subscription(topic.clone(), "all");
    let mut first = bed.bus.consume(&what).await.expect("a consumer");
    publish(&*bed.bus, &[numbered(&topic, "a", 0), numbered(&topic, "a", 1)]).await;
    take(&mut *first, 2).await;
    // Kafka is told how far a group came from time to time, and when a consumer leaves.
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(first);
    let other = bed.another().await;
    let mut second = other.consume(&what).await.expect("a consumer");
    publish(&*bed.bus, &[numbered(&topic, "a", 2)]).await;
    assert_eq!(number(&next(&mut *second).await.message), ("a".to_owned(), 2));
}

async fn what_a_consumer_that_ended_had_taken_is_given_to_others(bed: Bed) {
    let topic = bed.queue();
    let what = subscription(topic.clone(), "all");
    let bus = bed.another().await;
    let mut first = bus.consume(&what).await.expect("a consumer");
    publish(&*bed.bus, &(0..6).map(|n| numbered(&topic, "a", n)).collect::<Vec<_>>()).await;
    let mut unsettled = Vec::new();
    for _ in 0..3 {
        unsettled.push(next(&mut *first).await);
    }
    // It dies with what it has: nothing more is said to the broker.
    drop(first);
    drop(unsettled);
    drop(bus);
    let mut second = bed.bus.consume(&what).await.expect("a consumer");
    let taken = take(&mut *second, 6).await;
    let numbers: HashSet<usize> = taken.iter().map(|message| number(message).1).collect();
    assert_eq!(numbers, (0..6).collect());
}

async fn what_was_rejected_is_a_dead_letter_with_its_reason(bed: Bed) {
    let topic = bed.queue();
    let what = subscription(topic.clone(), "all");
    let mut consumer = bed.bus.consume(&what).await.expect("a consumer");
    publish(&*bed.bus, &[numbered(&topic, "a", 0)]).await;
    next(&mut *consumer).await.reject("it is no task: 'handler' is missing").await.expect("a rejection");
    let mut dead = bed.bus.consume(&subscription(topic.dead_letters(), "all")).await.expect("a consumer");
    let letter = next(&mut *dead).await;
    assert_eq!(number(&letter.message), ("a".to_owned(), 0));
    assert_eq!(letter.message.id.as_deref(), Some("a/0"));
    assert_eq!(letter.message.header("longhaul-reason"), Some("it is no task: 'handler' is missing"));
    assert_eq!(letter.message.header("longhaul-topic"), Some(&*topic.name));
    letter.ack().await.expect("an acknowledgement");
    nothing(&mut *consumer, ACK_WAIT + Duration::from_secs(1)).await;
}

async fn what_was_put_off_comes_again_and_holds_up_nothing(bed: Bed) {
    let topic = bed.queue();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    publish(&*bed.bus, &[numbered(&topic, "a", 0)]).await;
    let put_off = Instant::now();
    next(&mut *consumer).await.redeliver(Duration::from_secs(1)).await.expect("it can be put off");
    publish(&*bed.bus, &[numbered(&topic, "a", 1)]).await;
    let between = next(&mut *consumer).await;
    assert_eq!(number(&between.message).1, 1, "what was put off is not waited for");
    between.ack().await.expect("an acknowledgement");
    let again = next(&mut *consumer).await;
    assert_eq!(number(&again.message).1, 0);
    assert!(put_off.elapsed() >= Duration::from_millis(900), "it came after {:?}", put_off.elapsed());
    again.ack().await.expect("an acknowledgement");
    nothing(&mut *consumer, ACK_WAIT + Duration::from_secs(1)).await;
}

async fn what_nobody_settled_comes_again(bed: Bed) {
    let topic = bed.queue();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    publish(&*bed.bus, &[numbered(&topic, "a", 0)]).await;
    drop(next(&mut *consumer).await);
    let again = next(&mut *consumer).await;
    assert_eq!(number(&again.message).1, 0);
    again.ack().await.expect("an acknowledgement");
}

async fn consumers_of_one_group_share_the_work(bed: Bed) {
    let topic = bed.queue();
    // Few at a time, so that nobody can take everything.
    let what = Subscription { in_flight: 2, ack_wait: PATIENCE, ..subscription(topic.clone(), "all") };
    let (sender, mut taken) = tokio::sync::mpsc::channel(1_000);
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..3 {
        let (bus, what, sender) = (bed.another().await, what.clone(), sender.clone());
        workers.spawn(async move {
            let mut consumer = bus.consume(&what).await.expect("a consumer");
            loop {
                let delivery = next(&mut *consumer).await;
                let number = number(&delivery.message);
                delivery.ack().await.expect("an acknowledgement");
                sender.send((worker, number)).await.expect("the test goes on");
            }
        });
    }
    let (mut published, mut seen, mut busy) = (0, HashSet::new(), HashSet::new());
    let done = tokio::time::timeout(PATIENCE, async {
        while busy.len() < 3 || seen.len() < published {
            if busy.len() < 3 && seen.len() == published {
                let wave: Vec<Outgoing> =
                    (0..30).map(|n| numbered(&topic, &format!("key{}", n % 10), published + n)).collect();
                publish(&*bed.bus, &wave).await;
                published += wave.len();
            }
            let (worker, number) = taken.recv().await.expect("the workers go on");
            busy.insert(worker);
            assert!(seen.insert(number.clone()), "{number:?} was given twice");
        }
    });
    done.await.expect("all three get something to do");
    workers.abort_all();
}

async fn every_group_of_a_log_sees_everything(bed: Bed) {
    let topic = bed.log();
    let mut one = bed.bus.consume(&subscription(topic.clone(), "one")).await.expect("a consumer");
    let mut two = bed.bus.consume(&subscription(topic.clone(), "two")).await.expect("a consumer");
    publish(&*bed.bus, &(0..10).map(|n| numbered(&topic, "a", n)).collect::<Vec<_>>()).await;
    for consumer in [&mut one, &mut two] {
        let numbers: HashSet<usize> = take(&mut **consumer, 10).await.iter().map(|m| number(m).1).collect();
        assert_eq!(numbers, (0..10).collect());
    }
}

async fn no_more_is_taken_than_may_be_unsettled(bed: Bed) {
    const MOST: usize = 8;
    let topic = bed.queue();
    let what = Subscription { in_flight: MOST, ack_wait: PATIENCE, ..subscription(topic.clone(), "all") };
    let mut consumer = bed.bus.consume(&what).await.expect("a consumer");
    publish(&*bed.bus, &(0..50).map(|n| numbered(&topic, "a", n)).collect::<Vec<_>>()).await;
    let mut unsettled = vec![next(&mut *consumer).await];
    while let Ok(delivery) = tokio::time::timeout(Duration::from_secs(1), consumer.next()).await {
        unsettled.push(delivery.expect("a message"));
    }
    assert!((1..=MOST).contains(&unsettled.len()), "{} were taken", unsettled.len());
    let mut numbers: HashSet<usize> = HashSet::new();
    for delivery in unsettled {
        numbers.insert(number(&delivery.message).1);
        delivery.ack().await.expect("an acknowledgement");
    }
    let left = 50 - numbers.len();
    numbers.extend(take(&mut *consumer, left).await.iter().map(|message| number(message).1));
    assert_eq!(numbers, (0..50).collect());
}

async fn waiting_can_be_broken_off_without_a_loss(bed: Bed) {
    let topic = bed.queue();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    let messages: Vec<Outgoing> = (0..20).map(|n| numbered(&topic, "a", n)).collect();
    let (bus, sent) = (bed.another().await, messages.clone());
    let publishing = tokio::spawn(async move {
        for message in sent {
            publish(&*bus, &[message]).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut numbers = HashSet::new();
    let begun = Instant::now();
    while numbers.len() < messages.len() {
        assert!(begun.elapsed() < PATIENCE, "only {numbers:?} came");
        if let Ok(Ok(delivery)) = tokio::time::timeout(Duration::from_millis(7), consumer.next()).await {
            numbers.insert(number(&delivery.message).1);
            delivery.ack().await.expect("an acknowledgement");
        }
    }
    publishing.await.expect("all were published");
}

async fn broadcasts_reach_everyone_who_listens(bed: Bed) {
    let channel = bed.channel();
    let other = bed.another().await;
    let mut here = bed.bus.listen(&channel).await.expect("a listener");
    let mut there = other.listen(&channel).await.expect("a listener");
    bed.bus.broadcast(&channel, "look".into()).await.expect("a broadcast");
    for listener in [&mut here, &mut there] {
        let heard = tokio::time::timeout(PATIENCE, listener.next()).await.expect("it is heard");
        assert_eq!(heard.expect("a broadcast"), "look");
    }
}

async fn a_large_message_arrives(bed: Bed) {
    let topic = bed.queue();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    let size = bed.bus.max_bytes().min(900_000);
    assert!(size > 500_000, "{} takes only {size} bytes", bed.name);
    let message = Message { body: vec![b'x'; size].into(), id: Some("large".to_owned()), ..Message::default() };
    publish(&*bed.bus, &[Outgoing { to: To::Topic { topic, subject: String::new() }, message }]).await;
    assert_eq!(next(&mut *consumer).await.message.body.len(), size);
}

/// The same URL with another password.
fn with_password(url: &str, password: &str) -> String {
    let (login, rest) = url.split_once('@').expect("the test servers ask for a password");
    let (user, _) = login.rsplit_once(':').expect("a user and a password");
    format!("{user}:{password}@{rest}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_said_and_not_shown() {
    for name in brokers() {
        let Some(url) = common::variable(name, "") else { continue };
        let error = longhaul_bus::connect(&with_password(&url, "hunter2")).await.err().expect("it is refused");
        assert!(matches!(error, BusError::Denied { .. }), "{name}: {error:?}");
        let text = error.to_string();
        assert!(text.contains("check the user and the password"), "{name}: {text}");
        assert!(!text.contains("hunter2"), "{name}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_not_there_is_said() {
    for scheme in [
        "nats",
        "redis",
        "amqp",
        #[cfg(feature = "kafka")]
        "kafka",
    ] {
        let error =
            longhaul_bus::connect(&format!("{scheme}://127.0.0.1:1")).await.err().expect("nobody is there");
        assert!(matches!(error, BusError::Unreachable { .. }), "{scheme}: {error:?}");
        let text = error.to_string();
        assert!(text.contains("127.0.0.1:1") && text.contains("check the URL"), "{scheme}: {text}");
    }
    let error = longhaul_bus::connect("http://127.0.0.1").await.err().expect("no bus");
    assert!(error.to_string().contains("nats://"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_used_and_the_authority_is_checked() {
    for name in brokers() {
        let Some(url) = common::variable(name, "_TLS") else { continue };
        let bus = longhaul_bus::connect(&url).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let topic =
            longhaul_bus::Topic::queue(&format!("test.tls{}", uuid::Uuid::now_v7().simple())).expect("a name");
        let mut consumer = bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
        publish(&*bus, &[numbered(&topic, "a", 0)]).await;
        take(&mut *consumer, 1).await;
        // Without the authority that signed it, the broker's certificate is none.
        let other = url.replace("?ca=", "?keep=").replace("&ca=", "&keep=");
        let other = other.split_once("keep=").map(|(before, after)| {
            format!("{before}keep=1d{}", after.find('&').map_or("", |more| &after[more..]))
        });
        let error = longhaul_bus::connect(&other.expect("it has an authority")).await.err();
        assert!(matches!(error, Some(BusError::Unreachable { .. })), "{name}: {error:?}");
    }
}

fn brokers() -> Vec<&'static str> {
    vec![
        "NATS",
        "REDIS",
        "RABBITMQ",
        #[cfg(feature = "kafka")]
        "KAFKA",
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_drops_what_it_had_under_the_same_id() {
    let Some(bed) = Bed::nats().await else { return };
    let topic = bed.queue();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    for _ in 0..3 {
        publish(&*bed.bus, &[numbered(&topic, "a", 0)]).await;
    }
    publish(&*bed.bus, &[numbered(&topic, "a", 1)]).await;
    for expected in [0, 1] {
        let delivery = next(&mut *consumer).await;
        assert_eq!(number(&delivery.message).1, expected);
        delivery.ack().await.expect("an acknowledgement");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_reaches_the_inbox_of_a_client_of_nats_that_waits() {
    let Some(bed) = Bed::nats().await else { return };
    let inbox = format!("_INBOX.{}", uuid::Uuid::now_v7().simple());
    let mut waiting = bed.bus.listen(&inbox).await.expect("a listener");
    let message = Message { body: "done".into(), ..Message::default() };
    publish(&*bed.bus, &[Outgoing { to: To::Address(inbox), message }]).await;
    let heard = tokio::time::timeout(PATIENCE, waiting.next()).await.expect("it comes");
    assert_eq!(heard.expect("an answer"), "done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_is_not_there_is_an_error_on_rabbitmq() {
    let Some(bed) = Bed::rabbitmq().await else { return };
    let to = To::Address("nobody.declared.this".to_owned());
    let error = bed.bus.publish(&[Outgoing { to, message: Message::default() }]).await.expect_err("there is none");
    assert!(error.to_string().contains("no such queue"), "{error}");
}
