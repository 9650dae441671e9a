//! Replies: the result of a task, taken to where its submit said.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Bed;
use common::receiver::until;
use longhaul::{
    Client, Delivery, DeliveryStatus, NewTask, Outbox, OutboxHandle, OutboxSettings, Replies, Reply, ReplyError,
    ReplyTo, Run, TaskError, TaskId, Worker,
};

on_every_store!(
    the_end_of_a_task_is_sent_to_its_destination,
    a_reply_that_fails_is_sent_again_under_the_same_id,
    a_reply_that_is_refused_is_dead_and_can_be_sent_again,
    a_reply_that_is_not_answered_in_time_is_sent_again,
    a_process_that_delivers_no_replies_leaves_them_to_others,
    a_task_has_a_reply_and_a_webhook_beside_each_other,
    a_task_says_where_its_result_goes,
    a_destination_that_a_program_does_not_take_is_refused_at_submit,
);

/// What came, and what is answered to the nth.
struct Queue {
    replies: Mutex<Vec<Reply>>,
    answer: fn(usize) -> Result<(), ReplyError>,
    hangs_first: bool,
}

impl Queue {
    fn answering(answer: fn(usize) -> Result<(), ReplyError>) -> Arc<Self> {
        Arc::new(Self { replies: Mutex::default(), answer, hangs_first: false })
    }

    fn taking_all() -> Arc<Self> {
        Self::answering(|_| Ok(()))
    }

    fn replies(&self) -> Vec<Reply> {
        self.replies.lock().expect("no panic").clone()
    }

    async fn got(&self, count: usize) -> Vec<Reply> {
        until("the replies", async || {
            let replies = self.replies();
            (replies.len() >= count).then_some(replies)
        })
        .await
    }
}

#[async_trait::async_trait]
impl Replies for Queue {
    async fn send(&self, reply: &Reply) -> Result<(), ReplyError> {
        let number = {
            let mut replies = self.replies.lock().expect("no panic");
            replies.push(reply.clone());
            replies.len() - 1
        };
        if self.hangs_first && number == 0 {
            std::future::pending::<()>().await;
        }
        (self.answer)(number)
    }
}

fn to(queue: &Arc<Queue>) -> OutboxSettings {
    let replies: Arc<dyn Replies> = Arc::<Queue>::clone(queue);
    let pause = Duration::from_millis(20);
    let settings = OutboxSettings { first_retry: pause, longest_retry: pause, ..OutboxSettings::default() };
    OutboxSettings { replies: Some(replies), ..settings }
}

async fn start(client: &Client, settings: OutboxSettings) -> OutboxHandle {
    Outbox::start(client, settings).await.expect("the outbox starts")
}

fn destination() -> ReplyTo {
    ReplyTo::new("results.shop").correlation_id("order-42")
}

/// A task with a reply that is over at once.
async fn ended(client: &Client) -> TaskId {
    client.announce(&["h"]).await.expect("announced");
    let id = client.submit(NewTask::new("h", &1).reply(destination())).await.expect("accepted").id;
    client.cancel(id, None).await.expect("cancelled");
    id
}

async fn delivery(client: &Client, id: TaskId, status: DeliveryStatus) -> Delivery {
    until("the delivery", async || {
        let mut all = client.deliveries(id).await.expect("the task is there");
        (all.len() == 1 && all[0].status == status).then(|| all.remove(0))
    })
    .await
}

