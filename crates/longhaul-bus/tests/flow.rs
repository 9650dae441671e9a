//! The engine on the bus, every bus: events out, tasks in, results back. What happens when a broker is killed meanwhile
//! is in `slow_broker_kills.rs`.

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use common::engine::{Heard, all_tasks, asked, cloud_event, eventually, store, worker};
use common::{Bed, PATIENCE, next, publish, subscription};
use longhaul::{Client, NewTask, Outbox, OutboxSettings, QueueSettings, Run, Settings, TaskError, Worker};
use longhaul_bus::{
    BusReplies, Hints, Intake, IntakeSettings, Message, Mode, Outgoing, Publisher, PublisherSettings, To, Topic,
};
use serde_json::{Value, json};
use tokio::sync::Notify;

on_every_bus! {
    every_event_of_every_tenant_leaves_in_order,
    only_what_is_wanted_leaves_also_in_binary_form,
    a_message_is_one_task_however_often_it_comes,
    a_bad_message_is_a_dead_letter_that_says_why,
    a_full_queue_makes_messages_wait,
    a_result_goes_where_the_message_said,
    a_reply_to_a_place_that_is_not_allowed_is_dead,
    text_of_a_run_is_heard_in_another_process,
}

async fn every_event_of_every_tenant_leaves_in_order(bed: Bed) {
    const TASKS: u64 = 40;
    let store = store().await;
    let other = store.client.for_tenant("acme.com");
    let topic = bed.log();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    let settings = PublisherSettings { batch: 50, ..PublisherSettings::new(topic) };
    let publisher = Publisher::start(&store.client, Arc::clone(&bed.bus), settings).await.expect("a publisher");
    let worker = worker(&store.client).await;
    for number in 0..TASKS {
        let client = if number % 4 == 0 { &other } else { &store.client };
        client.submit(NewTask::new("count", &(number % 5))).await.expect("it is accepted");
    }
    eventually("all tasks end", PATIENCE, async || {
        let tasks = [all_tasks(&store.client).await, all_tasks(&other).await].concat();
        tasks.len() as u64 == TASKS && tasks.iter().all(|task| task.state.is_final())
    })
    .await;
    let tasks = [all_tasks(&store.client).await, all_tasks(&other).await].concat();
    let expected: u64 = tasks.iter().map(|task| task.last_seq).sum();
    let mut heard = Heard::default();
    while (heard.count() as u64) < expected {
        let delivery = next(&mut *consumer).await;
        heard.hear(&delivery);
        delivery.ack().await.expect("an acknowledgement");
    }
    heard.assert_complete(&tasks);
    for task in &tasks {
        let events = &heard.by_task[&task.id.to_string()];
        let last = &events.last_key_value().expect("it has ended").1.event;
        assert_eq!(last["type"], "dev.longhaul.task.completed");
        assert_eq!(last["source"], format!("/longhaul/{}", task.tenant));
        assert_eq!(
            last["data"]["result"],
            serde_json::from_str::<Value>(task.result.as_ref().expect("a result").get()).expect("JSON")
        );
        assert!(
            events.values().any(|one| one.event["type"] == "dev.longhaul.counted.all"),
            "what handlers publish"
        );
    }
    eventually("the publisher has told all", PATIENCE, async || publisher.stats().handled >= expected).await;
    publisher.stop().await;
    worker.stop().await;
}

async fn only_what_is_wanted_leaves_also_in_binary_form(bed: Bed) {
    let store = store().await;
    let topic = bed.log();
    let mut consumer = bed.bus.consume(&subscription(topic.clone(), "all")).await.expect("a consumer");
    let settings = PublisherSettings {
        types: vec!["task.completed".to_owned(), "counted.*".to_owned()],
        mode: Mode::Binary,
        ..PublisherSettings::new(topic)
    };
    let publisher = Publisher::start(&store.client, Arc::clone(&bed.bus), settings).await.expect("a publisher");
    let worker = worker(&store.client).await;
    let id = store.client.submit(NewTask::new("count", &3)).await.expect("it is accepted").id;
    let prefix = bed.bus.event_prefix();
    for (kind, data) in [("counted.all", json!({"steps": 3})), ("task.completed", json!({"result": 3}))] {
        let delivery = next(&mut *consumer).await;
        let header = |name: &str| delivery.message.header(&format!("{prefix}{name}")).map(str::to_owned);
        assert_eq!(header("type"), Some(format!("dev.longhaul.{kind}")));
        assert_eq!(header("subject"), Some(id.to_string()));
        assert_eq!(header("source").as_deref(), Some("/longhaul/default"));
        assert_eq!(header("id"), delivery.message.id.clone());
        let body: Value = serde_json::from_slice(&delivery.message.body).expect("JSON");
        assert_eq!(body, data);
        delivery.ack().await.expect("an acknowledgement");
    }
    publisher.stop().await;
    worker.stop().await;
}

async fn a_message_is_one_task_however_often_it_comes(bed: Bed) {
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    let intake = Intake::start(&store.client, Arc::clone(&bed.bus), IntakeSettings::new(topic.clone()));
    let intake = intake.await.expect("an intake");
    let task = json!({"handler": "count", "input": 2, "tags": {"from": "bus"}});
    for _ in 0..3 {
        // On NATS the broker itself drops these; the others give them.
        publish(&*bed.bus, &[asked(&topic, "order 1", &task)]).await;
    }
    let event = json!({"specversion": "1.0", "id": "1", "source": "/shop", "type": "order", "data": task});
    let mut event = asked(&topic, "x", &event);
    for id in ["x", "y"] {
        // Another message, the same event.
        event.message.id = Some(id.to_owned());
        publish(&*bed.bus, &[event.clone()]).await;
    }
    eventually("two tasks, and what is known", PATIENCE, async || {
        let counts = intake.counts();
        counts.new == 2 && counts.known >= 1
    })
    .await;
    let tasks = all_tasks(&store.client).await;
    let keys: HashSet<String> = tasks.iter().map(|task| task.tags["from"].clone()).collect();
    assert_eq!((tasks.len(), keys.len()), (2, 1));
    // The message's id is the key: by HTTP it would be the same task.
    let same = NewTask::new("count", &2).key("order 1").tag("from", "bus");
    assert!(!store.client.submit(same).await.expect("it is accepted").new);
    intake.stop().await;
    worker.stop().await;
}