async fn the_end_of_a_task_is_sent_to_its_destination(bed: Bed) {
    let queue = Queue::taking_all();
    let hello = async |run: Run, name: String| {
        run.publish("hello.said", &1).await?;
        Ok::<_, TaskError>(format!("Hello, {name}!"))
    };
    let worker = Worker::new(&bed.client).handler("hello", hello).start().await.expect("starts");
    let outbox = start(&bed.client, to(&queue)).await;
    let acme = bed.client.for_tenant("acme");
    let id = acme.submit(NewTask::new("hello", &"world").reply(destination())).await.expect("accepted").id;
    let plain = acme.submit(NewTask::new("hello", &"nobody")).await.expect("accepted").id;
    let reply = queue.got(1).await.remove(0);
    assert_eq!((reply.to.as_str(), reply.correlation_id.as_deref()), ("results.shop", Some("order-42")));
    assert_eq!((reply.tenant.as_str(), reply.task.id, reply.event.task_id), ("acme", id, id));
    assert_eq!(reply.event.kind, "task.completed");
    assert_eq!(reply.event.data["result"], "Hello, world!");
    assert_eq!(reply.task.result.expect("a result").get(), r#""Hello, world!""#);
    let delivered = delivery(&acme, id, DeliveryStatus::Delivered).await;
    assert_eq!((delivered.destination.as_str(), delivered.url.as_str()), ("reply", "reply:results.shop"));
    assert_eq!((delivered.id, delivered.attempts, delivered.http_status), (reply.id, 1, None));
    acme.wait(plain, common::PATIENCE).await.expect("it ends");
    outbox.stop().await;
    worker.stop().await;
    assert_eq!(queue.replies().len(), 1, "how it ended, and nothing else");
    assert_eq!(bed.client.outbox_stats().await.expect("the store answers").due, 0);
}

async fn a_reply_that_fails_is_sent_again_under_the_same_id(bed: Bed) {
    let queue = Queue::answering(|n| if n < 3 { Err(ReplyError::Failed("no broker".into())) } else { Ok(()) });
    let outbox = start(&bed.client, to(&queue)).await;
    let id = ended(&bed.client).await;
    let replies = queue.got(4).await;
    assert!(replies.iter().all(|reply| reply.id == replies[0].id && reply.to == "results.shop"));
    assert_eq!(delivery(&bed.client, id, DeliveryStatus::Delivered).await.attempts, 4);
    assert_eq!((outbox.counts().failed, outbox.counts().delivered), (3, 1));
    outbox.stop().await;
}

async fn a_reply_that_is_refused_is_dead_and_can_be_sent_again(bed: Bed) {
    let queue =
        Queue::answering(
            |n| {
                if n == 0 { Err(ReplyError::Refused("there is no such queue".into())) } else { Ok(()) }
            },
        );
    let outbox = start(&bed.client, to(&queue)).await;
    let id = ended(&bed.client).await;
    let dead = delivery(&bed.client, id, DeliveryStatus::Dead).await;
    assert_eq!(dead.error.as_deref(), Some("there is no such queue"));
    assert_eq!(bed.client.dead_deliveries(10).await.expect("listed").len(), 1);
    bed.client.redeliver(id, dead.id).await.expect("made due");
    let replies = queue.got(2).await;
    assert_eq!(replies[1].correlation_id.as_deref(), Some("order-42"), "sent as it was");
    assert_eq!((replies[1].id, replies[1].to.as_str()), (dead.id, "results.shop"));
    delivery(&bed.client, id, DeliveryStatus::Delivered).await;
    outbox.stop().await;
}

async fn a_reply_that_is_not_answered_in_time_is_sent_again(bed: Bed) {
    let queue = Arc::new(Queue { replies: Mutex::default(), answer: |_| Ok(()), hangs_first: true });
    let outbox = start(&bed.client, OutboxSettings { timeout: Duration::from_millis(100), ..to(&queue) }).await;
    let id = ended(&bed.client).await;
    queue.got(2).await;
    assert_eq!(delivery(&bed.client, id, DeliveryStatus::Delivered).await.attempts, 2);
    outbox.stop().await;
}

async fn a_process_that_delivers_no_replies_leaves_them_to_others(bed: Bed) {
    let without = start(&bed.client, OutboxSettings::default()).await;
    let id = ended(&bed.client).await;
    // Another line, of a webhook that is refused at once: when it was tried, the outbox has looked.
    let looked =
        bed.client.submit(NewTask::new("h", &2).webhook("http://127.0.0.1:1/")).await.expect("accepted").id;
    bed.client.cancel(looked, None).await.expect("cancelled");
    delivery(&bed.client, looked, DeliveryStatus::Failed).await;
    assert!(bed.client.deliveries(id).await.expect("the task is there").is_empty());
    assert!(bed.client.outbox_stats().await.expect("the store answers").due >= 1, "it is still to be sent");
    let queue = Queue::taking_all();
    let other = bed.another_client_or_same().await;
    let with = start(&other, to(&queue)).await;
    assert_eq!(queue.got(1).await[0].task.id, id);
    delivery(&bed.client, id, DeliveryStatus::Delivered).await;
    without.stop().await;
    with.stop().await;
}

async fn a_task_has_a_reply_and_a_webhook_beside_each_other(bed: Bed) {
    let receiver = common::receiver::Receiver::start().await;
    let queue = Queue::taking_all();
    let outbox = start(&bed.client, OutboxSettings { allow_loopback: true, ..to(&queue) }).await;
    bed.client.announce(&["h"]).await.expect("announced");
    let task = NewTask::new("h", &1).reply(destination()).webhook(receiver.url());
    let id = bed.client.submit(task).await.expect("accepted").id;
    bed.client.cancel(id, None).await.expect("cancelled");
    queue.got(1).await;
    let hooks = receiver.got(1).await;
    assert_eq!(hooks[0].json()["data"]["reply"]["to"], "results.shop");
    let all = until("both deliveries", async || {
        let all = bed.client.deliveries(id).await.expect("the task is there");
        (all.len() == 2).then_some(all)
    })
    .await;
    let mut destinations: Vec<&str> = all.iter().map(|delivery| delivery.destination.as_str()).collect();
    destinations.sort_unstable();
    assert_eq!(destinations, ["reply", "webhook"]);
    outbox.stop().await;
}

async fn a_task_says_where_its_result_goes(bed: Bed) {
    bed.client.announce(&["h"]).await.expect("announced");
    let asked = NewTask::new("h", &1).reply(destination()).key("once");
    let id = bed.client.submit(asked.clone()).await.expect("accepted").id;
    assert_eq!(bed.client.task(id).await.expect("there").reply, Some(destination()));
    let list = bed.client.list(&longhaul::Filter::default()).await.expect("listed");
    assert_eq!(list[0].reply, Some(destination()));
    let plain = bed.client.submit(NewTask::new("h", &2)).await.expect("accepted").id;
    assert_eq!(bed.client.task(plain).await.expect("there").reply, None);
    // The same key with another destination is another request.
    let mut other = asked;
    (other.id, other.reply) = (TaskId::new(), Some(ReplyTo::new("elsewhere")));
    assert!(bed.client.submit(other).await.is_err());
    let bad = NewTask::new("h", &1).reply(ReplyTo::new(""));
    assert!(bed.client.submit(bad).await.is_err());
}

async fn a_destination_that_a_program_does_not_take_is_refused_at_submit(bed: Bed) {
    let client = bed.client.clone();
    client.announce(&["h"]).await.expect("announced");
    let to = |to: &str| NewTask::new("h", &1).reply(ReplyTo::new(to));
    client.submit(to("anywhere")).await.expect("nobody said anything else");
    client.check_replies(Arc::new(|to| if to == "here" { Ok(()) } else { Err(format!("goes to '{to}'")) }));
    client.submit(to("here")).await.expect("it is allowed");
    let refused = |error: longhaul::Error| error.to_string().contains("reply goes to 'there'");
    assert!(refused(client.submit(to("there")).await.expect_err("it is not")));
    let other = client.for_tenant("other");
    let answers = other.submit_many(vec![to("here"), to("there"), NewTask::new("h", &1)]).await.expect("answers");
    let [Ok(_), Err(error), Ok(_)] = <[_; 3]>::try_from(answers).expect("three of them") else {
        panic!("the second one alone is refused");
    };
    assert!(refused(error));
    let schedule = longhaul::Schedule::every("s", Duration::from_secs(60), to("there"));
    assert!(refused(client.schedule(schedule).await.expect_err("its tasks would go there too")));
}