async fn a_bad_message_is_a_dead_letter_that_says_why(bed: Bed) {
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    let intake = Intake::start(&store.client, Arc::clone(&bed.bus), IntakeSettings::new(topic.clone()));
    let intake = intake.await.expect("an intake");
    let bad = [
        ("not JSON", "cannot be read"),
        (r#"{"handler": "count", "handler": "x"}"#, "is there twice"),
        (r#"{"handler": "count", "priority": 99}"#, "priority"),
        (r#"{"handler": "count", "inptu": 1}"#, "inptu"),
        (r#"{"handler": "nobody"}"#, "no worker has registered"),
        (r#"{"specversion": "1.0", "id": "1", "source": "/s"}"#, "no 'data'"),
    ];
    let messages = bad.iter().enumerate().map(|(number, (body, _))| {
        let mut message = asked(&topic, &format!("bad {number}"), &Value::Null);
        message.message.body = (*body).to_owned().into();
        message
    });
    publish(&*bed.bus, &messages.collect::<Vec<_>>()).await;
    publish(&*bed.bus, &[asked(&topic, "good", &json!({"handler": "count", "input": 1}))]).await;
    let mut dead = bed.bus.consume(&subscription(topic.dead_letters(), "all")).await.expect("a consumer");
    let mut left: Vec<_> = bad.to_vec();
    while !left.is_empty() {
        let letter = next(&mut *dead).await;
        let body = std::str::from_utf8(&letter.message.body).expect("text");
        let reason = letter.message.header("longhaul-reason").expect("a reason");
        if let Some(place) = left.iter().position(|(bad, _)| *bad == body) {
            let (_, why) = left.remove(place);
            assert!(reason.contains(why), "{body}: {reason}");
        }
        letter.ack().await.expect("an acknowledgement");
    }
    eventually("the good one is a task, the others are not", PATIENCE, async || {
        let counts = intake.counts();
        counts.new == 1 && counts.rejected >= bad.len() as u64
    })
    .await;
    assert_eq!(all_tasks(&store.client).await.len(), 1);
    intake.stop().await;
    worker.stop().await;
}

async fn a_full_queue_makes_messages_wait(bed: Bed) {
    const TASKS: u64 = 30;
    let store = store().await;
    store.client.announce(&["count"]).await.expect("the handler is known");
    let small = QueueSettings { max_pending: 5, ..QueueSettings::default() };
    let settings = Settings { queues: [("default".to_owned(), small)].into(), ..Settings::default() };
    store.client.configure(&settings).await.expect("the queue is set");
    let topic = bed.queue();
    let intake = Intake::start(&store.client, Arc::clone(&bed.bus), IntakeSettings::new(topic.clone()));
    let intake = intake.await.expect("an intake");
    let messages: Vec<Outgoing> = (0..TASKS)
        .map(|number| asked(&topic, &format!("m{number}"), &json!({"handler": "count", "input": 0})))
        .collect();
    publish(&*bed.bus, &messages).await;
    eventually("the queue is full", PATIENCE, async || {
        let counts = intake.counts();
        counts.new == 5 && counts.put_off >= 1
    })
    .await;
    let worker = worker(&store.client).await;
    eventually("every message becomes a task", PATIENCE * 2, async || intake.counts().new == TASKS).await;
    assert_eq!(intake.counts().rejected, 0);
    assert_eq!(all_tasks(&store.client).await.len() as u64, TASKS);
    intake.stop().await;
    worker.stop().await;
}

async fn a_result_goes_where_the_message_said(bed: Bed) {
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    let intake = Intake::start(&store.client, Arc::clone(&bed.bus), IntakeSettings::new(topic.clone()));
    let intake = intake.await.expect("an intake");
    let answers = Topic::queue(&topic.name.replace("test.", "longhaul.replies.")).expect("a name");
    let mut answered = bed.bus.consume(&subscription(answers.clone(), "me")).await.expect("a consumer");
    let replies = Arc::new(BusReplies::new(Arc::clone(&bed.bus)));
    let outbox = OutboxSettings { replies: Some(replies), ..OutboxSettings::default() };
    let outbox = Outbox::start(&store.client, outbox).await.expect("an outbox");
    let mut ask = asked(&topic, "ask", &json!({"handler": "count", "input": 4}));
    ask.message.reply_to = Some(answers.name.to_string());
    ask.message.correlation_id = Some("my 17".to_owned());
    publish(&*bed.bus, &[ask]).await;
    let answer = next(&mut *answered).await;
    assert_eq!(answer.message.correlation_id.as_deref(), Some("my 17"));
    let event = cloud_event(&answer.message);
    assert_eq!(event["type"], "dev.longhaul.task.completed");
    assert_eq!((&event["data"]["result"], &event["data"]["state"]), (&json!(4), &json!("completed")));
    answer.ack().await.expect("an acknowledgement");
    outbox.stop().await;
    intake.stop().await;
    worker.stop().await;
}

async fn a_reply_to_a_place_that_is_not_allowed_is_dead(bed: Bed) {
    let store = store().await;
    let worker = worker(&store.client).await;
    let replies = Arc::new(BusReplies::new(Arc::clone(&bed.bus)));
    let outbox = OutboxSettings { replies: Some(replies), ..OutboxSettings::default() };
    let outbox = Outbox::start(&store.client, outbox).await.expect("an outbox");
    let forbidden = bed.queue();
    let task = NewTask::new("count", &1).reply(longhaul::ReplyTo::new(&*forbidden.name));
    let id = store.client.submit(task).await.expect("it is accepted").id;
    store.client.wait(id, PATIENCE).await.expect("it ends");
    eventually("the reply is dead", PATIENCE, async || outbox.counts().dead == 1).await;
    // Nothing went there.
    let mut consumer = bed.bus.consume(&subscription(forbidden.clone(), "all")).await.expect("a consumer");
    common::nothing(&mut *consumer, Duration::from_millis(500)).await;
    outbox.stop().await;
    worker.stop().await;
}

async fn text_of_a_run_is_heard_in_another_process(bed: Bed) {
    let store = store().await;
    // Another process on the same store; only the bus carries text between the two.
    let there = Client::open(&store.url).await.expect("the same store");
    let here = &store.client;
    let channel = bed.channel();
    let _hints = (
        Hints::start(here.relay(), Arc::clone(&bed.bus), &channel).await.expect("hints are carried"),
        Hints::start(there.relay(), bed.another().await, &channel).await.expect("hints are carried"),
    );
    let heard = Arc::new(Notify::new());
    let stop = Arc::clone(&heard);
    let talk = move |run: Run, (): ()| {
        let stop = Arc::clone(&stop);
        async move {
            run.step_with("talk", |context| {
                let (run, stop) = (run.clone(), Arc::clone(&stop));
                async move {
                    let mut after = 0;
                    // Until someone hears it, as a model that goes on and on.
                    while tokio::time::timeout(Duration::from_millis(20), stop.notified()).await.is_err() {
                        run.live(&context, 1, after, "word ");
                        after += 5;
                    }
                    Ok::<_, TaskError>(after)
                }
            })
            .await
        }
    };
    let worker = Worker::new(here).handler("talk", talk).start().await.expect("a worker starts");
    let id = here.submit(NewTask::new("talk", &())).await.expect("it is accepted").id;
    let text =
        tokio::time::timeout(PATIENCE, there.live(id).next()).await.expect("in time").expect("text is heard");
    assert!(text.text.contains("word"), "{text:?}");
    heard.notify_one();
    there.wait(id, PATIENCE).await.expect("it ends");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_rabbitmq_without_an_id_is_refused() {
    let Some(bed) = Bed::rabbitmq().await else { return };
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    let intake = Intake::start(&store.client, Arc::clone(&bed.bus), IntakeSettings::new(topic.clone()));
    let intake = intake.await.expect("an intake");
    let message = Message { body: r#"{"handler": "count", "input": 1}"#.into(), ..Message::default() };
    let to = To::Topic { topic: topic.clone(), subject: String::new() };
    publish(&*bed.bus, &[Outgoing { to, message }]).await;
    let mut dead = bed.bus.consume(&subscription(topic.dead_letters(), "all")).await.expect("a consumer");
    let letter = next(&mut *dead).await;
    assert!(letter.message.header("longhaul-reason").is_some_and(|why| why.contains("message_id")));
    intake.stop().await;
    worker.stop().await;
}

/// A message without an id asks for a task; gives how many new tasks an intake has made when it is settled.
async fn asked_without_an_id(bed: &Bed, client: &Client, topic: &Topic) -> u64 {
    // As another process: nothing is remembered of the stream.
    let bus = bed.another().await;
    let intake = Intake::start(client, Arc::clone(&bus), IntakeSettings::new(topic.clone()));
    let intake = intake.await.expect("an intake");
    let mut message = asked(topic, "", &json!({"handler": "count", "input": 1}));
    message.message.id = None;
    publish(&*bus, &[message]).await;
    eventually("the message is settled", PATIENCE, async || {
        let counts = intake.counts();
        counts.new + counts.known + counts.rejected > 0
    })
    .await;
    let counts = intake.counts();
    assert_eq!(counts.rejected, 0);
    intake.stop().await;
    counts.new
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_in_a_stream_of_nats_that_was_made_again_is_another_task() {
    let Some(bed) = Bed::nats().await else { return };
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    assert_eq!(asked_without_an_id(&bed, &store.client, &topic).await, 1);
    let (login, server) = bed.url.trim_start_matches("nats://").split_once('@').expect("a user and a password");
    let (user, password) = login.split_once(':').expect("a user and a password");
    let options = async_nats::ConnectOptions::with_user_and_password(user.to_owned(), password.to_owned());
    let jetstream = async_nats::jetstream::new(options.connect(server).await.expect("NATS answers"));
    let stream = jetstream.stream_by_subject(&*topic.name).await.expect("the topic has a stream");
    jetstream.delete_stream(stream).await.expect("it is deleted");
    assert_eq!(asked_without_an_id(&bed, &store.client, &topic).await, 1, "its first message is a new one");
    assert_eq!(all_tasks(&store.client).await.len(), 2);
    worker.stop().await;
}

#[cfg(feature = "kafka")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_in_a_topic_of_kafka_that_was_made_again_is_another_task() {
    use rdkafka::admin::{AdminClient, AdminOptions};
    use rdkafka::client::DefaultClientContext;

    if std::env::var("LONGHAUL_TEST_KAFKA").is_err() {
        eprintln!("skipped: needs a broker; set LONGHAUL_TEST_KAFKA or use ./dev test");
        return;
    }
    let Some(bed) = Bed::kafka().await else { return };
    // One partition, so that the first message of each topic is at the same place.
    let bed = bed.with("partitions=1");
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    assert_eq!(asked_without_an_id(&bed, &store.client, &topic).await, 1);
    let (login, rest) = bed.url.trim_start_matches("kafka://").split_once('@').expect("a user and a password");
    let (user, password) = login.split_once(':').expect("a user and a password");
    let server = rest.split_once('?').map_or(rest, |(server, _)| server);
    let admin: AdminClient<DefaultClientContext> = rdkafka::ClientConfig::new()
        .set("bootstrap.servers", server)
        .set("security.protocol", "sasl_plaintext")
        .set("sasl.mechanism", "PLAIN")
        .set("sasl.username", user)
        .set("sasl.password", password)
        .create()
        .expect("a client");
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    let deleted = admin.delete_topics(&[&topic.name], &options).await.expect("Kafka answers");
    assert!(deleted.iter().all(Result::is_ok), "{deleted:?}");
    assert_eq!(asked_without_an_id(&bed, &store.client, &topic).await, 1, "its first message is a new one");
    assert_eq!(all_tasks(&store.client).await.len(), 2);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_intake_that_ends_in_order_leaves_no_consumer_in_redis() {
    let Some(bed) = Bed::redis().await else { return };
    let store = store().await;
    let worker = worker(&store.client).await;
    let topic = bed.queue();
    assert_eq!(asked_without_an_id(&bed, &store.client, &topic).await, 1);
    let client = ::redis::Client::open(bed.url.as_str()).expect("a client");
    let mut direct = client.get_multiplexed_async_connection().await.expect("a connection");
    let mut info = ::redis::cmd("XINFO");
    info.arg("CONSUMERS").arg(&*topic.name).arg("longhaul");
    let consumers: Vec<::redis::Value> = info.query_async(&mut direct).await.expect("an answer");
    assert_eq!(consumers, []);
    worker.stop().await;
}
